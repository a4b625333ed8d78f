"""Attention over shared and own drafted keys, and the order in which the loss reads rows, against plain loops."""

import pytest
import torch
from headstart.heads.loss.chains import chain_starts
from headstart.heads.nn import chain_attention, sight
from headstart.heads.nn.chain_attention import attend_chains
from headstart.heads.nn.sight import Sight, behind_window, blocks_of

B, N, NKV, S, T, H = 2, 4, 2, 11, 14, 8


def plain(query, key, value, mask, drafted):
    """One softmax over everything, a head and a query at a time."""
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for b, n, q in torch.cartesian_prod(torch.arange(B), torch.arange(N), torch.arange(S)).tolist():
        kv = n // (N // NKV)
        keys = torch.cat([key[b, kv], *[k[b, kv, q][None] for k, _ in drafted]])
        values = torch.cat([value[b, kv], *[v[b, kv, q][None] for _, v in drafted]])
        scores = keys @ query[b, n, q] / H**0.5
        scores = scores + torch.cat([mask[b, 0, q], torch.zeros(len(drafted))])
        out[b, n, q] = scores.softmax(-1) @ values
    return out


@pytest.mark.parametrize("num_drafted", [0, 3])
@pytest.mark.parametrize("kernel", ["torch's", "ours", "ours, values wider"])
@pytest.mark.parametrize("text, window", [(0, None), (2, None), (0, 4), (3, 5)])
def test_chains_attend_as_one_softmax(num_drafted, kernel, text, window, monkeypatch):
    """With each of the limits: a text's first token, and a window."""
    monkeypatch.setattr(sight, "QUERY_BLOCK", {"cpu": 4})
    monkeypatch.setattr(sight, "KEY_PART", 2)
    if kernel == "ours":
        monkeypatch.setattr(chain_attention, "is_flash", lambda *_: False)
    source, wide = torch.Generator().manual_seed(3), H + 4 if "wider" in kernel else H
    starts = torch.stack([torch.arange(S) + 1, torch.arange(S) + 3])  # [B, S]
    is_seen = (torch.arange(T) <= starts[:, :, None]) & (torch.arange(T) >= text)
    if window is not None:
        is_seen &= torch.arange(T) > starts[:, :, None] - window
    is_seen |= torch.arange(T) == starts[:, :, None]
    mask = torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[:, None]
    sizes = [(N, S, H), (NKV, T, H), (NKV, T, wide), *[(NKV, S, H), (NKV, S, wide)] * num_drafted]
    inputs = [torch.randn(B, *size, generator=source, requires_grad=True) for size in sizes]
    query, key, value, *own = inputs
    drafted = list(zip(own[::2], own[1::2], strict=True))
    blocks = blocks_of(starts.amax(0).tolist(), torch.device("cpu"))
    assert [(b.start, b.stop, b.extent) for b in blocks] == [(0, 4, 7), (4, 8, 11), (8, 11, 14)]
    blocks = behind_window(blocks, starts.amin(0).tolist(), window)
    assert [b.begin for b in blocks] == {None: [0, 0, 0], 4: [0, 2, 6], 5: [0, 0, 4]}[window]
    texts = starts.clamp(max=text) if text else None
    ours = attend_chains(query, key, value, Sight(starts, blocks, texts, window), drafted=drafted)
    wanted = plain(query, key, value, mask, drafted)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    grad = torch.randn(ours.shape, generator=source)
    for a, b in zip(*(torch.autograd.grad(out, inputs, grad) for out in (ours, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_plan_scores_every_supervised_depth_of_every_chain_once(size):
    mask = torch.rand(3, 20, generator=torch.Generator().manual_seed(1)) < 0.8
    starts = chain_starts(mask, 4)
    plan, got = starts.plan(20, size=size), set()
    counts = [[part.stop for part in chunk] for chunk in plan.scored]
    for i, sizes in enumerate(counts):
        assert sizes == sorted(sizes, reverse=True) and sizes[0] <= size
        for depth, count in enumerate(sizes):
            for at in range(i * size, i * size + count):
                got.add((depth, int(plan.chains[depth, at]), int(plan.positions[at])))
    num_starts = starts.positions.shape[1]
    wanted = {
        (depth, row * num_starts + s, row * 20 + int(starts.positions[row, s]) + 1 + depth)
        for row, s, depth in starts.valid.nonzero().tolist()
    }
    assert got == wanted and len(got) == sum(map(sum, counts))
