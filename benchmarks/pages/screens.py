"""Screens of 80 columns at the end of commands, in docs/screens.md: from shipped reports, and of a toy head.

    python -m headstart.benchmarks.pages.screens

A test finds the page stale where a screen has changed since.
"""

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ...base.files import write_text
from ...engines.heads import build_head, save_head
from ...engines.servers.how_to_serve import how_to_serve
from ...eval.report.console import results_table
from ...eval.report.recommendation import best_deployable, conclude
from ...eval.report.results.document import read_report
from ...eval.report.screen import screen_lines
from ...heads.eagle3 import Eagle3Config
from ...scripts.export_command import check, export
from ...scripts.unattended.page import concluded
from ...scripts.unattended.running.journal import Decision
from ...targets.target import Target

PAGE, RESULTS = Path("docs/screens.md"), Path("docs/results")
INTRO = """# What will I see on the screen?

`auto`, `eval`, `plan`, `refit` and `compare` end with what their pages begin with: what to deploy, how much faster,
where not, and how to serve it; then one table. `--verbose` of `eval` adds a line of figures for each result; all are
on the page. The texts here are made by `python -m headstart.benchmarks.pages.screens`.
"""


def main() -> None:
    write_text(PAGE, page())


def page() -> str:
    """The whole page."""
    parts = [INTRO]
    for title, command, lines in screens():
        typed = command.replace("\n", "\n$ ") if "\\" not in command else command
        parts.append("\n".join([f"## {title}", "", "```text", f"$ {typed}", *lines, "```", ""]))
    return "\n".join(parts)


def screens() -> list[tuple[str, str, Sequence[str]]]:
    """Title, what is typed, and what is shown at the end."""
    return [
        ("The quickstart: `make quickstart`, step 4", QUICKSTART, quickstart()),
        ("All of it in one run", AUTO, auto()),
        ("Two heads, on a GPU", TWO_HEADS, two_heads()),
        ("A head for an engine, and its check", EXPORT, export_and_check()),
    ]


QUICKSTART = """headstart eval --target runs/quickstart/target --drafter head:runs/quickstart/eagle3/final@4 \\
    --drafter suffix:ANSWERS.jsonl --drafter hybrid:runs/quickstart/eagle3/final:ANSWERS.jsonl \\
    --prompts orders.jsonl --prompts contrast.jsonl --output runs/quickstart/greedy"""


def quickstart() -> list[str]:
    """Of a run of the quickstart on two CPU cores."""
    results = read_report(RESULTS / "quickstart" / "report.json").results
    best = best_deployable(results)
    assert best is not None
    answers = "runs/quickstart/data/answers/answers.jsonl"
    length, target = best.num_draft_tokens, "runs/quickstart/target"
    commands = how_to_serve(f"suffix:{answers}", length, has_tree=False, target=target)
    conclusion = conclude(results, commands)
    return screen_lines(conclusion, results_table(results), "The page: runs/quickstart/greedy/report.html")


AUTO = "headstart auto --target MODEL --prompts PROMPTS.jsonl --budget 4m --output runs/auto"


def auto() -> list[str]:
    """Of a run of four minutes on the same cores."""
    decision = Decision(**json.loads((RESULTS / "quickstart" / "auto.json").read_text())["decision"])
    results = read_report(RESULTS / "quickstart" / "auto_report.json").results
    return screen_lines(concluded(decision, "", ""), results_table(results), "The page: runs/auto/auto.html")


TWO_HEADS = """headstart eval --target MODEL --head runs/eagle3/final --head runs/dspark/final --prompts orders.jsonl \\
    --output runs/heads"""


def two_heads() -> list[str]:
    """Of the heads that were trained on an H200."""
    results = [one for one in read_report(RESULTS / "gpu" / "report.json").results if "suffix" not in one.drafter]
    return screen_lines(conclude(results), results_table(results), "The page: runs/heads/report.html")


EXPORT = "headstart export runs/mine served/mine --to vllm\nheadstart check served/mine"


def export_and_check() -> list[str]:
    """Of an untrained head of a toy target."""
    with in_a_folder() as folder:
        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=64)).save_pretrained("MODEL")
        target = Target.load("MODEL", dtype="float32", device="cpu")
        save_head(build_head(Eagle3Config(), target), Path("runs/mine/final"))
        lines = said(
            lambda: export(Path("runs/mine"), Path("served/mine"), to="vllm"), lambda: check(Path("served/mine"))
        )
        return [line.replace(f"{folder}/", "") for line in lines]


@contextlib.contextmanager
def in_a_folder() -> Iterator[str]:
    """Works in a new folder, which is removed; gives its path."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        os.chdir(folder)
        try:
            yield os.getcwd()
        finally:
            os.chdir(before)


def said(*commands: Callable[[], object]) -> Sequence[str]:
    """The lines that they print."""
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        for command in commands:
            command()
    return screen.getvalue().splitlines()


if __name__ == "__main__":
    main()
