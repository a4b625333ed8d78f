"""Longrope: each token is the choice of the model's whole forward over its row, whose length decides the rotation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from drafted import untrained
from headstart.eval.decoding import loop as generating
from headstart.eval.decoding import replay
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import decode, generate
from headstart.eval.decoding.stopping import Stop
from headstart.eval.drafters.draft_model import DraftModelDrafter
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.drafters.sparse_self import SparseSelfDrafter
from headstart.eval.measurement.config import MeasureConfig
from headstart.eval.measurement.proof.baseline import check_baseline
from headstart.eval.measurement.proof.texts import first_not_replayed
from headstart.eval.measurement.runner import Runner
from headstart.eval.suites.prompts import PromptSource, Suite
from headstart.heads.drafting import DynamicTree
from headstart.heads.nn.documents import Documents
from headstart.heads.nn.layers import llama_config
from headstart.heads.target import Target
from headstart.heads.targets.row_rotary import RowRotary
from joining import joined_texts

CHANGE, NUM_NEW = 32, 20
LONGROPE: dict[str, Any] = {
    **{"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    "original_max_position_embeddings": CHANGE,
}
# short, one that grows long, one whose first round is the first long one, long, one token more than short
LENGTHS = [5, 21, CHANGE, 50, CHANGE + 1]
PROMPTS = [[1, *((7 * i * i + 3 * i + n) % 55 + 4 for i in range(n - 1))] for n in LENGTHS]
HOW: dict[str, Any] = {"max_new_tokens": NUM_NEW, "eos_token_ids": []}


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Target]) -> Target:
    return tiny_target("qwen3", rope_parameters=LONGROPE)


@torch.no_grad()
def own_text(target: Target, prompt: list[int]) -> list[int]:
    """By a whole forward of the model's own code for each token, without a cache."""
    text = list(prompt)
    for _ in range(NUM_NEW):
        text.append(int(target.model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def texts(target: Target) -> list[list[int]]:
    found = [own_text(target, prompt) for prompt in PROMPTS]
    assert all(len(set(text)) > 5 for text in found), "texts that could not tell right from wrong"
    return found


DRAFTERS: dict[str, Callable[[Target], Any]] = {
    "none": lambda target: None,
    "itself": DraftModelDrafter,
    "sparse itself": lambda target: SparseSelfDrafter(target, 32),
    "eagle3": lambda target: untrained("eagle3", target),
}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_chains_are_the_models_own_text_alone_and_in_a_batch(drafter, target, texts):
    how = {**HOW, "num_draft_tokens": None if drafter == "none" else 3}
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert generate(target, DRAFTERS[drafter](target), prompt, **how).token_ids == [text]
    assert generate(target, DRAFTERS[drafter](target), PROMPTS, **how).token_ids == texts


def test_trees_are_the_models_own_text(target, texts):
    tree = DynamicTree(num_nodes=7, depth=3, top_k=3)
    assert generate(target, untrained("eagle3", target), PROMPTS, tree=tree, **HOW).token_ids == texts


def test_rows_that_join_a_batch_later_are_the_models_own_text(target, texts, monkeypatch):
    """Also where a prompt begins like the one before it, whose cache is kept, and only one of the two is long."""
    prompts = [PROMPTS[3], PROMPTS[3][:25], *PROMPTS]
    wanted = [texts[3], own_text(target, PROMPTS[3][:25]), *texts]
    found = joined_texts(target, prompts, batch_size=2, max_new_tokens=NUM_NEW, stop=Stop(frozenset()))
    assert found == wanted


def test_sampled_rounds_end_at_the_change_too(target, texts):
    """Of the best token alone: then what is sampled is known, by rules that are not those of greedy decoding."""
    done = generate(target, NgramDrafter(), PROMPTS, temperature=1.0, top_k=1, num_draft_tokens=3, **HOW)
    assert done.token_ids == texts


@pytest.mark.slow
def test_recorded_rounds_go_over_the_change(target, texts, monkeypatch):
    monkeypatch.setattr(replay, "compiled", partial(replay.compiled, backend="eager"))  # traced whole, not compiled
    engine = Engine(target, NgramDrafter(), batch_size=3, max_length=64, num_draft_tokens=3, steps="compile")
    done = decode(engine, PROMPTS[:3], max_new_tokens=NUM_NEW, stop=Stop(frozenset()))
    assert done.token_ids == texts[:3] and None not in engine.replay.recorded.values()


def test_drafts_of_the_target_itself_are_accepted_on_both_sides(target):
    """Up to the last round: its drafts may go beyond the text's end."""
    for prompt in (PROMPTS[0][:4], PROMPTS[3], PROMPTS[4]):
        rounds = generate(target, DraftModelDrafter(target), prompt, num_draft_tokens=3, **HOW).rounds
        assert {one.num_accepted[0] for one in rounds[1:-1]} == {3}


def test_a_text_over_the_change_is_proved(target, texts):
    """What is measured is held against the model, and texts that differ are decoded once more."""
    sources = [PromptSource(i, f"prompt {i}") for i in range(3)]
    suite = Suite("three", PROMPTS[:3], sources=sources)
    config = MeasureConfig(setting=None, max_new_tokens=NUM_NEW, batch_size=3)
    check_baseline(Runner(target, None, suite.prompts, config), [suite])
    engine = Engine(target, NgramDrafter(), batch_size=3, max_length=64, num_draft_tokens=3)
    stop = Stop(frozenset())
    run = decode(engine, PROMPTS[:3], max_new_tokens=NUM_NEW, stop=stop)
    assert run.token_ids == texts[:3]
    assert first_not_replayed(engine, PROMPTS[:3], run, max_new_tokens=NUM_NEW, stop=stop) == [None] * 3


# Faults


def differing(target: Target, texts: list[list[int]]) -> list[int]:
    """The rows of a batch, drafted by the target itself, whose text is not the model's."""
    done = generate(target, DraftModelDrafter(target), PROMPTS, num_draft_tokens=3, **HOW)
    return [i for i, (text, own) in enumerate(zip(done.token_ids, texts, strict=True)) if text != own]


def test_without_reading_again_texts_over_the_change_are_others(target, texts, monkeypatch):
    assert differing(target, texts) == []
    monkeypatch.setattr(generating, "read_again", lambda *_, **how: None)
    assert differing(target, texts) == [1, 2]


def test_a_round_over_the_change_is_another_text(target, texts, monkeypatch):
    monkeypatch.setattr(RowRotary, "before_change", lambda self, num_accepted, start: num_accepted)
    assert 1 in differing(target, texts)


def test_the_longest_row_of_a_batch_does_not_decide(target, texts, monkeypatch):
    by_length = Target.by_length
    monkeypatch.setattr(Target, "by_length", lambda self, lengths: by_length(self, lengths.max().expand_as(lengths)))
    assert {0, 1} <= set(differing(target, texts))


# Training


def test_packed_texts_have_the_frequencies_that_they_have_alone(target):
    rows = [PROMPTS[3], PROMPTS[0], PROMPTS[2]]
    documents = Documents.of([[len(row) for row in rows]], num_positions=sum(map(len, rows)) + 40)
    whole = torch.tensor([sum(rows, []) + [0] * 40])
    alone = torch.cat([target.forward(torch.tensor([row])).post_norm for row in rows], 1)
    torch.testing.assert_close(target.forward(whole, documents=documents).post_norm[:, :-40], alone)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_heads_own_layers_do_not_depend_on_the_length(kind, tiny_target):
    rope = LONGROPE if kind == "longrope" else {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    head = untrained("eagle3", tiny_target("qwen3", rope_parameters=rope, max_position_embeddings=64))
    served = llama_config(head.target.config).rope_parameters
    assert served == {"rope_type": "default", "rope_theta": 500.0}
    few, many = (head.rotary.tables(num, like=torch.zeros(1)).cos for num in (16, 2048))
    assert torch.equal(few[:64], many[:64])


def test_drafts_beyond_the_context_leave_the_targets_frequencies_alone(tiny_target):
    """Dynamic ones grow with the longest position that is asked of them, by an MTP head as well."""
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    target = tiny_target("qwen3", rope_parameters=rope, max_position_embeddings=CHANGE)
    prompt = PROMPTS[1][: CHANGE - NUM_NEW]
    head = untrained("mtp", target)
    text = own_text(target, prompt)
    assert generate(target, head, prompt, num_draft_tokens=3, **HOW).token_ids == [text]
    assert target.base.rotary_emb.max_seq_len_cached == CHANGE
