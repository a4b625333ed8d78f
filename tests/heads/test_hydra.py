"""Hydra and Hydra++ are the paper's formulas, and read a text in pieces as at once."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from formulas import check_formulas, llama_layer
from headstart.configs.errors import BadInput
from headstart.heads.base import DraftBatch
from headstart.heads.drafter import Reading
from headstart.heads.hydra import HydraConfig
from perturbing import perturbed

CUT = torch.tensor([2, 3, 5, 8, 13, 14, 21, 22, 30, 31, 34, 40, 41, 42, 43, 50, 51, 52, 55, 60])
KINDS = {
    "hydra": {},
    "cut": {"ids": CUT},
    "shared": {"num_blocks": 2, "output": "shared"},
    "hydra++": {"num_blocks": 4, "prefix_attention": True},
}


@pytest.fixture(params=KINDS)
def kind(request):
    """The options of a kind of Hydra head."""
    return KINDS[request.param]


# the formulas


def naive_logits(head, batch, row, t):
    """Draft logits of every head for the chain at t."""
    states, embedding = batch.output.post_norm[row], head.target.input_embedding.weight
    hidden = states[t] if head.prefix is None else llama_layer(head.prefix, states[: t + 1], head.target.config)[-1]
    for k in range(min(head.num_depths, batch.input_ids.shape[1] - t - 1)):
        x = torch.cat([hidden, *[embedding[batch.input_ids[row, t + 1 + i]] for i in range(k + 1)]])
        for j, block in enumerate(head.blocks[k]):
            skipped = block.skip.weight @ x + block.skip.bias if j == 0 else x
            x = skipped + F.silu(block.linear.weight @ x + block.linear.bias)
        shared = head.config.output == "shared"
        yield (head.target.output_layer if shared else head.lm_heads[k]).weight @ x


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("hydra", "hard_ce"),
        ("hydra", "soft_ce"),
        ("cut", "hard_ce"),
        ("cut", "soft_ce"),
        ("shared", "hard_ce"),
        ("hydra++", "soft_ce"),
    ],
)
def test_loss_logits_and_gradients_are_the_papers(name, loss, target, make_batch):
    head = perturbed("hydra", target, **KINDS[name], loss={loss: 1.0}, num_depths=3).train()
    batch = make_batch(target, head, num_rows=2, length=10)
    drafted = partial(naive_logits, head, batch)
    check_formulas(head, batch, drafted, is_hard=loss == "hard_ce", rtol=1e-5)


def test_an_untrained_head_is_the_targets_output_layer(kind, family, tiny_target):
    target = tiny_target(family)
    head = perturbed("hydra", target, scale=0.0, **kind).eval()
    rows = torch.arange(3, 40)[None]
    states = target.forward(rows)
    starts, logits = head.teacher_forced_logits(DraftBatch(rows, torch.ones_like(rows).bool(), states))
    wanted = starts.take(target.logits(states.post_norm))[..., kind.get("ids", slice(None))]
    for k in range(head.num_depths):
        torch.testing.assert_close(logits[:, :, k], wanted, rtol=1e-5, atol=1e-5)


def test_states_read_in_pieces_are_the_whole_prefix(kind, target):
    """Ragged rows, read in two forwards with rejected tokens behind the first: as if read at once."""
    head, rows = perturbed("hydra", target, **kind), torch.arange(3, 27).reshape(2, 12)
    output, lengths, pieces = target.forward(rows), torch.tensor([9, 6]), torch.tensor([5, 2])

    def scored(*readings):
        state = head.begin(batch_size=2, max_length=32)
        for reading in readings:
            head.commit(state, reading)
        return head.first_logits(state)

    zero = torch.zeros(2, dtype=torch.long)
    whole = scored(Reading(rows, rows.roll(-1, 1), output, zero, lengths))
    at = pieces[:, None] + torch.arange(4)  # [2, 4]
    rest = type(output)(output.features.new_zeros(2, 4, 0, 32), output.post_norm[torch.arange(2)[:, None], at])
    second = Reading(rows.gather(1, at), rows.gather(1, at + 1), rest, pieces, lengths - pieces)
    split = scored(Reading(rows, rows.roll(-1, 1), output, zero, pieces), second)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"output": "tied"}, "^output 'tied': expected own or shared$"),
        ({"num_blocks": 0}, "^num_blocks 0: expected at least 1$"),
        ({"feature_layers": [1, 2]}, "^feature_layers: hydra reads the state after the final norm only$"),
    ],
)
def test_what_cannot_be_built_is_refused(wrong, problem):
    with pytest.raises(BadInput, match=problem):
        HydraConfig(**wrong)
