"""EAGLE-1 and HASS are the papers': the forward, the losses and gradients restated in plain loops; noise; trees."""

import math

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.configs.loader import build, read_config, shipped
from headstart.heads.base import DraftBatch, chain_starts
from headstart.heads.drafter import Reading
from headstart.heads.drafting import StaticTree, draft_static
from headstart.heads.eagle import EagleConfig, EagleHead
from headstart.heads.registry import build_head, load_head, save_head
from perturbing import perturb
from safetensors.torch import load_file

STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 1), (0, 0, 0), (0, 1, 0), (2, 1, 1), (0, 0, 0, 0)))


def perturbed(target, **changes) -> EagleHead:
    """A head whose every weight is away from its start."""
    head = build_head(EagleConfig(**changes), target, seed=2)
    assert isinstance(head, EagleHead)
    return perturb(head, 0.1, seed=4).train()


# The papers, in loops


def rms(x, weight, eps):
    return weight * x / torch.sqrt((x * x).mean() + eps)


def turned(x, position, theta):
    """Rotary embedding of one head's vector [H]: channel i pairs with i + H/2 (Su et al. 2021)."""
    half = len(x) // 2
    angles = torch.tensor([position * theta ** (-2 * i / len(x)) for i in range(half)])
    low, high = x[:half], x[half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()])


def llama_layer(layer, config, hiddens, *, is_first):
    """A causal Llama layer over a sequence of [D], position by position; the first has no input norm."""
    n, kv, size, eps = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps
    theta, attention = config.rope_parameters["rope_theta"], layer.self_attn
    keys, values, outs = [], [], []
    for position, hidden in enumerate(hiddens):
        x = hidden if is_first else rms(hidden, layer.input_layernorm.weight, eps)
        q, k, v = attention.q_proj.weight @ x, attention.k_proj.weight @ x, attention.v_proj.weight @ x
        keys.append([turned(k[i * size : (i + 1) * size], position, theta) for i in range(kv)])
        values.append([v[i * size : (i + 1) * size] for i in range(kv)])
        mixed = []
        for i in range(n):
            query, group = turned(q[i * size : (i + 1) * size], position, theta), i // (n // kv)
            scores = torch.stack([query @ key[group] / math.sqrt(size) for key in keys])
            mixed.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
        hidden = hidden + attention.o_proj.weight @ torch.cat(mixed)
        x = rms(hidden, layer.post_attention_layernorm.weight, eps)
        gate, up = layer.mlp.gate_proj.weight @ x, layer.mlp.up_proj.weight @ x
        outs.append(hidden + layer.mlp.down_proj.weight @ (gate / (1 + (-gate).exp()) * up))
    return outs


def naive_eagle(head, batch, row, t, num_depths):
    """The estimated features of the chain at t: (token, feature) pairs 0..t are true, then come the head's own."""
    tokens = [int(x) for x in batch.input_ids[row, 1 : t + 2]]
    features = list(batch.output.post_norm[row, : t + 1])
    for depth in range(num_depths):
        pairs = zip(tokens, features, strict=True)
        embedding = head.target.input_embedding.weight
        hiddens = [head.fc.weight @ torch.cat([embedding[token], f]) + head.fc.bias for token, f in pairs]
        for i, layer in enumerate(head.layers):
            hiddens = llama_layer(layer, head.llama, hiddens, is_first=i == 0)
        yield hiddens[-1]
        if t + 2 + depth < batch.input_ids.shape[1]:
            tokens.append(int(batch.input_ids[row, t + 2 + depth]))
            features.append(hiddens[-1].detach() if head.config.detach else hiddens[-1])


def supervised(mask, depth):
    """(row, t) of every chain start t whose tokens x_{t+1} .. x_{t+2+depth} all count."""
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1] - 2 - depth):
            if bool(mask[row, t + 1 : t + 3 + depth].all()):
                yield row, t


def smooth_l1(a, b):
    """Mean over channels of d^2 / 2 where |d| < 1, else |d| - 1/2."""
    d = (a - b).abs()
    return torch.where(d < 1, d * d / 2, d - 0.5).mean()


def naive_loss(head, batch, *, feature_weight, token_weight):
    """sum_k mean over chains of v * smooth-L1(feature, true one) + w * soft cross-entropy (EAGLE, section 3.2.2)."""
    with torch.no_grad():
        said = head.target.model(input_ids=batch.input_ids, use_cache=False).logits.softmax(-1)
    chains = supervised(batch.loss_mask, 0)
    every = {(row, t): list(naive_eagle(head, batch, row, t, head.num_depths)) for row, t in chains}
    loss = torch.zeros(())
    for depth in range(head.num_depths):
        terms = []
        for row, t in supervised(batch.loss_mask, depth):
            feature, at = every[row, t][depth], t + 1 + depth
            log_q = (head.target.output_layer.weight @ feature).log_softmax(-1)
            one = feature_weight * smooth_l1(feature, batch.output.post_norm[row, at])
            terms.append(one - token_weight * (said[row, at] * log_q).sum())
        loss = loss + head.config.depth_decay**depth * torch.stack(terms).mean()
    return loss


