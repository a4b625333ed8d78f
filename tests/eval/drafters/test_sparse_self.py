"""The target drafts for itself over few keys: lossless, fully accepted where all keys fit, reading only true ones."""

from typing import Any

import pytest
import torch
from drafted import own_text
from headstart.configs.errors import BadInput
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import decode, generate
from headstart.eval.decoding.stopping import Stop
from headstart.eval.drafters.sparse_self import NUM_OBSERVED, NUM_SINKS, SparseSelfDrafter
from headstart.eval.measurement.metrics import acceptance
from headstart.heads.decoders.cache import SlotCache
from headstart.heads.target import Target

LENGTHS = (90, 1, 60, 25)


def prompts(*lengths: int, vocab_size: int = 61) -> list[list[int]]:
    source = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocab_size, (length,), generator=source).tolist() for length in lengths]


@pytest.mark.slow
def test_greedy_text_is_the_target_s_own(family, tiny_target):
    """Rows shorter and longer than the budget, several times round the ring."""
    target, rows = tiny_target(family), prompts(*LENGTHS)
    expected = [own_text(target.model, row, 40) for row in rows]
    how: dict[str, Any] = {"max_new_tokens": 40, "num_draft_tokens": 3, "eos_token_ids": []}
    done = generate(target, SparseSelfDrafter(target, 32), rows, **how)
    assert done.token_ids == expected
    accepted = [num for one in done.rounds[1:] for num in one.num_accepted]
    assert 0 in accepted and 3 in accepted, "a case in which nothing is accepted, or all, shows little"
    alone = generate(target, SparseSelfDrafter(target, 32), rows[0], **how)
    assert alone.token_ids == expected[:1]


@pytest.mark.slow
def test_where_the_budget_holds_the_context_everything_is_accepted(family, tiny_target):
    target, rows = tiny_target(family), prompts(*LENGTHS)
    how: dict[str, Any] = {"max_new_tokens": 41, "num_draft_tokens": 4, "eos_token_ids": []}
    for budget in (136, 4096):  # the first is 90 + 41 tokens, and drafts behind them
        done = generate(target, SparseSelfDrafter(target, budget), rows, **how)
        counted = acceptance(done.rounds, num_draft_tokens=4)
        assert (counted.length, counted.rate) == (5.0, [1.0] * 4)


def copied(cache: Any) -> list[list[torch.Tensor]]:
    """Keys and values of each layer."""
    return [[layer.keys.clone(), layer.values.clone()] for layer in cache.layers]


class Watched(SparseSelfDrafter):
    """Shows what its cache holds whenever it drafts."""

    def __init__(self, target: Target, budget: int):
        super().__init__(target, budget)
        self.shown: list[dict[str, Any]] = []
        self.whole = SlotCache(num_layers=0, max_length=0)

    def commit(self, state, read):
        super().commit(state, read)
        assert read.cache is not None
        self.whole = read.cache

    def propose(self, state, *, num_draft_tokens):
        held, true = copied(state.cache), copied(self.whole)
        proposal = super().propose(state, num_draft_tokens=num_draft_tokens)
        base, position = state.cache.base.clone(), state.position.clone()
        self.shown.append({"held": held, "true": true, "base": base, "position": position, "cache": state.cache})
        return proposal


