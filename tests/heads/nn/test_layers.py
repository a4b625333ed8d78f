"""What heads are built from: norms, and attention over shared and own drafted keys, against plain loops."""

import pytest
import torch
import torch.nn.functional as F
from headstart.heads.loss import sight
from headstart.heads.loss.chains import chain_starts
from headstart.heads.loss.sight import Sight, behind_window, blocks_of
from headstart.heads.nn import chain_attention
from headstart.heads.nn.chain_attention import attend_chains
from headstart.heads.nn.layers import RMSNorm, llama_config
from transformers import Mamba2Config, MambaConfig


@pytest.mark.parametrize("shape", [(0, 8), (5, 8), (2, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_training_is_torchs_with_its_gradients(shape, dtype):
    source = torch.Generator().manual_seed(2)
    x = torch.randn(shape, generator=source).to(dtype).requires_grad_()
    norm = RMSNorm(8, eps=1e-2)
    norm.weight.data = torch.randn(8, generator=source)
    wanted = F.rms_norm(x.float(), (8,), norm.weight, 1e-2).to(dtype)
    ours = norm(x)
    grad = torch.randn(shape, generator=source).to(dtype)
    with torch.no_grad():
        assert torch.equal(norm(x), wanted)
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours, wanted, rtol=rtol, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):  # as the loss differentiates: no product is rounded
        got = torch.autograd.grad(ours, [x, norm.weight], grad)
    for one, other in zip(got, torch.autograd.grad(wanted, [x, norm.weight], grad), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-5)
    assert torch.autograd.grad(norm(x.detach()).sum(), norm.weight)[0].isfinite().all()


def test_heads_of_64_channels_fill_the_hidden_size_of_a_target_without_attention():
    """Mamba-2's own `head_dim` is of its state spaces."""
    config = llama_config(Mamba2Config(hidden_size=256, num_heads=16, head_dim=32))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 4, 64)
    assert llama_config(MambaConfig(hidden_size=32)).head_dim == 32


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
@pytest.mark.parametrize("window", [None, 4, 5])
def test_chains_attend_as_one_softmax(num_drafted, kernel, window, monkeypatch):
    monkeypatch.setattr(sight, "QUERY_BLOCK", {"cpu": 4})
    monkeypatch.setattr(sight, "KEY_PART", 2)
    if kernel == "ours":
        monkeypatch.setattr(chain_attention, "is_flash", lambda *_: False)
    source, wide = torch.Generator().manual_seed(3), H + 4 if "wider" in kernel else H
    starts = torch.stack([torch.arange(S) + 1, torch.arange(S) + 3])  # [B, S]
    is_seen = torch.arange(T) <= starts[:, :, None]
    if window is not None:
        is_seen &= torch.arange(T) > starts[:, :, None] - window
    mask = torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[:, None]
    sizes = [(N, S, H), (NKV, T, H), (NKV, T, wide), *[(NKV, S, H), (NKV, S, wide)] * num_drafted]
    inputs = [torch.randn(B, *size, generator=source, requires_grad=True) for size in sizes]
    query, key, value, *own = inputs
    drafted = list(zip(own[::2], own[1::2], strict=True))
    blocks = blocks_of(starts.amax(0).tolist(), torch.device("cpu"))
    assert [(b.start, b.stop, b.extent) for b in blocks] == [(0, 4, 7), (4, 8, 11), (8, 11, 14)]
    blocks = behind_window(blocks, starts.amin(0).tolist(), window)
    assert [b.begin for b in blocks] == {None: [0, 0, 0], 4: [0, 2, 6], 5: [0, 0, 4]}[window]
    ours = attend_chains(query, key, value, Sight(starts, blocks, window), drafted=drafted)
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
