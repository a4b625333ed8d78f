"""Drafters measured together share one baseline and take turns with it; a fault in one leaves the others alone."""

import pytest
import torch
from headstart.eval.decoding import generate
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.drafters.lookup import NgramDrafter, SuffixDrafter
from headstart.eval.figures.bandwidth import cache_bytes
from headstart.eval.measurement import measure as module
from headstart.eval.measurement import passes
from headstart.eval.measurement.measure import measure, measure_all, most_at_once
from headstart.eval.measurement.passes import decode_by_turns
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.proof.runner import Contender, Runner
from headstart.eval.suites.prompts import Suite

PROMPTS = [[1, 5, 9], [1, 7, 8, 3], [1, 30, 31]]
CONFIG = MeasureConfig(max_new_tokens=16, num_repeats=2)


class Broken(NgramDrafter):
    """Raises in its first round."""

    def propose(self, state, *, num_draft_tokens):
        raise RuntimeError("planted")


def contenders(*drafters):
    return [Contender(type(drafter).__name__, drafter, chain(3)) for drafter in drafters]


@pytest.mark.fast_only(changes=[{"batch_size": 2}])
@pytest.mark.parametrize("changes", [{"temperature": 1.0}, {"batch_size": 2}], ids=str)
def test_a_drafter_measured_beside_others_has_the_figures_it_has_alone(changes, target):
    config = MeasureConfig(max_new_tokens=16, num_repeats=2, **changes)
    suite = Suite("three", PROMPTS)
    both = measure_all(target, contenders(NgramDrafter(), SuffixDrafter()), suite, config)
    for drafter, (result, rows) in zip((NgramDrafter(), SuffixDrafter()), both, strict=True):
        alone, rows_alone = measure(
            target, drafter, suite, MeasureConfig(**{**vars(config), "setting": chain(3)}), name=result.drafter
        )
        for key in ("acceptance_length", "num_tokens", "num_rounds", "lossless", "num_draft_tokens", "sampling_check"):
            assert getattr(result, key) == getattr(alone, key), key
        assert [len(row["rounds"]) for row in rows] == [len(row["rounds"]) for row in rows_alone]


@pytest.mark.parametrize("at_once", [2, 1])
def test_the_baseline_is_decoded_once_for_all_drafters_that_memory_holds(at_once, target, monkeypatch, warming_up):
    begun, begin = [], Runner.begin
    monkeypatch.setattr(module, "most_at_once", lambda *_: at_once)
    monkeypatch.setattr(Runner, "begin", lambda self, *args: begun.append(self.drafter) or begin(self, *args))
    suite = Suite("three", PROMPTS)
    (ngram, _), (suffix, _) = measure_all(target, contenders(NgramDrafter(), SuffixDrafter()), suite, CONFIG)
    assert (ngram.drafter, suffix.drafter) == ("NgramDrafter", "SuffixDrafter")
    each = 3 * 2 + 1  # a warm-up and two repeats
    assert sum(drafter is None for drafter in begun) == (3 - at_once) * each and len(begun) == (5 - at_once) * each
    assert (ngram.timing.baseline_ttft_ms == suffix.timing.baseline_ttft_ms) == (at_once == 2)


def test_sides_decode_a_portion_each_by_turns(target, monkeypatch):
    """So a slow stretch of the machine meets every side. The order is reversed with every portion."""
    monkeypatch.setattr(passes, "PORTION", 4)
    runners = [Runner(target, None, PROMPTS, CONFIG), contenders(SuffixDrafter())[0].runner(target, PROMPTS, CONFIG)]
    order, advance = [], passes.Decoding.advance

    def noting(self):
        order.append((self.engine.drafter is not None, self.num_new))
        advance(self)

    monkeypatch.setattr(passes.Decoding, "advance", noting)
    turns = decode_by_turns(runners, PROMPTS[:1], 0, first=1)
    sides = [drafts for i, (drafts, _) in enumerate(order) if i == 0 or order[i - 1][0] != drafts]
    assert sides[:4] == [True, False, True, False] and len(sides) >= 4
    starts = [num for i, (drafts, num) in enumerate(order) if not drafts and i and order[i - 1][0]]
    assert starts == [0, 8], "the baseline goes on where its portions ended, two on end as the order is reversed"
    text = generate(target, None, PROMPTS[0], max_new_tokens=16).token_ids
    assert [turn.decoding and turn.decoding.generation.token_ids for turn in turns] == [text, text]


def test_a_drafter_that_raises_leaves_the_others_figures_alone(target):
    (ngram, _), (broken, rows) = measure_all(
        target, contenders(NgramDrafter(), Broken()), Suite("three", PROMPTS), CONFIG
    )
    assert ngram.num_prompts == 3 and not ngram.failed
    assert broken.num_prompts == 0 and [prompt.prompt for prompt in broken.failed] == [0, 1, 2] and not rows
    assert broken.failed[0].reason == "RuntimeError: planted"


def test_a_gpu_holds_the_caches_of_all_sides_in_half_of_its_free_memory(target, monkeypatch):
    config, suite = MeasureConfig(max_new_tokens=16, batch_size=2), Suite("three", PROMPTS)
    both = contenders(NgramDrafter(), SuffixDrafter())
    assert most_at_once(target, both, suite, config) > 100
    monkeypatch.setattr(type(target), "device", torch.device("cuda"))
    per_side = 2 * cache_bytes(target, 4 + 16)
    for free, expected in ((2 * 5 * per_side, 4), (per_side, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 10 * free))
        assert most_at_once(target, both, suite, config) == expected
