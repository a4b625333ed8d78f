"""A measurement that was killed goes on where it stopped: no batch is measured twice, and the report is the same."""

import copy
import re
from dataclasses import asdict, is_dataclass, replace

import pytest
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.drafters.answers import Answers
from headstart.eval.drafters.hybrid import HybridDrafter
from headstart.eval.drafters.lookup import NgramDrafter, SuffixDrafter
from headstart.eval.measurement import measure
from headstart.eval.measurement.resume import BatchStore, identity
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.proof.runner import Runner
from headstart.eval.suites.prompts import Suite

PROMPTS = [[1, 5, 9], [1, 7, 8, 3], [1, 30, 31], [1, 40, 41], [1, 44, 3]]
CONFIG = MeasureConfig(setting=chain(3), max_new_tokens=8, num_repeats=2)
TIMES = re.compile(
    r"seconds|_ms$|speedup|bandwidth|copy_|^timing$|tokens_per_second|per_second|step_medians|disturbance"
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


def test_other_weights_or_answers_are_another_drafter(target):
    head = untrained("medusa", target)
    same, other = copy.deepcopy(head), copy.deepcopy(head)
    parameter = next(other.parameters())
    parameter.data.view(-1)[-1] += 1e-6
    assert identity(head) == identity(same) != identity(other)
    assert identity(HybridDrafter(head)) == identity(HybridDrafter(same)) != identity(HybridDrafter(other))
    assert identity(NgramDrafter()) == identity(NgramDrafter()) != identity(NgramDrafter(max_ngram=2))
    answers = [Answers([([3], [10, number])]) for number in (11, 12, 11)]
    digests = [identity(SuffixDrafter(answers=each)) for each in (*answers, None)]
    assert digests[0] == digests[2] and len(set(digests)) == 3


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
