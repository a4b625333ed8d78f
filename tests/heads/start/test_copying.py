"""Heads that copy: they look where the token just read stood before, behind the same token, and take what followed."""

import pytest
import torch
from headstart.heads.nn.layers import Attention, Rotary, llama_config
from headstart.heads.start.copying import attended, find_tokens, roles_of, slow_channels, token_code
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
