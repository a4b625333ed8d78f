"""Sampled text follows the target's distribution: every way to draft x temperatures, with top-p, through the engine.

Joint counts of four tokens over a vocabulary of 6 against exact enumeration, by chi-square; test_verify_sampling.py
does the same for the rules alone, with more rows and trees.
"""

from typing import Any

import pytest
import torch
from drafted import untrained
from headstart.configs.errors import BadInput
from headstart.eval.decoding import engine, generate, sampling, verify
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.drafters.sparse_self import SparseSelfDrafter
from headstart.eval.measurement.tree_search import sampled_chain
from headstart.heads.drafter import Drafter
from headstart.heads.drafting import Draws, DynamicTree, Proposal, StaticTree
from headstart.heads.registry import HEADS

SAMPLED = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)), sampled=True)
TREES = {
    "chain": None,
    "static": StaticTree(SAMPLED.paths),
    "dynamic": DynamicTree(num_nodes=5, depth=2, top_k=2),
    "sampled": SAMPLED,
    "sampled-chain": sampled_chain(2),
}
HOWS = [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}]


@pytest.fixture(scope="module")
def small(tiny_target):
    return tiny_target("llama", vocab_size=6, eos_token_id=None)


# every head with every tree but for chains, which test_contract.py has; each with both temperatures
CASES = [("eagle3", "chain", HOWS[1])]
CASES += [
    (name, tree, HOWS[(i + j) % 2])
    for i, name in enumerate(sorted(HEADS))
    for j, tree in enumerate(TREES)
    if tree != "chain"
]


@pytest.mark.fast_only(name=["eagle3"], tree=["chain"])
@pytest.mark.parametrize(("name", "tree", "how"), CASES, ids=str)
def test_heads_draft_without_changing_the_law(tree, how, name, small, chi_square):
    assert chi_square(small, untrained(name, small, num_depths=2), tree=TREES[tree], **how) < 1.5


def test_ngrams_draft_without_changing_the_law(small, chi_square):
    assert chi_square(small, NgramDrafter(), **HOWS[1]) < 1.5


@pytest.mark.slow
def test_sparse_drafts_do_not_change_the_law(small, chi_square):
    assert chi_square(small, SparseSelfDrafter(small, 32), **HOWS[0]) < 1.5


class SampledChain(Drafter):
    """A head whose chains are drawn at random, with their draft probabilities."""

    def __init__(self, head, draws):
        self.head, self.draws = head, draws
        self.feature_layers, self.max_draft_tokens = head.feature_layers, head.max_draft_tokens

    def begin(self, *, batch_size, max_length):
        return self.head.begin(batch_size=batch_size, max_length=max_length)

    def commit(self, state, read):
        self.head.commit(state, read)

    def propose(self, state, *, num_draft_tokens):
        drafted = self.head.propose_tree(state, sampled_chain(num_draft_tokens), draws=self.draws)
        return Proposal(drafted.tokens, draft_probs=drafted.draft_probs)


def test_a_chain_with_draft_probs_is_verified_as_the_sampled_tree_of_one_path(small):
    """Token for token and round for round, as both use the same random numbers."""
    head, runs = untrained("medusa", small, num_depths=2), []
    for is_tree in (True, False):
        source = torch.Generator().manual_seed(3)
        drafter = head if is_tree else SampledChain(head, Draws(0.7, small.vocab_size, source))
        how: dict[str, Any] = {"tree": sampled_chain(2)} if is_tree else {"num_draft_tokens": 2}
        out = generate(small, drafter, [[1, 4, 3]] * 8, max_new_tokens=16, temperature=0.7, generator=source, **how)
        runs.append((out.token_ids, [one.num_accepted for one in out.rounds]))
    assert runs[0] == runs[1] and any(map(any, runs[0][1]))


def test_a_rule_that_needs_draft_probs_refuses_drafts_without_them(small):
    def rejection(drafted):
        assert drafted.draft_probs is not None
        return verify.exact(drafted)

    rule = verify.AcceptRule("rejection", rejection, is_lossless=True, needs_draft_probs=True)
    how = {"max_new_tokens": 8, "temperature": 1.0, "accept": rule}
    with pytest.raises(BadInput, match="needs draft probabilities, and the drafter gives none"):
        generate(small, NgramDrafter(), [1, 4, 3], **how)
    assert generate(small, untrained("medusa", small, num_depths=2), [1, 4, 3], tree=SAMPLED, **how).token_ids[0]


def test_the_thresholds_of_typical_acceptance_are_arguments(small):
    """At 0 every draft is accepted, at 1 none."""
    for epsilon, expected in ((0.0, 2), (1.0, 0)):
        rule = verify.ACCEPT_RULES["typical"].having(epsilon=epsilon, delta=100.0)
        how = {"max_new_tokens": 7, "temperature": 1.0, "num_draft_tokens": 2}
        out = generate(small, untrained("medusa", small, num_depths=2), [1, 4, 3], accept=rule, eos_token_ids=[], **how)
        assert {one.num_accepted[0] for one in out.rounds[1:]} == {expected}


# What these tests must be able to see


@pytest.mark.fast_only(tree=["sampled"])
@pytest.mark.parametrize("tree", ["sampled", "sampled-chain"])
def test_guesses_verified_as_if_drawn_are_caught(tree, small, chi_square, monkeypatch):
    """The children are the draft's best guesses, but verified as if they had been drawn."""
    monkeypatch.setattr(
        "headstart.heads.drafting.ranked",
        lambda logits, count, draws: (logits.topk(count, -1).indices, (logits / draws.temperature).softmax(-1)),
    )
    assert chi_square(small, untrained("medusa", small, num_depths=2), tree=TREES[tree], **HOWS[1]) > 3


@pytest.mark.parametrize(
    "tree", [pytest.param(tree, marks=[pytest.mark.slow] * (tree not in ("chain", "dynamic"))) for tree in TREES]
)
def test_a_bonus_token_without_logits_processing_is_caught(tree, small, chi_square, monkeypatch):
    """What follows the last drafted token of a path is sampled from the raw logits."""
    choose, probs = sampling.choose_tokens, sampling.target_probs
    first = 2 if "chain" in tree else 3  # the root has at most two children in these trees

    def raw_behind(logits, processed):
        return torch.cat([processed[:, :first], logits[:, first:].softmax(-1)], 1)

    def choose_wrong(logits, **how):
        if logits.shape[1] == 1:  # the prefill
            return choose(logits, **how)
        return sampling.sample(raw_behind(logits, probs(logits, how["sampling"])), how["generator"])

    monkeypatch.setattr(engine, "choose_tokens", choose_wrong)
    monkeypatch.setattr(verify, "choose_tokens", choose_wrong)
    monkeypatch.setattr(verify, "target_probs", lambda logits, *how: raw_behind(logits, probs(logits, *how)))
    assert chi_square(small, untrained("medusa", small, num_depths=2), tree=TREES[tree], **HOWS[0]) > 3
