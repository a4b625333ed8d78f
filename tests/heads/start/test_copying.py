"""A first layer in closed form: where its queries look, the map that is fitted, and heads that copy what followed the
token just read where it stood before."""

from typing import Any

import pytest
import torch
from headstart.engines.heads import build_head
from headstart.heads.base import DraftBatch, chain_starts
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.nn.layers import Attention, llama_config
from headstart.heads.start import eagle3
from headstart.heads.start.copying import attended, find_tokens, roles_of, slow_channels, token_code
from headstart.heads.start.eagle3 import fitted_positions, look_at_itself, ridge
from headstart.targets.layers.rotary import Rotary
from transformers import LlamaConfig

SIZE, NUM_TOKENS = 128, 40


def attention_of(*, num_heads=4, num_kv_heads=2, head_dim=64, theta=1e5) -> tuple[Attention, Rotary]:
    config = LlamaConfig(
        hidden_size=SIZE,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    config = llama_config(config)
    return Attention(config, in_size=2 * SIZE), Rotary(config)


def normalised(x: torch.Tensor) -> torch.Tensor:
    return x * x.square().mean(-1, keepdim=True).rsqrt()


@pytest.fixture
def embedding():
    """Embeddings that have a part in common, as those of real targets."""
    return normalised(torch.randn(NUM_TOKENS, SIZE, generator=torch.Generator().manual_seed(1)) + 1.0)


@torch.no_grad()
def looked_at(attention: Attention, rotary: Rotary, embedding: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """[T, D] what the first copying head takes from a row [T + 1] whose states hold the tokens' codes exactly."""
    states = torch.randn(400, SIZE, generator=torch.Generator().manual_seed(2))
    code = token_code(attention, rotary.frequencies, embedding, states)
    assert code is not None
    (_, role), num = roles_of(attention, copies=True), len(row) - 1
    find_tokens(attention, role, code)
    x, following = embedding[row[:-1]], embedding[row[1:]]
    hidden = code.cleared(states[:num]) + code.held(x, x.roll(1, 0))
    tables = rotary(torch.arange(num)[None], like=x, num_positions=num)
    mask = torch.full((num, num), -torch.inf).triu(1)[None, None]
    return attended(attention, role, torch.cat([following, hidden], 1)[None], tables, mask)[0]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (4, 4)])
def test_the_token_behind_an_earlier_occurrence_is_found(embedding, num_heads, num_kv_heads):
    attention, rotary = attention_of(num_heads=num_heads, num_kv_heads=num_kv_heads)
    first = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(3))[:30]
    row = torch.cat([first, first])
    taken = looked_at(attention, rotary, embedding, row)
    again = range(31, 58)  # positions whose next token, and the one before it, have stood there already
    likest = [int((taken[t] @ embedding.T).argmax()) for t in again]
    right = sum(found == int(row[t + 2]) for found, t in zip(likest, again, strict=True))
    assert right >= 0.9 * len(again)


def test_of_two_occurrences_that_behind_the_same_token_is_taken(embedding):
    attention, rotary = attention_of()
    row = torch.tensor([*range(20), 7, 30, 31, 32, 33, 3, 30, 34, 35, 36, 37, 7, 30])  # 30 stands behind 7 and behind 3
    taken = looked_at(attention, rotary, embedding, row)[-1]
    assert taken @ embedding[31] > taken @ embedding[34]


def test_roles_share_the_values_and_no_channel_has_two():
    for num_heads, num_kv_heads in ((4, 2), (8, 2), (8, 8), (4, 1)):
        attention, _ = attention_of(num_heads=num_heads, num_kv_heads=num_kv_heads)
        own, copying = roles_of(attention, copies=True)
        values = torch.cat([own.values, copying.values])
        assert len(values.unique()) == len(values) == attention.v_proj.out_features
        assert len(torch.cat([own.outputs, copying.outputs]).unique()) == len(values)
        assert not set(own.heads.tolist()) & set(copying.heads.tolist())
        for role in (own, copying):  # a value reaches the output through a query head of its own key head
            per_key = num_heads // num_kv_heads
            assert torch.equal(role.values // 64, role.outputs // 64 // per_key)


def test_no_head_copies_where_a_head_is_too_small_to_tell_tokens_apart(embedding):
    attention, rotary = attention_of(head_dim=8)
    assert len(slow_channels(attention, rotary.frequencies)) < 8
    assert token_code(attention, rotary.frequencies, embedding, torch.randn(50, SIZE)) is None
    assert len(roles_of(attention, copies=False)) == 1


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
    head.measure([batch])
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


def test_ridge_finds_a_linear_map():
    x, weight = torch.randn(200, 5), torch.randn(5, 3)
    torch.testing.assert_close(ridge(x, x @ weight, strength=1e-9), weight, atol=1e-4, rtol=1e-4)


def test_with_fewer_rows_than_channels_ridge_is_the_same_map():
    x, y = torch.randn(20, 50), torch.randn(20, 3)
    squares = x.T @ x
    wanted = torch.linalg.solve(squares + 1e-2 * squares.diagonal().mean() * torch.eye(50), x.T @ y)
    torch.testing.assert_close(ridge(x, y), wanted, atol=1e-4, rtol=1e-4)
