"""A first layer in closed form: where its queries look, and the map that is fitted."""

from typing import Any

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.registry import build_head
from headstart.heads.start.eagle3 import look_at_itself, ridge


def head_of(target, start, **more) -> Any:
    return build_head(Eagle3Config(feature_layers=[1, 2], num_depths=2, start=start, **more), target)


def test_one_query_head_of_each_group_looks_at_its_own_position(target):
    """Where one channel of what is read is the same for all tokens, however far back they are."""
    head = head_of(target, "random")
    attention, read = head.midlayer.self_attn, torch.randn(1, 200, 2 * target.hidden_size)
    read[..., 5], constant = 1.0, torch.zeros(2 * target.hidden_size)
    constant[5] = 1.0
    with torch.no_grad():
        look_at_itself(attention, constant, head.rotary.frequencies)
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
