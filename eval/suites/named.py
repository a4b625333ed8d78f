"""Suites by name: where their rows are found (first on disk, then on the hub), and how a row becomes a prompt."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from ...base.errors import BadInput, first_line
from ...targets.target import Target
from .prompts import DEFAULT_CHAT, ChatOptions, Row, Suite, build_suite, check_rows, file_rows

Rows = Iterator[tuple[str, Row]]  # with their origins

# Spec-Bench's first group is MT-bench, under MT-bench's own eight categories (Xia et al. 2024)
MT_BENCH = frozenset("writing roleplay reasoning math coding extraction stem humanities".split())
MBPP_TEST = range(11, 511)  # task ids of MBPP's test split (Austin et al. 2021)


@dataclass(frozen=True)
class NamedSuite:
    """files: names or patterns in the suites' folder, also as .gz; the first that exists is read. to_prompt: a row and
    its origin to a row for `prompt_ids`, or None to skip it. hub, config, split: of `datasets.load_dataset`; hub may be
    the address of a file of JSON lines."""

    files: tuple[str, ...]
    to_prompt: Callable[[Row, str], Row | None]
    hub: str
    config: str | None = None
    split: str = "test"


def value_of(row: Row, key: str, kind: type, *, origin: str, suite: str) -> Any:
    """A row's value. Raises BadInput if it is missing or of another type."""
    if not isinstance(row.get(key), kind):
        raise BadInput(f"{origin}: a row of {suite} needs `{key}`, found {', '.join(sorted(row)) or '(nothing)'}")
    return row[key]


def one_turn(row: Row, origin: str, *, key: str, suite: str) -> Row:
    """A row whose prompt is one text."""
    return {"turns": [value_of(row, key, str, origin=origin, suite=suite)]}


def mt_bench_prompt(row: Row, origin: str) -> Row:
    """A row with `turns`, as in FastChat, or with the list `prompt`, as in HuggingFaceH4/mt_bench_prompts."""
    key = "turns" if "turns" in row else "prompt"
    turns = value_of(row, key, list, origin=origin, suite="mt-bench")
    return {"turns": turns, "category": row.get("category")}


def spec_bench_prompt(row: Row, origin: str) -> Row:
    """A row in one of six groups: MT-bench's eight categories count as one."""
    turns = value_of(row, "turns", list, origin=origin, suite="spec-bench")
    category = value_of(row, "category", str, origin=origin, suite="spec-bench")
    return {"turns": turns, "category": "mt_bench" if category in MT_BENCH else category}


def mbpp_prompt(row: Row, origin: str) -> Row | None:
    """The task and its tests; None for tasks outside the test split, in a file with all 974."""
    if value_of(row, "task_id", int, origin=origin, suite="mbpp") not in MBPP_TEST:
        return None
    task = value_of(row, "text" if "text" in row else "prompt", str, origin=origin, suite="mbpp")
    tests = value_of(row, "test_list", list, origin=origin, suite="mbpp")
    return {"turns": ["\n".join([task, "The code should pass these tests:", *map(str, tests)])]}


SPEC_BENCH_URL = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
SUITES: dict[str, NamedSuite] = {
    "spec-bench": NamedSuite(
        ("spec_bench.jsonl", "spec_bench/question.jsonl"),
        spec_bench_prompt,
        SPEC_BENCH_URL,
        split="train",
    ),
    "mt-bench": NamedSuite(
        ("mt_bench.jsonl", "mt_bench/question.jsonl"), mt_bench_prompt, "philschmid/mt-bench", split="train"
    ),
    "humaneval": NamedSuite(  # the start of a Python function, to be completed
        ("humaneval.jsonl", "HumanEval.jsonl"),
        partial(one_turn, key="prompt", suite="humaneval"),
        "openai/openai_humaneval",
    ),
    "gsm8k": NamedSuite(  # the question, without examples
        ("gsm8k.jsonl", "gsm8k_test*.jsonl"),
        partial(one_turn, key="question", suite="gsm8k"),
        "openai/gsm8k",
        "main",
    ),
    "mbpp": NamedSuite(("mbpp.jsonl",), mbpp_prompt, "google-research-datasets/mbpp", "full"),
}


@dataclass(frozen=True)
class SuiteSpec:
    """`NAME` or `NAME=PATH`, as `--suite` takes them."""

    name: str
    path: Path | None = None


def parse_suite(spec: str) -> SuiteSpec:
    """Parse the value of `--suite`. Raises BadInput on an unknown suite or a path that does not exist."""
    name, has_path, path = spec.partition("=")
    if name not in SUITES:
        near = get_close_matches(name, SUITES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadInput(f"--suite {spec}: expected one of {', '.join(SUITES)}, or NAME=PATH{hint}")
    if has_path and not Path(path).is_file():
        raise BadInput(f"--suite {spec}: no such file")
    return SuiteSpec(name, Path(path) if has_path else None)


def load_named(
    spec: SuiteSpec,
    target: Target,
    *,
    folder: str | Path,
    max_new_tokens: int,
    limit: int | None = None,
    chat: ChatOptions = DEFAULT_CHAT,
) -> Suite:
    """Load a suite; rows come from spec.path, else the folder, else the hub.

    Raises: BadInput if rows are not found or malformed. If no row gives a prompt for this target, the suite has no
    prompts, and the reasons are in `failed`.
    """
    rows = asked_rows(spec.name, suite_rows(spec, Path(folder)))
    return build_suite(spec.name, rows, target, max_new_tokens=max_new_tokens, limit=limit, chat=chat)


def check_named(spec: SuiteSpec, *, limit: int | None = None) -> None:
    """Raises BadInput on rows of spec.path that cannot be read; what comes from the hub is not looked at."""
    if spec.path:
        check_rows(asked_rows(spec.name, file_rows(spec.path)), limit=limit)


def asked_rows(name: str, rows: Rows) -> Rows:
    """Of a suite's rows, as its authors publish them, those that it asks, as rows for `prompt_ids`."""
    pairs = ((origin, SUITES[name].to_prompt(row, origin)) for origin, row in rows)
    return ((origin, row) for origin, row in pairs if row is not None)


def suite_rows(spec: SuiteSpec, folder: Path) -> Rows:
    """A suite's rows, as published by its authors."""
    patterns = [name + end for name in SUITES[spec.name].files for end in ("", ".gz")]
    present = (path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file())
    path = spec.path or next(present, None)
    return hub_rows(spec.name, folder) if path is None else file_rows(path)


def hub_rows(name: str, folder: Path) -> Rows:
    """Rows from the hub. Raises BadInput, naming the local file to provide instead, if they cannot be loaded."""
    suite = SUITES[name]
    instead = f"put {folder / suite.files[0]} in place, or give --suite {name}=PATH"
    try:
        import datasets
    except ImportError as error:
        raise BadInput(f"--suite {name}: the hub needs datasets (pip install datasets); or {instead}") from error
    is_file = suite.hub.startswith("https:")
    files: dict[str, Any] = {"data_files": suite.hub} if is_file else {}
    try:
        loaded = list(datasets.load_dataset("json" if is_file else suite.hub, suite.config, split=suite.split, **files))
    except Exception as error:  # the hub, the network and the data set's own format each raise their own kind
        raise BadInput(f"--suite {name}: {suite.hub} does not load ({first_line(error)[:120]}); {instead}") from error
    return ((f"{suite.hub}[{i}]", dict(row)) for i, row in enumerate(loaded))
