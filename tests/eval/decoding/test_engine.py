"""Decoding ends where it should, counts what it did, and treats each row of a batch as if it were alone."""

from functools import cache
from typing import Any

import pytest
import torch
from drafted import own_text, untrained
from headstart.base.errors import BadInput
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import generate
from perturbing import perturb

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]


def perturbed(head_type, target, **changes):
    """A head whose drafts are sometimes right and sometimes wrong."""
    return perturb(untrained(head_type, target, **changes), 0.02, seed=3)


def huggingface(target, prompt, num_tokens):
    return written(target, tuple(prompt), num_tokens).copy()


@cache
def written(target, prompt, num_tokens):
    return own_text(target.model, list(prompt), num_tokens, eos_token_id=None)


def first_times(text):
    """Positions at which a token occurs for the first time."""
    return [i for i, token in enumerate(text) if token not in text[:i]]


# Where a text ends


def test_an_end_token_inside_an_accepted_block_ends_the_text(target, target_as_drafter):
    """Every draft is right, so each place of the block is tried: behind the prefill, as a draft, as the bonus."""
    num_draft, text = 3, huggingface(target, PROMPTS[0], 16)
    places, how = set[int](), dict[str, Any](max_new_tokens=16, num_draft_tokens=num_draft)
    for at in first_times(text):
        out = generate(target, target_as_drafter(target), PROMPTS[0], eos_token_ids=[text[at]], **how)
        assert out.token_ids == [text[: at + 1]]
        last = out.rounds[-1]
        assert sum(one.num_committed[0] for one in out.rounds) == at + 1, "nothing behind the end token counts"
        place = (at - 1) % (num_draft + 1)
        if at > 0:
            places.add(place)
            assert last.num_committed == [place + 1] == last.num_emitted
            assert last.num_accepted == [min(num_draft, place + 1)]
    assert places == set(range(num_draft + 1)), "the text must try every place"


@pytest.mark.parametrize("drafter", ["none", "perfect", "medusa", "eagle3"])
def test_max_new_tokens_is_exact(drafter, target, target_as_drafter):
    num_draft, text = 4, huggingface(target, PROMPTS[1], 7)
    which = {"none": None, "perfect": target_as_drafter(target)}.get(drafter, 0)
    which = perturbed(drafter, target) if which == 0 else which
    how = {"eos_token_ids": [], "num_draft_tokens": num_draft if which else None}
    for num_new in range(1, num_draft + 3):
        out = generate(target, which, PROMPTS[1], max_new_tokens=num_new, **how)
        assert out.token_ids == [text[:num_new]]
        assert sum(one.num_emitted[0] for one in out.rounds) == num_new


def test_the_targets_own_end_token_is_the_default(tiny_target):
    target = tiny_target("llama")
    text = huggingface(target, PROMPTS[0], 20)
    at = first_times(text)[3]
    target.model.generation_config.eos_token_id = [text[at], 60]
    assert generate(target, None, PROMPTS[0], max_new_tokens=20).token_ids == [text[: at + 1]]


# Rows of a batch


@pytest.fixture(scope="module")
def target_of(tiny_target):
    """target_of(family), made once."""
    return cache(tiny_target)


@pytest.mark.fast_only(family=["qwen3_moe"])  # others: test_matrix.py, tests/targets/kinds
def test_rows_that_end_at_different_times_equal_single_rows(family, target_of):
    """Every family, windows and learned norms included; with end tokens that stop some rows early, others never."""
    target = target_of(family)
    head_type = "medusa" if family in ("mistral", "qwen3") else "eagle3"  # the engine is the same for all
    changes: dict[str, Any] = {"feature_layers": [0, 2, 3]} if head_type == "eagle3" else {}
    texts = [huggingface(target, prompt, 26) for prompt in PROMPTS]
    eos = [texts[0][2], texts[1][9]]
    wanted = [text[: next((i + 1 for i, token in enumerate(text) if token in eos), 26)] for text in texts]
    assert len({len(text) for text in wanted}) > 1
    head = perturbed(head_type, target, **changes)
    out = generate(target, head, PROMPTS, max_new_tokens=26, eos_token_ids=eos)
    assert out.token_ids == wanted
    for i, prompt in enumerate(PROMPTS):
        alone = generate(target, head, prompt, max_new_tokens=26, eos_token_ids=eos)
        assert alone.token_ids == [wanted[i]]
        beside = [(r.num_accepted[i], r.num_committed[i]) for r in out.rounds if r.num_committed[i]]
        assert beside == [(r.num_accepted[0], r.num_committed[0]) for r in alone.rounds], "same rounds too"
    fresh = untrained(head_type, target, **changes)
    assert generate(target, fresh, PROMPTS, max_new_tokens=26, eos_token_ids=eos).token_ids == wanted


