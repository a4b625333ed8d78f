"""Sampled text follows the target's distribution: every way to draft x temperatures, with top-p, through the engine.

Joint counts of four tokens over a vocabulary of 6 against exact enumeration, by chi-square; test_verify_sampling.py
does the same for the rules alone, with more rows and trees.
"""

import pytest
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS
from headstart.eval.decoding import generate, verify
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.heads.drafting.trees import Draws, DynamicTree, SampledChain

TREES = {
    "chain": None,
    "dynamic": DynamicTree(num_nodes=5, depth=2, top_k=2),
    "sampled-chain": SampledChain(2),
}
HOWS = [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}]


@pytest.fixture(scope="module")
def small(tiny_target):
    return tiny_target("llama", vocab_size=6, eos_token_id=None)


# every head with every tree but for chains, which test_sampling_check.py has; each with both temperatures
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


def test_a_rule_that_needs_draft_probs_refuses_drafts_without_them(small):
    def rejection(drafted):
        assert drafted.draft_probs is not None
        return verify.exact(drafted)

    rule = verify.AcceptRule("rejection", rejection, needs_draft_probs=True)
    how = {"max_new_tokens": 8, "temperature": 1.0, "accept": rule}
    with pytest.raises(BadInput, match="needs draft probabilities, and the drafter gives none"):
        generate(small, NgramDrafter(), [1, 4, 3], **how)
    assert generate(small, untrained("medusa", small, num_depths=2), [1, 4, 3], tree=SampledChain(2), **how).token_ids[
        0
    ]


# What these tests must be able to see


def test_guesses_verified_as_if_drawn_are_caught(small, chi_square, monkeypatch):
    """The tokens are the draft's best guesses, but verified as if they had been drawn."""

    def guess(self, logits):
        return logits.argmax(-1), (logits / self.temperature).softmax(-1)

    monkeypatch.setattr(Draws, "__call__", guess)
    assert chi_square(small, untrained("medusa", small, num_depths=2), tree=SampledChain(2), **HOWS[1]) > 3
