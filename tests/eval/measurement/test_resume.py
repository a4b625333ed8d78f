"""A measurement that was killed goes on where it stopped: no batch is measured twice, and the report is the same."""

import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path

import pytest
from drafted import untrained
from headstart.configs.errors import BadInput
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.drafters.lookup import NgramDrafter, SuffixDrafter
from headstart.eval.measurement import measure
from headstart.eval.measurement import transformers_baseline as comparators
from headstart.eval.measurement.config import MeasureConfig
from headstart.eval.measurement.resume import BatchStore, identity
from headstart.eval.measurement.runner import Runner
from headstart.eval.measurement.transformers_baseline import compare_transformers
from headstart.eval.suites.prompts import Suite

PROMPTS = [[1, 5, 9], [1, 7, 8, 3], [1, 30, 31], [1, 40, 41], [1, 44, 3]]
CONFIG = MeasureConfig(setting=chain(3), max_new_tokens=8, num_repeats=2)
TIMES = re.compile(
    r"seconds|_ms$|speedup|bandwidth|copy_|^timing$|tokens_per_second|^ours_over|per_second|step_medians|disturbance"
)


def without_times(value):
    """Results or rounds without what a clock measured."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if not TIMES.search(key)}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def run(target, store, *, drafter=None, prompts=PROMPTS, on_batch=lambda: None, **changes):
    config = replace(CONFIG, **changes)
    drafter = drafter or NgramDrafter()
    return measure.measure(target, drafter, Suite("five", prompts), config, name="d", on_batch=on_batch, store=store)


class Killed(BaseException):
    pass


def killed_after(count):
    """A callback that ends everything at its count-th call."""
    calls = iter(range(1, 100))

    def tick():
        if next(calls) == count:
            raise Killed

    return tick


@pytest.fixture
def decoded(monkeypatch, warming_up):
    """The prompts of every batch that is decoded, in order, repeats and sides included."""
    seen = []
    begin = Runner.begin

    def counting(runner, rows, seed):
        seen.append(copy.deepcopy(rows))
        return begin(runner, rows, seed)

    monkeypatch.setattr(Runner, "begin", counting)
    return seen


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 3),
        ({"batch_size": 2}, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (({}, 1), ({}, 5), ({"temperature": 1.0}, 1))),
    ],
    ids=str,
)
def test_a_resumed_measurement_equals_one_in_one_go(count, changes, target, tmp_path, decoded):
    whole = run(target, None, **changes)
    num_batches = 3 if "batch_size" in changes else 5
    with pytest.raises(Killed), BatchStore(tmp_path) as store:
        run(target, store, on_batch=killed_after(count), **changes)
    decoded.clear()
    with BatchStore(tmp_path) as store:
        resumed = run(target, store, **changes)
    assert without_times([*resumed]) == without_times([*whole])
    left = num_batches - count
    assert len(decoded) == (left * 2 * 2 + 2 if left else 0), "two sides, two repeats, and the warm-up again"


def test_measured_figures_are_those_that_were_kept_times_included(target, tmp_path):
    with BatchStore(tmp_path) as store:
        first = run(target, store)
    with BatchStore(tmp_path) as store:
        assert run(target, store) == first


def test_transformers_goes_on_too(target, tmp_path, monkeypatch):
    def compare(store, on_prompt=lambda: None):
        suite = Suite("five", PROMPTS)
        return compare_transformers(target, NgramDrafter(), suite, CONFIG, name="d", on_prompt=on_prompt, store=store)

    whole = compare(None)
    with pytest.raises(Killed), BatchStore(tmp_path) as store:
        compare(store, killed_after(2))
    timed = []
    time_prompt = comparators.time_prompt

    def counting(*one, number, **how):
        timed.append(number)
        return time_prompt(*one, number=number, **how)

    monkeypatch.setattr(comparators, "time_prompt", counting)
    with BatchStore(tmp_path) as store:
        resumed = compare(store)
    assert timed == [2, 3, 4]
    assert without_times(resumed) == without_times(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_new_tokens": 7},
        pytest.param({"setting": chain(2)}, marks=pytest.mark.slow),
        pytest.param({"num_repeats": 1}, marks=pytest.mark.slow),
        pytest.param({"seed": 1}, marks=pytest.mark.slow),
        pytest.param({"prompts": [*PROMPTS[:4], [1, 44, 4]]}, marks=pytest.mark.slow),
        pytest.param({"drafter": NgramDrafter(2)}, marks=pytest.mark.slow),
        pytest.param({"drafter": SuffixDrafter()}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_settings_are_measured_afresh_and_lose_nothing(changes, target, tmp_path, decoded):
    with BatchStore(tmp_path) as store:
        run(target, store)
    before = len(decoded)
    with BatchStore(tmp_path) as store:
        run(target, store, **changes)
        assert len(decoded) > before + 2 * len(PROMPTS)
        store.finish()
    decoded.clear()
    with BatchStore(tmp_path) as store:
        run(target, store)
        assert decoded == [], "what the first measured is still there"
        store.finish()
    assert list(tmp_path.iterdir()) == []


def test_other_weights_are_another_drafter(target):
    head = untrained("medusa", target)
    same, other = copy.deepcopy(head), copy.deepcopy(head)
    parameter = next(other.parameters())
    parameter.data.view(-1)[-1] += 1e-6
    assert identity(head) == identity(same) != identity(other)
    assert identity(NgramDrafter()) == identity(NgramDrafter()) != identity(NgramDrafter(max_ngram=2))


# The file


def test_a_torn_last_line_is_dropped_and_its_batch_measured_again(target, tmp_path):
    with BatchStore(tmp_path) as store:
        whole = run(target, store)
    path = tmp_path / "measured.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for cut in (1, len(lines[-1]) // 2, len(lines[-1]) - 1):
        path.write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
        with BatchStore(tmp_path) as store:
            assert len(store) == 4
            assert without_times([*run(target, store)]) == without_times([*whole])
        assert len(path.read_bytes().splitlines()) == 5


def test_a_damaged_line_is_refused(tmp_path):
    (tmp_path / "measured.jsonl").write_text('{"key": "a", "batch": 0, "measured": {}}\nxx\n')
    with pytest.raises(BadInput, match=r"measured\.jsonl:2: damaged"), BatchStore(tmp_path):
        pass


def test_one_process_measures_into_a_folder(tmp_path):
    with BatchStore(tmp_path) as first:
        first.add("a", 0, {})
        with pytest.raises(BadInput, match="measured.jsonl: in use by another process"), BatchStore(tmp_path):
            pass


def test_nothing_is_written_before_a_batch_is_measured(tmp_path):
    with BatchStore(tmp_path / "new") as store:
        assert store.get("a", 0) is None
        store.finish()
    assert list(tmp_path.iterdir()) == []


# The command, killed

COUNTED = """
import os, sys
from headstart.eval.measurement.resume import BatchStore
from headstart.scripts import cli
add = BatchStore.add
def counted(self, key, batch, record):
    add(self, key, batch, record)
    with open(os.environ["COUNTER"], "a") as file:
        file.write(f"{key} {batch}\\n")