def test_a_prompt_may_be_a_tensor_a_list_or_many(target):
    text = huggingface(target, PROMPTS[0], 5)
    for prompt in (PROMPTS[0], [PROMPTS[0]], torch.tensor(PROMPTS[0]), torch.tensor([PROMPTS[0]])):
        assert generate(target, None, prompt, max_new_tokens=5, eos_token_ids=[]).token_ids == [text]


def test_a_text_may_fill_the_context_to_its_last_position(head_type, tiny_target):
    """Drafts that would lie beyond the context are made and thrown away."""
    target = tiny_target("llama", max_position_embeddings=24)
    head = perturbed(head_type, target)
    out = generate(target, head, PROMPTS[1], max_new_tokens=16, eos_token_ids=[])
    assert out.token_ids == [huggingface(target, PROMPTS[1], 16)]


# What is counted


def test_a_batch_of_texts_has_no_shifts_of_a_batch_with_pictures_before_it(target):
    """Without any, our kernels read and draft chains as they are."""
    engine = Engine(target, None, batch_size=1, max_length=32)
    engine.cache.set_shift(0, torch.tensor([0, 2]))
    engine.prefill(torch.tensor([PROMPTS[0]]), torch.tensor([3]))
    assert engine.cache.shift is None


@pytest.mark.parametrize("head_type", ["eagle3"])  # the engine is the same for all
def test_the_records_add_up(head_type, target):
    head = perturbed(head_type, target)
    texts = [huggingface(target, prompt, 23) for prompt in PROMPTS]
    out = generate(target, head, PROMPTS, max_new_tokens=23, eos_token_ids=[texts[2][11]])
    prefill, rounds = out.rounds[0], out.rounds[1:]
    assert prefill.num_drafted == 0 and prefill.num_accepted == [0] * 4
    assert prefill.num_committed == prefill.num_emitted == [1] * 4
    assert {one.num_drafted for one in rounds} == {head.max_draft_tokens or head.default_draft_tokens}
    for i, row in enumerate(out.token_ids):
        assert sum(one.num_emitted[i] for one in out.rounds) == len(row)
        written = 1
        for one in rounds:
            accepted, committed, emitted = one.num_accepted[i], one.num_committed[i], one.num_emitted[i]
            assert 0 <= accepted <= one.num_drafted and emitted <= committed
            assert committed == 0 if written == len(row) else committed in (accepted, accepted + 1)
            written += emitted
    cut = [r.num_emitted[i] < r.num_committed[i] for r in rounds for i in range(4)]
    assert sum(cut) <= 4, "only a row's last round can be cut by max_new_tokens"
    assert all(one.seconds > 0 for one in out.rounds)


def test_the_bonus_counts_and_the_baseline_commits_one_per_round(target, target_as_drafter):
    perfect = generate(
        target, target_as_drafter(target), PROMPTS[0], max_new_tokens=11, num_draft_tokens=4, eos_token_ids=[]
    )
    assert [(r.num_accepted, r.num_committed, r.num_emitted) for r in perfect.rounds] == [
        ([0], [1], [1]),
        ([4], [5], [5]),
        ([4], [5], [5]),
    ]
    baseline = generate(target, None, PROMPTS[0], max_new_tokens=11, eos_token_ids=[])
    assert [(r.num_drafted, r.num_accepted, r.num_committed) for r in baseline.rounds] == [(0, [0], [1])] * 11


# What is refused


NOTHING = [[], [[]], [[1, 2], []], torch.zeros(0, dtype=torch.long)]


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "problem"),
    [
        *((nothing, 7, "empty prompt: at least one token per row is needed") for nothing in NOTHING),
        ([[1], [1] * 250], 7, r"prompt 1: 250 tokens \+ 7 new.* exceed the context of 256"),
        ([1, 61], 7, "prompt 0: token id 61 is outside the vocabulary of 61"),
        ([1, -1], 7, "prompt 0: token id -1 is outside the vocabulary of 61"),
        ([1], 0, "max_new_tokens 0: expected at least 1"),
    ],
)
def test_what_cannot_be_decoded_is_refused(prompt, max_new_tokens, problem, target):
    with pytest.raises(BadInput, match=f"^{problem}$"):
        generate(target, None, prompt, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize(("head_type", "wrong"), [("medusa", [5, 0, -1]), ("eagle3", [0, -3])])
def test_a_chain_that_the_drafter_cannot_draft_is_refused(head_type, wrong, target):
    head = perturbed(head_type, target)
    for num_draft in wrong:
        with pytest.raises(BadInput, match=rf"^num_draft_tokens {num_draft}: this drafter drafts 1 to (4|any) tokens$"):
            generate(target, head, [1], num_draft_tokens=num_draft)
    head_draws = generate(target, perturbed("eagle3", target), [1], max_new_tokens=30, num_draft_tokens=12)
    assert head_draws.rounds[1].num_drafted == 12, "a recurrent head drafts further than it was trained"


def test_an_unknown_rule_is_refused(target):
    with pytest.raises(BadInput, match="^accept 'sometimes': expected one of exact$"):
        Engine(target, None, batch_size=1, max_length=8, accept="sometimes")
