"""A first layer in closed form: where its queries look, and the map that is fitted."""

from typing import Any

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.heads.base import DraftBatch, chain_starts
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.registry import build_head
from headstart.heads.start import eagle3
from headstart.heads.start.eagle3 import fitted_positions, look_at_itself, ridge


def head_of(target, start, **more) -> Any:
    return build_head(Eagle3Config(feature_layers=[1, 2], num_depths=2, start=start, **more), target)


@pytest.mark.parametrize("window", [None, 4])
def test_the_layer_computes_what_its_fit_predicted(tiny_target, monkeypatch, window):
    """Of rows whose tokens all stood there before, out of a window's sight."""
    target, fit_layer, predicted = tiny_target("llama", hidden_size=128, head_dim=64), eagle3.fit_layer, []
    ids = torch.randint(3, target.vocab_size, (48, 20), generator=torch.Generator().manual_seed(3)).repeat(1, 2)
    mask = torch.arange(40).expand(48, -1) >= 3
    batch = DraftBatch(ids, mask, target.forward(ids, feature_layers=(1, 2)))

    def fit_and_keep(*args, **how):
        assert how["code"] is not None, "no head copies"
        predicted.append(fit_layer(*args, **how))
        return predicted[0]

    monkeypatch.setattr(eagle3, "fit_layer", fit_and_keep)
    slow = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
    head = head_of(target, "fitted", sliding_window=window, architecture=slow)
    head.fit([batch])
    starts = chain_starts(mask, 1)
    computed = next(head.unroll(batch, starts))[starts.take(fitted_positions(mask)) & starts.valid[..., 0]]
    assert torch.cosine_similarity(computed, predicted[0]).min() > 0.999


def test_one_query_head_of_each_group_looks_at_its_own_position(target):
    """Where one channel of what is read is the same for all tokens, however far back they are."""
    head = head_of(target, "random")
    attention, read = head.midlayer.self_attn, torch.randn(1, 200, 2 * target.hidden_size)
    read[..., 5], constant = 1.0, torch.zeros(2 * target.hidden_size)
    constant[5] = 1.0
    with torch.no_grad():
        key_heads = torch.arange(attention.num_kv_heads)
        look_at_itself(attention, constant, head.rotary.frequencies, key_heads=key_heads)
    rotary = head.rotary(torch.arange(200)[None], like=read, num_positions=200)
    keys, queries = attention.keys_values(read, rotary)[0], attention.queries(read, rotary)
    scores = queries[:, :: attention.num_heads // attention.num_kv_heads] @ keys.transpose(-1, -2)
    scores = scores.masked_fill(torch.ones(200, 200).triu(1).bool(), -torch.inf)
    assert (scores.argmax(-1) == torch.arange(200)).all()


def test_other_kinds_of_heads_are_refused(target):
    for more in ({"parallel": True}, {"norm_output": True}, {"num_layers": 2}):
        with pytest.raises(BadInput, match="start fitted: only of one layer"):
            head_of(target, "fitted", **more)


def test_ridge_finds_a_linear_map():
    x, weight = torch.randn(200, 5), torch.randn(5, 3)
    torch.testing.assert_close(ridge(x, x @ weight, strength=1e-9), weight, atol=1e-4, rtol=1e-4)


def test_with_fewer_rows_than_channels_ridge_is_the_same_map():
    x, y = torch.randn(20, 50), torch.randn(20, 3)
    squares = x.T @ x
    wanted = torch.linalg.solve(squares + 1e-2 * squares.diagonal().mean() * torch.eye(50), x.T @ y)
    torch.testing.assert_close(ridge(x, y), wanted, atol=1e-4, rtol=1e-4)
