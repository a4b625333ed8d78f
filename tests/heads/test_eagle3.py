"""EAGLE-3's options: several layers, any features, the norms of EAGLE 3.1."""

import math

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.eval.decoding import generate
from headstart.heads.drafter import Reading
from headstart.heads.drafting import DynamicTree, StaticTree
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.registry import build_head, load_head, save_head
from perturbing import perturb

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]
STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 1), (0, 0, 0), (0, 1, 0), (2, 1, 1), (0, 0, 0, 0)))
CASES = {
    "one layer": {},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True},
    "two layers": {"num_layers": 2},
    "three layers, 3.1": {"num_layers": 3, "fc_norm": True, "norm_output": True},
    "a window": {"sliding_window": 3},
    "two layers, a window": {"num_layers": 2, "sliding_window": 2},
    "one feature": {"feature_layers": [2]},
    "as others made it": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "architecture": {"intermediate_size": 40, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
    },
    "two layers of others": {"num_layers": 2, "norm_before_residual": True, "architecture": {"num_key_value_heads": 1}},
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def head(request, target):
    """Every weight is away from its start."""
    return perturb(build_head(Eagle3Config(**{"num_depths": 4, **request.param}), target, seed=2), 0.2, seed=4).eval()


def rms(x, norm, eps):
    return norm.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def turned(x, theta):
    """Rotary embedding of [T, N, H] at positions 0..T-1: channel i pairs with i + H/2."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(len(x)).float(), theta ** (-torch.arange(half).float() / half))[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), low * angles.sin() + high * angles.cos()], -1)


def attention(weights, x, llama, window):
    """Causal attention over a whole sequence [T, in], head by head; a window ends with the query's own position."""
    theta, size = llama.rope_parameters["rope_theta"], llama.head_dim
    q, k, v = ((x @ getattr(weights, f"{name}_proj").weight.T).unflatten(-1, (-1, size)) for name in "qkv")  # [T, N, H]
    q, k = turned(q, theta), turned(k, theta)
    groups = q.shape[1] // k.shape[1]
    heads = []
    for i in range(q.shape[1]):
        scores = q[:, i] @ k[:, i // groups].T / math.sqrt(size)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        scores = scores.masked_fill(torch.ones_like(scores).tril(-(window or len(x))).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[:, i // groups])
    return torch.cat(heads, -1) @ weights.o_proj.weight.T


def naive(head, ids, features, t):
    """Draft logits of the chain at t, as deep as there are tokens: the sequence of pairs grows by the head's output."""
    llama, eps = head.llama, head.llama.rms_norm_eps
    layers = [head.midlayer] if head.config.num_layers == 1 else list(head.layers)
    parts = [features[: t + 1, i] for i in range(features.shape[1])]
    if head.config.fc_norm:
        parts = [rms(part, norm, eps) for part, norm in zip(parts, head.fc_norm, strict=True)]
    every = torch.cat(parts, -1)  # [t + 1, L * D]
    if head.config.norm_before_fc:
        every = rms(every, head.input_norm, eps)
    hidden = every @ head.fc.weight.T  # [t + 1, D]
    while len(hidden) < min(len(ids), t + 1 + head.num_depths):
        embedded = head.target.input_embedding.weight[ids[1 : len(hidden) + 1]]
        for i, layer in enumerate(layers):
            if i == 0:
                out = hidden
                normed = rms(out, layer.hidden_norm, eps)
                x = torch.cat([rms(embedded, layer.input_layernorm, eps), normed], -1)
                out = normed if head.config.norm_before_residual else out
            else:
                x = rms(out, layer.input_layernorm, eps)
            out = out + attention(layer.self_attn, x, llama, head.config.sliding_window)
            x = rms(out, layer.post_attention_layernorm, eps)
            gate, up = x @ layer.mlp.gate_proj.weight.T, x @ layer.mlp.up_proj.weight.T
            out = out + (torch.nn.functional.silu(gate) * up) @ layer.mlp.down_proj.weight.T
        last = rms(out[-1], head.norm, eps)
        yield last @ head.lm_head.weight.T
        hidden = torch.cat([hidden, (last if head.config.norm_output else out[-1])[None]])


def test_logits_and_gradients_are_the_formulas(head, target, make_batch):
    head.train()
    batch = make_batch(target, head, num_rows=2, length=10)
    out = head.loss(batch)
    starts, logits = head.teacher_forced_logits(batch)
    said = target.model(input_ids=batch.input_ids, use_cache=False).logits.softmax(-1).detach()
    terms: list[list[torch.Tensor]] = [[] for _ in range(head.num_depths)]
    for row in range(2):
        for at, t in enumerate(starts.positions[row].tolist()):
            if not starts.valid[row, at, 0]:
                continue
            for depth, one in enumerate(naive(head, batch.input_ids[row], batch.output.features[row], t)):
                if not starts.valid[row, at, depth]:
                    break
                torch.testing.assert_close(logits[row, at, depth], one, rtol=1e-5, atol=1e-5)
                terms[depth].append(-(said[row, t + 1 + depth] * one.log_softmax(-1)).sum())
    wanted = torch.stack([0.8**depth * torch.stack(each).mean() for depth, each in enumerate(terms)]).sum()
    torch.testing.assert_close(out.loss, wanted, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(out.loss, list(head.parameters()))
    plain = torch.autograd.grad(wanted, list(head.parameters()))
    for (name, _), a, b in zip(head.named_parameters(), ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_drafting_is_what_training_scored_and_lossless(head, target):
    """In trees; chains are those of the formulas, below."""
    wanted = generate(target, None, PROMPTS, max_new_tokens=16).token_ids
    for tree in (STATIC, DynamicTree(num_nodes=12, depth=4, top_k=3)):
        assert generate(target, head, PROMPTS, max_new_tokens=16, tree=tree).token_ids == wanted


@pytest.mark.parametrize("prompt", [PROMPTS[1], PROMPTS[0] * 4])
def test_a_tree_of_one_path_drafts_what_a_chain_does(head, prompt, target):
    """With the same logits, whose keys lie in other slots; read in two parts, as in decoding."""
    state, ids = head.begin(batch_size=1, max_length=64), torch.tensor([[*prompt, 9]])
    read = target.forward(ids[:, :-1], feature_layers=head.feature_layers)
    head.commit(state, Reading(ids[:, :-1], ids[:, 1:], read, torch.tensor([0]), torch.tensor([len(prompt)])))
    chain = head.propose(state, num_draft_tokens=4)
    head.commit(state, Reading(ids[:, :-1], ids[:, 1:], read, torch.tensor([0]), torch.tensor([len(prompt)])))
    path = head.propose_tree(state, StaticTree(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))))
    assert path.tokens.tolist() == chain.tokens.tolist()


def test_a_chain_drafts_what_the_formulas_say(head, target):
    """Along the head's own greedy drafts, step by step over its cache."""
    prompt, last = torch.tensor(PROMPTS[1]), len(PROMPTS[1]) - 1
    first = generate(target, None, PROMPTS[1], max_new_tokens=1).token_ids[0]
    read = target.forward(prompt[None], feature_layers=head.feature_layers)
    row = torch.cat([prompt, torch.tensor(first)])
    state = head.begin(batch_size=1, max_length=64)
    head.commit(state, Reading(prompt[None], row[None, 1:], read, torch.tensor([0]), torch.tensor([len(prompt)])))
    drafted = head.propose(state, num_draft_tokens=4)
    for depth in range(4):
        logits = list(naive(head, row, read.features[0], last))[depth]
        torch.testing.assert_close(drafted.logits[depth][0], logits, rtol=1e-4, atol=1e-4)
        row = torch.cat([row, logits.argmax()[None]])
    assert drafted.tokens[0].tolist() == row[-4:].tolist()


def test_options_are_kept_and_served(head, target, tmp_path):
    loaded = load_head(save_head(head, tmp_path / "head"), target)
    assert loaded.config == head.config
    served = head.serving_config()
    assert served["num_hidden_layers"] == head.config.num_layers and served["fc_norm"] == head.config.fc_norm
    names = set(head.state_dict())
    assert ("midlayer.mlp.up_proj.weight" in names) == (head.config.num_layers == 1)
    assert ("layers.1.input_layernorm.weight" in names) == (head.config.num_layers > 1)
    assert ("fc_norm.0.weight" in names) == head.config.fc_norm


def test_an_architecture_of_unknown_keys_or_norms_twice_are_refused(target):
    with pytest.raises(BadInput, match="head.architecture.hidden_size: expected keys of intermediate_size, "):
        build_head(Eagle3Config(architecture={"hidden_size": 8}), target)
    with pytest.raises(BadInput, match="^norm_before_fc: not together with fc_norm$"):
        Eagle3Config(norm_before_fc=True, fc_norm=True)


def test_no_layers_are_refused():
    with pytest.raises(BadInput, match="^num_layers 0: expected at least 1$"):
        Eagle3Config(num_layers=0)


def test_it_looks_deeper_than_it_was_trained_and_leaves_its_config(target, head, make_batch):
    """As deep as it drafts, with the same logits where it was trained; the config given to it is untouched."""
    before, batch = head.config.as_dict(), make_batch(target, head)
    starts, logits = head.teacher_forced_logits(batch)
    deeper_starts, deeper = head.teacher_forced_logits(batch, num_depths=6)
    assert (starts.num_depths, deeper_starts.num_depths) == (4, 6)
    torch.testing.assert_close(deeper[:, :, :4], logits)
    out = head.loss(batch, num_depths=6)
    assert out.depth_loss.shape == (6,) and out.hits.shape == deeper.shape[:3]
    assert torch.equal(out.starts.valid, head.chain_starts(batch.loss_mask, num_depths=6).valid)
    assert head.config.as_dict() == before
    config = Eagle3Config()
    assert build_head(config, target).config.feature_layers == list(config.resolved(target).feature_layers or ())
    assert config.feature_layers is None