BatchStore.add = counted
sys.argv = ["headstart", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.soak
def test_kills_at_random_points_leave_the_report_as_it_would_be(saved_target, tmp_path):
    """kill -9 after random numbers of batches; both engines, a head's optimal tree, two suites, a prompt too long."""
    from headstart.heads.registry import save_head
    from headstart.heads.target import Target

    head = save_head(untrained("medusa", Target.load(saved_target)), tmp_path / "h")
    files = [tmp_path / f"{name}.jsonl" for name in ("one", "two")]
    for file in files:
        rows = [{"prompt": f"w{i} w{5 + i} w{30 + i}", "category": "even" if i % 2 else "odd"} for i in range(5, 13)]
        file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "w5 " * 250}]))
    line = f"eval --target {saved_target} --head {head} --drafter ngram --prompts {files[0]} --prompts {files[1]}"
    line += " --tree chain --tree optimal --tree-nodes 6 --compare transformers --repeats 2 --max-new-tokens 32"
    rng, counter = random.Random(3), tmp_path / "counter"

    def start(output):
        command = [sys.executable, "-c", COUNTED, *line.split(), "--output", str(output)]
        env = {**os.environ, "COUNTER": str(counter)}
        with (tmp_path / "said").open("ab") as said:
            return subprocess.Popen(command, env=env, stdout=said, stderr=said)

    output, kills = tmp_path / "killed", 0
    kept = output / "measured.jsonl"
    while kills < 4:
        process, wanted = start(output), num_lines(kept) + rng.randint(1, 6)
        while process.poll() is None and num_lines(kept) < wanted:
            time.sleep(0.01)
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    assert start(output).wait() == 0 and kills == 4, (tmp_path / "said").read_text()[-2000:]
    measured = counter.read_text().splitlines()
    assert len(measured) == len(set(measured)), "a batch was measured twice"
    assert len(measured) <= 2 + 6 * 2 * (1 + 2) and not kept.exists(), "two trees; all of ours at once, two of theirs"

    assert start(tmp_path / "whole").wait() == 0
    reports = [json.loads((folder / "report.json").read_text()) for folder in (output, tmp_path / "whole")]
    for one in (one for report in reports for one in report["results"]):
        assert one["num_prompts"] == 6 and [failed["prompt"] for failed in one["failed"]] == [8], "two shape the tree"
    # an optimal tree is shaped by step times, so only the chains of two measurements are alike
    chains = [[one for one in report["results"] if one["tree"] == "chain"] for report in reports]
    assert without_times(chains[0]) == without_times(chains[1])
    rounds = [read_rounds(folder) for folder in (output, tmp_path / "whole")]
    assert without_times(rounds[0]) == without_times(rounds[1])


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read_rounds(folder):
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [row for row in rows if row["tree"] == "chain"]


def test_a_drafter_in_the_memory_of_one_that_is_gone_has_its_own_digest(tmp_path):
    """As with `--adapter`, where each target has its own drafters, one after the other."""
    with BatchStore(tmp_path) as store:
        for most in range(20):  # of which most get the place of the one before
            assert store.digest_of(drafter := NgramDrafter(most + 1)) == identity(drafter)
            del drafter
