"""A cache read in parts gives what it gives when read at once, and parts are for GPUs and long caches."""

import pytest
import torch
import torch.nn.functional as F
from headstart.engines.heads import HEADS, build_head
from headstart.eval.decoding import generate
from headstart.heads.drafting.trees import DynamicTree
from headstart.targets.caches import attention, split_attention
from headstart.targets.caches.split_attention import (
    FEWEST,
    attention_in_parts,
    masked_attention,
    part_size,
    reads_in_parts,
)


def inputs(sizes, dtype):
    """Queries, keys and values out of a longer cache, and masks of which each row sees another number of slots."""
    num_rows, num_heads, num_queries, num_slots, size = sizes
    source = torch.Generator().manual_seed(0)

    def drawn(length):
        return torch.randn(num_rows, num_heads, length, size, generator=source).to(dtype)

    last = torch.randint(2, num_slots, (num_rows,), generator=source)[:, None, None, None]
    hidden = torch.arange(num_slots) > last + torch.arange(num_queries)[:, None]  # [B, 1, M, P]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(dtype).min).to(dtype)
    return drawn(num_queries), drawn(num_slots + 77)[:, :, :num_slots], drawn(num_slots + 77)[:, :, :num_slots], mask


@pytest.mark.parametrize("sizes", [(1, 2, 12, 256, 16), (3, 4, 5, 320, 64), (1, 2, 12, 2048, 16)])
@pytest.mark.parametrize(("scale", "is_compiling"), [(None, False), (0.3, False), (None, True)])
def test_parts_put_together_are_the_whole(sizes, scale, is_compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    query, key, value, mask = inputs(sizes, torch.float32)
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    torch.testing.assert_close(attention_in_parts(query, key, value, mask, scale=scale), wanted, rtol=1e-5, atol=1e-6)


def test_in_half_precision_the_error_is_that_of_the_whole():
    query, key, value, mask = inputs((1, 8, 24, 2048, 128), torch.bfloat16)
    exact = F.scaled_dot_product_attention(*(x.double() for x in (query, key, value)), attn_mask=mask.double())
    whole, parts = masked_attention(query, key, value, mask), attention_in_parts(query, key, value, mask)
    assert parts.dtype == torch.bfloat16
    assert (parts - exact).norm() < 1.5 * (whole - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize(
    ("rows", "queries", "slots", "wanted", "is_compiling"),
    [
        (1, 24, FEWEST, True, False),
        (1, 24, FEWEST - 64, False, False),  # short
        (1, 24, FEWEST + 32, False, False),  # no whole parts
        (8, 24, FEWEST, False, False),  # rows enough
        (1, 2000, FEWEST, False, False),  # a prompt
        (1, 24, 64, False, True),
        (1, 24, 128, True, True),  # compiled layers read short caches in parts too
    ],
)
def test_parts_are_for_few_queries_over_long_caches(rows, queries, slots, wanted, is_compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    query, key = torch.empty(rows, 8, queries, 4), torch.empty(rows, 8, slots, 4)
    assert reads_in_parts(query, key) == wanted


def test_a_long_cache_is_read_in_larger_parts():
    assert [part_size(slots) for slots in (128, 1984, 2048, 2048 + 64, 4096)] == [64, 64, 128, 64, 128]


def test_texts_are_the_same(target, monkeypatch):
    """As if this were a GPU and 64 slots were long: of the target and of a head with a cache."""
    head = build_head(HEADS["eagle3"].config_class(type="eagle3"), target, seed=1).eval()
    how: dict = {"max_new_tokens": 24, "eos_token_ids": [], "tree": DynamicTree(num_nodes=4, depth=2, top_k=2)}
    prompts, read = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6]], []
    wanted = generate(target, head, prompts, **how).token_ids

    def in_parts(query, key, value, mask, *, scale=None):
        if key.shape[2] % 16:
            return masked_attention(query, key, value, mask, scale=scale)
        read.append(key.shape[2])
        return attention_in_parts(query, key, value, mask, scale=scale)

    monkeypatch.setattr(split_attention, "SMALL_PART", 16)
    monkeypatch.setattr(attention, "masked_attention", in_parts)
    assert generate(target, head, prompts, **how).token_ids == wanted
    assert len(read) > 50 and max(read) >= 64