def test_the_cache_holds_the_target_s_own_keys_and_values(family, tiny_target):
    """Of committed tokens in the ring, exactly; the chosen ones are distinct tokens of the row, sinks first."""
    target, rows = tiny_target(family), prompts(*LENGTHS)
    drafter = Watched(target, 32)
    generate(target, drafter, rows, max_new_tokens=24, num_draft_tokens=3, eos_token_ids=[])
    for one in drafter.shown:
        cache = one["cache"]
        for row, (base, pending) in enumerate(zip(one["base"].tolist(), one["position"].tolist(), strict=True)):
            recent = torch.arange(max(base, pending - cache.num_visible + 1), max(base, pending))
            slots = cache.num_chosen + (recent - base) % cache.num_recent
            for held, true in zip(one["held"], one["true"], strict=True):
                for ours, theirs in zip(held, true, strict=True):
                    assert torch.equal(ours[row][:, slots], theirs[row][:, recent])
            count = min(base, pending, cache.num_chosen)
            for layer, ((ours, _), (theirs, _)) in enumerate(zip(one["held"], one["true"], strict=True)):
                same = (ours[row][:, :count, None] == theirs[row][:, None, :pending]).all(-1)  # [Nkv, C, pending]
                assert (same.sum(-1) == 1).all()
                places = same.int().argmax(-1)  # [Nkv, C]
                assert (places.diff() > 0).all()
                if target.window_of(layer) is None:
                    assert (places[:, :NUM_SINKS] == torch.arange(min(NUM_SINKS, count))).all()


def test_the_keys_chosen_are_those_that_the_prompt_s_end_attends_to(tiny_model):
    """Against the attention that transformers' eager implementation reports for the whole prompt."""
    target = Target(tiny_model("llama"), name="tiny", fingerprint="")
    [row] = prompts(90)
    drafter = Watched(target, 32)
    generate(target, drafter, [row], max_new_tokens=2, num_draft_tokens=3, eos_token_ids=[])
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    attention = model(torch.tensor([row]), output_attentions=True).attentions  # [1, N, T, T] per layer
    one = drafter.shown[0]
    base, num_chosen = one["base"].item(), one["cache"].num_chosen
    assert base == 90 - 8
    for layer, probs in enumerate(attention):
        mass = probs[0].unflatten(0, (2, -1)).sum(1)[:, -NUM_OBSERVED:].sum(1)[:, :base]  # [Nkv, base]
        mass[:, :NUM_SINKS] = torch.inf
        wanted = mass.topk(num_chosen, -1).indices.sort(-1).values
        for head in range(2):
            assert torch.equal(
                one["held"][layer][0][0, head, :num_chosen], one["true"][layer][0][0, head, wanted[head]]
            )


def test_an_engine_forgets_the_texts_before(target):
    drafter, (long, short) = SparseSelfDrafter(target, 32), prompts(90, 20)
    engine = Engine(target, drafter, batch_size=1, max_length=120, num_draft_tokens=3)
    stop = Stop.of(target, eos_token_ids=[])
    for row in (long, short, long):
        found = decode(engine, [row], max_new_tokens=20, stop=stop)
        fresh = generate(target, drafter, [row], max_new_tokens=20, num_draft_tokens=3, eos_token_ids=[])
        assert [r.num_accepted for r in found.rounds] == [r.num_accepted for r in fresh.rounds]


def test_drafts_do_not_touch_the_target_s_cache(target):
    """Also what is read again to choose keys leaves it as it is, to the bit."""
    drafter, rows = SparseSelfDrafter(target, 32), prompts(70, 40)
    engine = Engine(target, drafter, batch_size=2, max_length=120, num_draft_tokens=3)
    kept: list[torch.Tensor] = []
    commit_prompts, draft = engine.commit_prompts, engine.draft

    def untouched(step):
        def run(*arguments):
            kept[:] = sum(copied(engine.cache), [])
            result = step(*arguments)
            assert all(torch.equal(a, b) for a, b in zip(kept, sum(copied(engine.cache), []), strict=True))
            return result

        return run

    engine.commit_prompts, engine.draft = untouched(commit_prompts), untouched(draft)  # pyright: ignore
    decode(engine, rows, max_new_tokens=12, stop=Stop.of(target, eos_token_ids=[]))
    assert kept


def test_more_drafts_than_the_ring_holds_are_refused(target):
    with pytest.raises(BadInput, match="num_draft_tokens 8: a budget of 32 keys has no room"):
        generate(target, SparseSelfDrafter(target, 32), [[1, 5]], max_new_tokens=4, num_draft_tokens=8)
