"""A text that differs is proved, against the model and by a replay, or it is unexplained; no fault is proved."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from headstart.eval.decoding.draft_setting import DraftSetting, chain
from headstart.eval.decoding.loop import Generation
from headstart.eval.decoding.verify import ACCEPT_RULES, AcceptRule, exact
from headstart.eval.drafters.draft_model import DraftModelDrafter
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.measurement import measure as measuring
from headstart.eval.measurement.measure import measure
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.proof.lossless import Divergence, LosslessReport, compare_texts
from headstart.eval.suites.prompts import Suite
from headstart.heads.drafting.drafter import Drafter
from headstart.heads.drafting.trees import DynamicTree, Proposal
from headstart.targets.caches import cache as caches
from headstart.targets.cpu.build import kernels
from headstart.targets.cpu.decoder import CpuLayers
from headstart.targets.target import Target

PROMPTS = [[1, 5 + i, 9, (14 + 3 * i) % 61, 33, *range(20, 20 + i)] for i in range(16)]
TREE, PARENTS = DynamicTree(num_nodes=5, depth=3, top_k=2), [-1, -1, 1, 1, 3]


class Oracle(Drafter):
    """The target drafts for itself, and its tokens lie in a tree of PARENTS on the nodes 1, 3, 4, wrong ones beside."""

    default_draft_tokens, drafts_trees = 3, True

    def __init__(self, target):
        self.inner = DraftModelDrafter(target)

    def begin(self, **sizes):
        return self.inner.begin(**sizes)

    def commit(self, state, read):
        self.inner.commit(state, read)

    def propose(self, state, *, num_draft_tokens):
        tokens = self.inner.propose(state, num_draft_tokens=num_draft_tokens).tokens
        return Proposal(tokens, confidence=tokens % 7 / 6)

    def propose_tree(self, state, tree, *, draws=None):
        best = self.inner.propose(state, num_draft_tokens=3).tokens  # [B, 3]
        wrong = (best + 1) % 61
        tokens = torch.stack([wrong[:, 0], best[:, 0], wrong[:, 1], best[:, 1], best[:, 2]], 1)
        return Proposal(tokens, torch.tensor(PARENTS).expand(len(best), -1))


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    return getattr(torch, request.param)


@pytest.fixture(scope="module")
def target_in(tiny_model):
    """target_in(dtype): one whose best logits often lie close together, so that half precision decides by rounding."""

    @lru_cache
    def make(dtype):
        model = tiny_model("llama")
        with torch.no_grad():
            model.lm_head.weight[31:] = model.lm_head.weight[:30] * 1.002
        return Target.of(model.to(dtype), name="tiny", fingerprint="")

    return make


def measured(target, *, tree=None, batch_size=1, prompts=PROMPTS, drafter=None, verify_cost=None):
    setting = chain(3) if tree is None else DraftSetting("static", tree.depth, tree)
    setting = replace(setting, verify_cost=verify_cost)
    config = MeasureConfig(setting=setting, max_new_tokens=24, num_repeats=1, batch_size=batch_size)
    return measure(target, drafter or Oracle(target), Suite("many", prompts), config, name="oracle")[0]


def checked(target, **how):
    return measured(target, **how).lossless


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_in_float32_every_text_is_identical(tree, batch_size, target_in):
    """And the target's own path is accepted whole, in a chain and in a tree."""
    result = measured(target_in(torch.float32), tree=tree, batch_size=batch_size, prompts=PROMPTS[:7])
    assert result.lossless == LosslessReport(checked=7, identical=7) and result.acceptance_length == 4


@pytest.mark.skipif(kernels() is None, reason="no products of bf16 on this processor, or no compiler")
@pytest.mark.parametrize(("tree", "batch_size"), [(None, 1), (TREE, 1), (None, 3), (TREE, 3)])
def test_in_bfloat16_the_kernels_texts_are_identical(tree, batch_size, target_in):
    assert checked(target_in(torch.bfloat16), tree=tree, batch_size=batch_size) == LosslessReport(16, identical=16)


@pytest.mark.fast_only(tree=[None], cost=[None])
@pytest.mark.parametrize(
    ("tree", "batch_size", "cost"), [(None, 1, None), (TREE, 1, None), (TREE, 3, None), (None, 1, 0.1)]
)
def test_in_half_precision_every_difference_is_proved(tree, batch_size, cost, target_in, monkeypatch):
    """Those of rounds of several widths too."""
    monkeypatch.setattr(Target, "decoder", None)  # torch's products round differently in other shapes
    report = checked(target_in(torch.bfloat16), tree=tree, batch_size=batch_size, verify_cost=cost)
    assert report.checked == 16 and report.unexplained == 0, report.divergences
    if batch_size == 1:
        assert report.proved >= 3, "there is something to prove"
    assert all(divergence.is_proved for divergence in report.divergences)


def test_a_mixture_of_experts_in_half_precision_is_proved_on_these_prompts(tiny_model):
    """Which tokens share an expert's batch depends on rejected drafts too, so on others a difference may stay
    unexplained."""
    target = Target.of(tiny_model("qwen3_moe").bfloat16(), name="tiny-qwen3-moe", fingerprint="")
    report = checked(target, batch_size=4, prompts=PROMPTS[:4], drafter=NgramDrafter())
    assert report.checked == 4 and report.unexplained == 0, report.divergences


