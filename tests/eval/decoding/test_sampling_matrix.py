"""Sampled text follows the target's distribution where drafts are drawn, through the engine. Behind best guesses it is
the baseline's, token by token: tests/eval/proof/test_sampling_check.py.

Joint counts of four tokens over a vocabulary of 6 against exact enumeration, by chi-square; test_verify_sampling.py
does the same for the rules alone, with more rows.
"""

import pytest
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.eval.decoding import generate, verify
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.heads.drafting.trees import Draws, SampledChain

HOW = {"temperature": 1.0, "top_p": 0.9}


@pytest.fixture(scope="module")
def small(tiny_target):
    return tiny_target("llama", vocab_size=6, eos_token_id=None, num_hidden_layers=2)


@pytest.mark.fast_only(head_type=["eagle3"])
def test_heads_draw_without_changing_the_law(head_type, small, chi_square):
    assert chi_square(small, untrained(head_type, small, num_depths=2), tree=SampledChain(2), **HOW) < 1.5


def test_a_rule_that_needs_draft_probs_refuses_drafts_without_them(small):
    def rejection(drafted):
        assert drafted.draft_probs is not None
        return verify.exact(drafted)

    rule = verify.AcceptRule("rejection", rejection, needs_draft_probs=True)
    how = {"max_new_tokens": 8, "temperature": 1.0, "accept": rule}
    with pytest.raises(BadInput, match="needs draft probabilities, and the drafter gives none"):
        generate(small, NgramDrafter(), [1, 4, 3], **how)
    head = untrained("medusa", small, num_depths=2)
    assert generate(small, head, [1, 4, 3], tree=SampledChain(2), **how).token_ids[0]


def test_guesses_verified_as_if_drawn_are_caught(small, chi_square, monkeypatch):
    """What the first test must be able to see: the tokens are the draft's best guesses, but verified as drawn."""

    def guess(self, logits):
        return logits.argmax(-1), (logits / self.temperature).softmax(-1)

    monkeypatch.setattr(Draws, "__call__", guess)
    assert chi_square(small, untrained("medusa", small, num_depths=2), tree=SampledChain(2), **HOW) > 3
