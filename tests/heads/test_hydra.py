"""Hydra and Hydra++ are the paper's formulas, in training and along every path of a drafted tree."""

import math

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.heads.base import DraftBatch
from headstart.heads.drafter import Reading
from headstart.heads.hydra import HydraConfig
from headstart.heads.registry import build_head
from perturbing import perturb

CUT = torch.tensor([2, 3, 5, 8, 13, 14, 21, 22, 30, 31, 34, 40, 41, 42, 43, 50, 51, 52, 55, 60])
KINDS = {
    "hydra": {},
    "cut": {"draft_token_ids": CUT},
    "shared": {"num_blocks": 2, "output": "shared"},
    "hydra++": {"num_blocks": 4, "prefix_attention": True},
}


@pytest.fixture(params=KINDS)
def kind(request):
    """The options of a kind of Hydra head."""
    return KINDS[request.param]


def fresh(target, *, draft_token_ids=None, **changes):
    """An untrained head."""
    config = HydraConfig(draft_vocab_size=None if draft_token_ids is None else len(draft_token_ids), **changes)
    return build_head(config, target, draft_token_ids=draft_token_ids, seed=2).eval()


def perturbed(target, **changes):
    """A head whose every weight is away from its start."""
    return perturb(fresh(target, **changes), 0.1, seed=4)


# the formulas, in loops over rows, positions, heads and channels


def silu(x):
    return x / (1 + (-x).exp())


def rms(x, weight, eps):
    return weight * x / torch.sqrt((x * x).mean() + eps)