def second_best(drafted):
    """Accepts as the exact rule does, and its bonus is the target's second choice."""
    accepted = exact(drafted)
    rows = torch.arange(len(drafted.tokens))
    return replace(accepted, bonus=drafted.logits[rows, accepted.num_accepted].topk(2).indices[:, 1])


def takes_anything(drafted):
    """Accepts the whole draft."""
    accepted = exact(drafted)
    return replace(accepted, num_accepted=torch.full_like(accepted.num_accepted, drafted.depth))


@pytest.mark.fast_only(batch_size=[1])
@pytest.mark.parametrize("rule", [second_best, takes_anything])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_lossy_rule_is_caught(rule, batch_size, dtype, target_in, monkeypatch):
    monkeypatch.setitem(ACCEPT_RULES, "exact", AcceptRule("exact", rule))
    report = checked(target_in(dtype), batch_size=batch_size, prompts=PROMPTS[:5], drafter=NgramDrafter())
    assert report.unexplained == report.checked, report


def leaking(positions, **how):
    """Each query sees the next one too."""
    return VISIBILITY(positions + 1, **how)


VISIBILITY = caches.visibility_mask


@pytest.mark.slow
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_a_fault_that_the_replay_shares_is_not_proved(tree, dtype, target_in, monkeypatch):
    """Masks and moves in the cache are the same code on both sides, but what they wrongly let through differs."""
    target = target_in(dtype)
    if tree is None:
        monkeypatch.setattr(Target, "decoder", None)  # the kernels read no mask of a chain
        monkeypatch.setattr(caches, "visibility_mask", leaking)
    else:
        monkeypatch.setattr(caches.SlotCache, "move", lambda *_, **__: None)
    report = checked(target, tree=tree, drafter=None if tree else NgramDrafter())
    assert report.unexplained >= 8, report


@pytest.mark.slow
@pytest.mark.skipif(kernels() is None, reason="no products of bf16 on this processor, or no compiler")
def test_a_leak_of_the_kernels_is_not_proved(target_in, monkeypatch):
    read = CpuLayers.__call__

    def leaking(self, x, cache, *args, **how):
        return read(self, x, cache, *args, **how | {"last": cache.positions.expand(x.shape[:2]) + 1})

    monkeypatch.setattr(CpuLayers, "__call__", leaking)
    report = checked(target_in(torch.bfloat16), drafter=NgramDrafter())
    assert report.unexplained >= 8, report


# The comparison


def test_only_batches_with_a_difference_need_a_proof():
    def never():
        raise AssertionError

    assert compare_texts([[1, 2]], [[1, 2]], never, numbers=[0]) == LosslessReport(1, 1)
    report = compare_texts([[1, 2], [3], [4, 5]], [[1, 2], [4], [4, 6]], lambda: [None, None, 1], numbers=[5, 6, 7])
    assert report == LosslessReport(3, 1, 1, 1, [Divergence(6, 0, None), Divergence(7, 1, 1)])
    assert (report + report).divergences == report.divergences * 2 and (report + report).checked == 6


def test_each_text_of_a_prompt_is_compared_once():
    seen = set()
    how = {"numbers": [4, 4, 5], "seen": seen}
    report = compare_texts([[1, 2], [1, 2], [3]], [[1, 2], [1, 9], [3]], lambda: [None, 1, None], **how)
    assert report == LosslessReport(3, 2, 0, 1, [Divergence(4, 1, 1)])
    again = compare_texts([[1, 2], [1, 2], [3]], [[1, 2], [1, 9], [8]], lambda: [None, 1, None], **how)
    assert again == LosslessReport(1, 0, 1, 0, [Divergence(5, 0, None)]), "only what no earlier pass wrote"


def test_a_text_that_only_a_later_pass_gets_wrong_is_unexplained(target):
    """It is timed as the others are, and a rule that takes every draft is fast."""
    num_calls = 0

    def wrong_later(drafted):
        nonlocal num_calls
        num_calls += 1
        accepted = exact(drafted)
        if num_calls > 2 * 24:  # behind the warm-up and the first pass
            accepted.num_accepted = torch.full_like(accepted.num_accepted, drafted.depth)
        return accepted

    rule = AcceptRule("exact", wrong_later, takes_offered=True)
    config = MeasureConfig(max_new_tokens=24, num_repeats=6, accept=rule)
    result, _ = measure(target, NgramDrafter(), Suite("one", [[1, 5, 9]]), config, name="ngram")
    assert result.lossless.identical == 1 and result.lossless.unexplained >= 1, result.lossless


def test_a_text_that_ends_early_is_unexplained(target, monkeypatch):
    whole = measuring.measure_batches

    def shorter(*args, **kwargs):
        [(batches, failed)] = whole(*args, **kwargs)
        run = batches[0].drafted.runs[0]
        kept = len(run.token_ids[0]) - run.rounds[-1].num_emitted[0]
        batches[0].drafted.runs[0] = Generation([run.token_ids[0][:kept]], run.rounds[:-1])
        return [(batches, failed)]

    monkeypatch.setattr(measuring, "measure_batches", shorter)
    report = checked(target, prompts=PROMPTS[:1])
    assert report.unexplained == 1 and report.divergences[0].position is None
