"""A round of a delta rule read at once: what reading token by token gives, and the state behind each token."""

import pytest
import torch
from headstart.targets.caches.recurrences import delta_rule
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

B, Q, NK, N, DK, DV = 2, 6, 2, 4, 8, 5


def inputs(kind, *, num_read=Q):
    """Of Kimi as many key heads as value heads, and a decay per channel."""
    source = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(shape, generator=source)

    heads, decay = (N, (N, DK)) if kind == "kimi" else (NK, (N,))
    g, beta = -some(B, num_read, *decay).exp(), some(B, num_read, N).sigmoid()
    given = {"g": g, "beta": beta, "initial_state": some(B, N, DK, DV), "use_qk_l2norm_in_kernel": True}
    return [some(B, num_read, heads, DK), some(B, num_read, heads, DK), some(B, num_read, N, DV)], given


STEPS = {"qwen3_next": torch_recurrent_gated_delta_rule, "kimi": recurrent_kimi_delta_attention}


@pytest.mark.parametrize("num_read", [1, Q])
@pytest.mark.parametrize("kind", STEPS)
def test_a_round_is_read_as_token_by_token(kind, num_read):
    (query, key, value), given = inputs(kind, num_read=num_read)
    read = []
    mixed, state = delta_rule(read, query, key, value, **given)
    assert torch.equal(state, given["initial_state"]), "as it was: which tokens are kept is not known yet"
    for behind in range(num_read + 1):
        part = {k: v[:, :behind] if k in ("g", "beta") else v for k, v in given.items()}
        own = [x[:, :behind] for x in (query, key, value)]
        wanted, after = STEPS[kind](*own, **part, output_final_state=True) if behind else (mixed[:, :0], state)
        torch.testing.assert_close(mixed[:, :behind], wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(read[0].state_behind(torch.full((B,), behind), state), after, rtol=1e-4, atol=1e-5)


def test_rows_keep_as_many_tokens_as_they_accept_and_a_state_that_decays_to_nothing_stays_finite():
    (query, key, value), given = inputs("qwen3_next")
    given["g"] = 200 * given["g"]
    read = []
    mixed, state = delta_rule(read, query, key, value, **given)
    found = read[0].state_behind(torch.tensor([0, 3]), state)
    assert torch.equal(found[0], state[0]) and found.isfinite().all() and mixed.isfinite().all()
    torch.testing.assert_close(found[1], read[0].state_behind(torch.tensor([3, 3]), state)[1])


def test_a_round_in_front_of_which_there_is_nothing_starts_from_zeros():
    (query, key, value), given = inputs("qwen3_next")
    empty = {**given, "initial_state": torch.zeros(B, N, DK, DV)}
    wanted, _ = delta_rule([], query, key, value, **empty)
    found, state = delta_rule([], query, key, value, **{**given, "initial_state": None})
    assert torch.equal(found, wanted) and torch.equal(state, empty["initial_state"])