CASES = {
    "EAGLE-1": {"num_depths": 1},
    "HASS": {"num_depths": 3, "depth_decay": 1.0},
    "gradients through all depths": {"num_depths": 3, "detach": False, "depth_decay": 0.8},
    "two layers": {"num_depths": 3, "num_layers": 2, "bias": True},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("loss", ["features and tokens", "tokens"])
def test_features_loss_and_gradients_are_the_papers(changes, loss, target, make_batch):
    if loss == "tokens":
        head = perturbed(target, loss={"soft_ce": 1.0}, **changes)
        batch = make_batch(target, head, num_rows=2, length=10)
        wanted = naive_loss(head, batch, feature_weight=0.0, token_weight=1.0)
    else:  # the default, EAGLE's
        head = perturbed(target, **changes)
        batch = make_batch(target, head, num_rows=2, length=10)
        wanted = naive_loss(head, batch, feature_weight=1.0, token_weight=0.1)
    ours = head.loss(batch).loss
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(ours, list(head.parameters()))
    naive = torch.autograd.grad(wanted, list(head.parameters()))
    for (name, _), a, b in zip(head.named_parameters(), gradients, naive, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_the_gradient_between_depths_stops_only_where_asked(target, make_batch):
    """Else HASS would be EAGLE-3's training-time test, and the test above could not tell."""
    grads = []
    for detach in (True, False):
        head = perturbed(target, num_depths=3, detach=detach)
        head.loss(make_batch(target, head)).loss.backward()
        assert head.fc.weight.grad is not None
        grads.append(head.fc.weight.grad)
    assert (grads[0] - grads[1]).abs().max() > 1e-3


# Noise


def test_noise_is_on_the_targets_features_in_training_only(target, make_batch, monkeypatch):
    quiet, noisy = perturbed(target, num_depths=3), perturbed(target, num_depths=3, noise=0.2)
    batch = make_batch(target, quiet)
    starts = chain_starts(batch.loss_mask, 3)
    torch.manual_seed(1)
    losses = [noisy.loss(batch).loss.item() for _ in range(2)]
    torch.manual_seed(1)
    assert noisy.loss(batch).loss.item() == losses[0] != losses[1], "drawn anew, from torch's own generator"
    assert torch.equal(noisy.eval().teacher_forced_logits(batch)[1], quiet.teacher_forced_logits(batch)[1])
    assert noisy.loss(batch).loss.item() == quiet.loss(batch).loss.item()

    monkeypatch.setattr("torch.rand_like", lambda x: torch.full_like(x, 0.75))  # a quarter of the width up
    got = list(noisy.train().unroll(batch, starts))
    batch.output.post_norm = batch.output.post_norm + 0.05
    for ours, wanted in zip(got, quiet.unroll(batch, starts), strict=True):
        torch.testing.assert_close(ours, wanted)


# Drafting


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_tree_scores_what_training_scores_along_each_path(num_layers, target):
    head = perturbed(target, num_layers=num_layers).eval()
    prefix = torch.tensor([[1, 9, 14, 33, 20, 7, 7, 51]])  # x_0 .. x_{t+1}
    state = head.begin(batch_size=1, max_length=64)
    output, num_read = target.forward(prefix[:, :-1]), torch.tensor([prefix.shape[1] - 1])
    head.commit(state, Reading(prefix[:, :-1], prefix[:, 1:], output, torch.tensor([0]), num_read))
    tree = draft_static(head, state, STATIC)
    for path in STATIC.paths:
        nodes = [STATIC.paths.index(path[:n]) for n in range(1, len(path) + 1)]
        drafted = tree.tokens[0, nodes]
        row = torch.cat([prefix, drafted[None], torch.tensor([[3, 4]])], 1)
        mask = torch.arange(row.shape[1])[None] >= num_read
        starts, logits = head.teacher_forced_logits(DraftBatch(row, mask, target.forward(row)))
        assert starts.positions[0, 0] == num_read - 1
        for depth, rank in enumerate(path):
            assert drafted[depth] == logits[0, 0, depth].topk(rank + 1).indices[-1], (path, depth)


# What engines read


def test_files_are_what_engines_load(target, tmp_path):
    """No embedding, output layer or norm of its own, no input norm in layer 0; an untrained bias is of zeros."""
    for bias in (False, True):
        head = perturbed(target, num_layers=2, bias=bias)
        tensors = load_file(save_head(head, tmp_path / "head") / "model.safetensors")
        names = {name for name in tensors if "mlp" not in name and "self_attn" not in name}
        wanted = {"fc.weight", "fc.bias", "layers.1.input_layernorm.weight"}
        assert names == wanted | {f"layers.{i}.post_attention_layernorm.weight" for i in range(2)}
        assert bool(tensors["fc.bias"].any()) == bias
        loaded = load_head(tmp_path / "head", target)
        assert all(torch.equal(value, tensors[name]) for name, value in loaded.state_dict().items())
        keys = head.serving_config()
        assert keys["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
        assert (keys["num_hidden_layers"], keys["vocab_size"], keys["model_type"]) == (2, 61, "llama")
        assert "bias" not in keys and not keys["tie_word_embeddings"], "engines read `bias` as the attention's"


@pytest.mark.parametrize(
    ("key", "value"),
    [("feature_layers", [1]), ("num_layers", 0), ("noise", -0.1), ("num_depths", 0)],
)
def test_what_cannot_be_served_is_refused(key, value):
    with pytest.raises(BadInput, match=key) as caught:
        EagleConfig(**{key: value})
    assert "\n" not in str(caught.value)


def test_shipped_configs_are_the_papers():
    configs = {}
    for path in shipped("heads/*.yaml"):
        if path.stem in ("eagle", "hass"):
            configs[path.stem] = build(EagleConfig, read_config(path)["head"], where="head")
    eagle, hass = configs["eagle"], configs["hass"]
    assert (eagle.type, eagle.num_depths, eagle.noise, eagle.num_layers) == ("eagle", 1, 0.2, 1)
    assert (hass.type, hass.num_depths, hass.noise, hass.detach, hass.depth_decay) == ("eagle", 3, 0.2, True, 1.0)