def turned(x, position, theta):
    """Rotary embedding of one head's vector [H]: channel i pairs with i + H/2 (Su et al. 2021)."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def naive_prefix(layer, states, config):
    """The output of a Llama layer at the last of `states` [n, D]."""
    n, kv, eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
    size, theta = config.hidden_size // n, config.rope_parameters["rope_theta"]
    w = layer.self_attn
    x = [rms(state, layer.input_layernorm.weight, eps) for state in states]
    keys = [[turned(k, p, theta) for k in (w.k_proj.weight @ one).split(size)] for p, one in enumerate(x)]
    values = [(w.v_proj.weight @ one).split(size) for one in x]
    mixed = []
    for i, query in enumerate((w.q_proj.weight @ x[-1]).split(size)):
        query, group = turned(query, len(x) - 1, theta), i // (n // kv)
        scores = torch.stack([query @ key[group] / math.sqrt(size) for key in keys])
        weights = scores.exp() / scores.exp().sum()
        mixed.append(sum(a * value[group] for a, value in zip(weights, values, strict=True)))
    hidden = states[-1] + w.o_proj.weight @ torch.cat(mixed)
    x, mlp = rms(hidden, layer.post_attention_layernorm.weight, eps), layer.mlp
    return hidden + mlp.down_proj.weight @ (silu(mlp.gate_proj.weight @ x) * (mlp.up_proj.weight @ x))


def naive_logits(head, batch, row, t):
    """Draft logits of every head for the chain at t."""
    states, embedding = batch.output.post_norm[row], head.target.input_embedding.weight
    hidden = states[t] if head.prefix is None else naive_prefix(head.prefix, states[: t + 1], head.target.config)
    for k in range(min(head.num_depths, batch.input_ids.shape[1] - t - 1)):
        x = torch.cat([hidden, *[embedding[batch.input_ids[row, t + 1 + i]] for i in range(k + 1)]])
        for j, block in enumerate(head.blocks[k]):
            skipped = block.skip.weight @ x + block.skip.bias if j == 0 else x
            x = skipped + silu(block.linear.weight @ x + block.linear.bias)
        shared = head.config.output == "shared"
        yield (head.target.output_layer if shared else head.lm_heads[k]).weight @ x


def supervised(mask, depth):
    """(row, t) of every chain start t whose tokens x_{t+1} .. x_{t+2+depth} all count."""
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1] - 2 - depth):
            if mask[row, t + 1 : t + 3 + depth].all():
                yield row, t


def naive_loss(head, batch, *, hard):
    """sum_k 0.8^k * mean over supervised chains of -sum_v p(v) log q(v), p one-hot for hard labels."""
    with torch.no_grad():
        said = head.target.model(input_ids=batch.input_ids, use_cache=False).logits
    columns = list(range(61)) if head.vocabulary is None else head.vocabulary.to_target.tolist()
    loss = torch.zeros(())
    for depth in range(head.num_depths):
        terms = []
        for row, t in supervised(batch.loss_mask, depth):
            log_q = list(naive_logits(head, batch, row, t))[depth].log_softmax(-1)
            label = int(batch.input_ids[row, t + 2 + depth])
            if not hard:
                terms.append(-(said[row, t + 1 + depth].softmax(-1)[columns] * log_q).sum())
            else:
                terms.append(-log_q[columns.index(label)] if label in columns else torch.zeros(()))
        loss = loss + 0.8**depth * torch.stack(terms).mean()
    return loss


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
    head = perturbed(target, **KINDS[name], loss={loss: 1.0}, num_depths=3).train()
    batch = make_batch(target, head, num_rows=2, length=10)
    out, wanted = head.loss(batch), naive_loss(head, batch, hard=loss == "hard_ce")
    torch.testing.assert_close(out.loss, wanted, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(out.loss, list(head.parameters()))
    naive = torch.autograd.grad(wanted, list(head.parameters()))
    for (weight, _), a, b in zip(head.named_parameters(), ours, naive, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda text, weight=weight: f"{weight}: {text}")
    starts, logits = head.teacher_forced_logits(batch)
    for row, t in supervised(batch.loss_mask, 0):
        at = starts.positions[row].tolist().index(t)
        for depth, one in enumerate(naive_logits(head, batch, row, t)):
            if starts.valid[row, at, depth]:
                torch.testing.assert_close(logits[row, at, depth], one, rtol=1e-5, atol=1e-5)


def test_an_untrained_head_is_the_targets_output_layer(kind, family, tiny_target):
    target = tiny_target(family)
    head = fresh(target, **kind)
    rows = torch.arange(3, 40)[None]
    states = target.forward(rows)
    starts, logits = head.teacher_forced_logits(DraftBatch(rows, torch.ones_like(rows).bool(), states))
    wanted = starts.take(target.logits(states.post_norm))[..., kind.get("draft_token_ids", slice(None))]
    for k in range(head.num_depths):
        torch.testing.assert_close(logits[:, :, k], wanted, rtol=1e-5, atol=1e-5)


def test_states_read_in_pieces_are_the_whole_prefix(kind, target):
    """Ragged rows, read in two forwards with rejected tokens behind the first: as if read at once."""
    head, rows = perturbed(target, **kind), torch.arange(3, 27).reshape(2, 12)
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


@torch.no_grad()
def test_a_trees_nodes_score_as_the_chains_along_their_paths(kind, target):
    """Two rows of different lengths, each with a tree of its own: parents cross, repeat and are left out."""
    head, tokens = perturbed(target, **kind), torch.tensor([[1, 9, 14, 33, 20, 7, 51, 8], [1, 9, 14, 33, 0, 0, 0, 0]])
    reading = Reading(tokens, tokens.roll(-1, 1), target.forward(tokens), torch.tensor([0, 0]), torch.tensor([7, 3]))
    state = head.begin(batch_size=2, max_length=64)
    head.commit(state, reading)
    head.first_logits(state)
    levels = [  # tokens and parents [2, F] per depth
        ([[5, 6, 7], [8, 9, 10]], [[0, 0, 0], [0, 0, 0]]),
        ([[11, 12, 13, 14], [15, 16, 17, 18]], [[2, 0, 0, 1], [1, 1, 0, 2]]),
        ([[19, 20], [21, 22]], [[3, 0], [2, 2]]),
    ]
    paths: list[list[list[int]]] = [[[]], [[]]]
    for depth, (ids, parents) in enumerate(levels, 1):
        logits = head.expand(state, torch.tensor(ids), torch.tensor(parents), depth=depth)  # [2, F, V]
        paths = [[[*paths[r][p], x] for x, p in zip(ids[r], parents[r], strict=True)] for r in (0, 1)]
        for node in range(len(ids[0])):
            chain = head.begin(batch_size=2, max_length=64)
            head.commit(chain, reading)
            scored = head.first_logits(chain)
            for i in range(depth):
                step = torch.tensor([[paths[0][node][i]], [paths[1][node][i]]])
                scored = head.expand(chain, step, None, depth=i + 1)[:, 0]
            torch.testing.assert_close(logits[:, node], scored, rtol=1e-5, atol=1e-5)


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
