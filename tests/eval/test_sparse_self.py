"""The target that drafts for itself over few keys: lossless, fully accepted where all keys fit, its own keys elsewhere."""

from typing import Any

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.eval.engine import Engine
from headstart.eval.generate import decode, generate
from headstart.eval.metrics import acceptance
from headstart.eval.sparse_self import NUM_SINKS, SparseSelfDrafter
from headstart.eval.stopping import Stop
from headstart.heads.cache import SlotCache
from headstart.heads.target import Target

LENGTHS = (90, 1, 60, 25)


def prompts(*lengths: int, vocab_size: int = 61) -> list[list[int]]:
    source = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocab_size, (length,), generator=source).tolist() for length in lengths]


def their_text(target: Target, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": num_tokens, "pad_token_id": 0, "eos_token_id": None}
    return target.model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].tolist()


def test_greedy_text_is_the_target_s_own(family, tiny_target):
    """Rows shorter and longer than the budget, several times round the ring."""
    target, rows = tiny_target(family), prompts(*LENGTHS)
    expected = [their_text(target, row, 40) for row in rows]
    how: dict[str, Any] = {"max_new_tokens": 40, "num_draft_tokens": 3, "eos_token_ids": []}
    done = generate(target, SparseSelfDrafter(target, 32), rows, **how)
    assert done.token_ids == expected
    accepted = [num for one in done.rounds[1:] for num in one.num_accepted]
    assert 0 in accepted and 3 in accepted, "a case in which nothing is accepted, or all, shows little"
    alone = generate(target, SparseSelfDrafter(target, 32), rows[0], **how)
    assert alone.token_ids == expected[:1]


def test_where_the_budget_holds_the_context_everything_is_accepted(family, tiny_target):
    target, rows = tiny_target(family), prompts(*LENGTHS)
    how: dict[str, Any] = {"max_new_tokens": 41, "num_draft_tokens": 4, "eos_token_ids": []}
    for budget in (136, 4096):  # the first is 90 + 41 tokens, and drafts behind them
        done = generate(target, SparseSelfDrafter(target, budget), rows, **how)
        counted = acceptance(done.rounds, num_draft_tokens=4)
        assert (counted.length, counted.rate) == (5.0, [1.0] * 4)
