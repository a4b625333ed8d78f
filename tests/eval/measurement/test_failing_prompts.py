"""A prompt that cannot be decoded is named with its reason, and all figures are those of the others."""

from dataclasses import replace

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.measurement.measure import measure
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.report.page import render
from headstart.eval.report.results.document import build_report
from headstart.eval.suites.prompts import FailedPrompt, Suite

BAD = 13  # the token that a planted fault stumbles over
PROMPTS = [[1, 5, 9], [1, BAD, 8], [1, 30, 31], [1, 40, 41]]
CONFIG = MeasureConfig(setting=chain(3), max_new_tokens=8, num_repeats=1)


class Stumbling(NgramDrafter):
    """Raises on prompts whose second token is BAD."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def commit(self, state, read):
        if ((read.tokens[:, 1] == BAD) & (read.start == 0)).any():
            raise self.error
        super().commit(state, read)


def run(target, error, prompts=PROMPTS, **changes):
    config = replace(CONFIG, **changes)
    return measure(target, Stumbling(error), Suite("four", prompts), config, name="ngram")


@pytest.mark.parametrize(
    ("place", "error", "reason"),
    [
        (0, RuntimeError("planted\nand more"), "RuntimeError: planted"),
        (1, ValueError("planted"), "ValueError: planted"),
        (3, torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_the_others_stand(place, error, reason, target):
    prompts = [one for one in PROMPTS if BAD not in one]
    prompts.insert(place, PROMPTS[1])
    entry, rounds = run(target, error, prompts)
    clean, _ = run(target, None, [one for one in prompts if BAD not in one])
    assert entry.failed == [FailedPrompt(place, f"prompt {place}", reason)]
    kept = ("num_prompts", "num_tokens", "num_rounds", "acceptance_length", "acceptance_rate", "by_context")
    assert all(getattr(entry, key) == getattr(clean, key) for key in kept)
    assert entry.lossless.identical == entry.lossless.checked == 3
    assert {row["batch"] for row in rounds} == set(range(4)) - {place}


def test_a_batch_fails_as_a_whole(target):
    entry, _ = run(target, ValueError("planted"), batch_size=2)
    assert [one.prompt for one in entry.failed] == [0, 1] and entry.num_prompts == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BadInput("a setting that cannot be")])
def test_what_is_no_fault_of_a_prompt_ends_the_measurement(error, target):
    with pytest.raises(type(error)):
        run(target, error)


def test_divergences_keep_the_number_of_their_prompt(target, monkeypatch):
    from headstart.eval.measurement import summary as module
    from headstart.eval.proof.lossless import Divergence, LosslessReport

    def compared(*_, numbers, seen):
        return LosslessReport(1, 0, 0, 1, [Divergence(numbers[0], 4, 4)])

    monkeypatch.setattr(module, "compare_texts", compared)
    entry, _ = run(target, RuntimeError("planted"))
    assert entry.lossless.divergences[1].prompt == 2, "the second that was measured is the suite's third"


def test_where_all_fail_the_entry_is_empty_and_still_a_report(target):
    entry, rounds = run(target, RuntimeError("planted"), PROMPTS[1:2])
    assert rounds == [] and entry.num_prompts == 0 and entry.speedup is None and entry.timing.ttft_ms is None
    other, _ = run(target, None, [PROMPTS[0], PROMPTS[2]])
    page = render(build_report(target, [entry, other]))
    assert "Prompts that failed, 1 of 1" in page and "RuntimeError: planted" in page
