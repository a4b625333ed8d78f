"""Heads and losses equal the papers' formulas, written plainly in loops over rows, positions and depths."""

import math

import pytest
import torch
from headstart.heads.base import DraftBatch
from headstart.heads.folder import fingerprint_of_tensors
from headstart.heads.loss.chains import chain_starts
from headstart.heads.medusa import MedusaConfig
from headstart.heads.registry import HEADS, build_head, load_head, save_head
from headstart.heads.target import Target
from perturbing import perturb
from safetensors.torch import load_file

CUT = torch.tensor([2, 3, 5, 8, 13, 14, 21, 22, 30, 31, 34, 40, 41, 42, 43, 50, 51, 52, 55, 60])


def perturbed(head_type, target, *, ids=None, **changes):
    """A head whose every weight is away from its start."""
    size = None if ids is None else len(ids)
    config = HEADS[head_type].config_class(type=head_type, draft_vocab_size=size, **changes)
    head = build_head(config, target, draft_token_ids=ids, seed=2)
    return perturb(head, 0.2, seed=4).train()


def supervised(mask, depth):
    """(row, t) of every chain start t whose tokens x_{t+1} .. x_{t+2+depth} all count."""
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            wanted = range(t + 1, t + 3 + depth)
            if wanted[-1] < mask.shape[1] and all(bool(mask[row, i]) for i in wanted):
                yield row, t


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


def eagle3_layer(head, tokens, hiddens, theta):
    """The last output of EAGLE-3's layer over a sequence of (token, hidden) pairs, everything recomputed."""
    w, c = head.midlayer, head.llama
    n, kv, size, eps = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rms_norm_eps
    keys, values, x = [], [], None
    for position, (token, hidden) in enumerate(zip(tokens, hiddens, strict=True)):
        embedded = head.target.input_embedding.weight[token]
        x = torch.cat([rms(embedded, w.input_layernorm.weight, eps), rms(hidden, w.hidden_norm.weight, eps)])
        k, v = w.self_attn.k_proj.weight @ x, w.self_attn.v_proj.weight @ x
        keys.append([turned(k[i * size : (i + 1) * size], position, theta) for i in range(kv)])
        values.append([v[i * size : (i + 1) * size] for i in range(kv)])
    q, mixed = w.self_attn.q_proj.weight @ x, []
    for i in range(n):
        query, group = turned(q[i * size : (i + 1) * size], len(tokens) - 1, theta), i // (n // kv)
        scores = torch.stack([query @ key[group] / math.sqrt(size) for key in keys])
        weights = scores.exp() / scores.exp().sum()
        mixed.append(sum(a * value[group] for a, value in zip(weights, values, strict=True)))
    hidden = hiddens[-1] + w.self_attn.o_proj.weight @ torch.cat(mixed)
    x = rms(hidden, w.post_attention_layernorm.weight, eps)
    gate, up = w.mlp.gate_proj.weight @ x, w.mlp.up_proj.weight @ x
    return hidden + w.mlp.down_proj.weight @ (gate / (1 + (-gate).exp()) * up)


def naive_eagle3(head, batch, row, t):
    """Draft logits at every depth of the chain at t: the sequence of pairs grows by the layer's own output."""
    theta = head.llama.rope_parameters["rope_theta"]
    tokens = [int(x) for x in batch.input_ids[row, 1 : t + 2]]
    hiddens = [head.fc.weight @ batch.output.features[row, p].flatten() for p in range(t + 1)]
    for depth in range(head.num_depths):
        out = eagle3_layer(head, tokens, hiddens, theta)
        yield head.lm_head.weight @ rms(out, head.norm.weight, head.llama.rms_norm_eps)
        if t + 2 + depth < batch.input_ids.shape[1]:
            tokens.append(int(batch.input_ids[row, t + 2 + depth]))
            hiddens.append(out)


def naive_medusa(head, batch, row, t):
    """W2 (h + silu(W1 h + b)) for every head (Cai et al. 2024, eq. 1)."""
    hidden = batch.output.post_norm[row, t]
    for k in range(head.num_depths):
        block, output = head.get_submodule(f"{k}.0.linear"), head.get_submodule(f"{k}.1")
        inner = block.weight @ hidden + block.bias
        yield output.weight @ (hidden + inner / (1 + (-inner).exp()))


NAIVE = {"eagle3": naive_eagle3, "medusa": naive_medusa}


def naive_loss(head, batch, *, hard, ids=None):
    """sum_k 0.8^k * mean over supervised chains of -sum_v p(v) log q(v), p one-hot for hard labels."""
    with torch.no_grad():
        said = head.target.model(input_ids=batch.input_ids, use_cache=False).logits
    columns = list(range(said.shape[-1])) if ids is None else ids.tolist()
    every = {(row, t): list(NAIVE[head.config.type](head, batch, row, t)) for row, t in supervised(batch.loss_mask, 0)}
    loss = torch.zeros(())
    for depth in range(head.num_depths):
        terms = []
        for row, t in supervised(batch.loss_mask, depth):
            log_q = every[row, t][depth].log_softmax(-1)
            if hard:
                label = int(batch.input_ids[row, t + 2 + depth])
                terms.append(-log_q[columns.index(label)] if label in columns else torch.zeros(()))
            else:
                terms.append(-(said[row, t + 1 + depth].softmax(-1)[columns] * log_q).sum())
        loss = loss + 0.8**depth * torch.stack(terms).mean()
    return loss


@pytest.mark.parametrize(
    ("head_type", "name", "ids"),
    [("eagle3", "soft_ce", None), ("eagle3", "soft_ce", CUT), ("eagle3", "hard_ce", CUT), ("medusa", "hard_ce", None)]
    + [("medusa", "soft_ce", None)],
)
def test_loss_logits_and_gradients_are_the_papers(head_type, name, ids, target, make_batch):
    head = perturbed(head_type, target, ids=ids, loss={name: 1.0}, num_depths=3)
    batch = make_batch(target, head, num_rows=2, length=10)
    if ids is not None:
        assert not set(batch.input_ids.flatten().tolist()) <= set(ids.tolist()), "some labels cannot be drafted"
    out = head.loss(batch)
    wanted = naive_loss(head, batch, hard=name == "hard_ce", ids=ids)
    torch.testing.assert_close(out.loss, wanted, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(out.loss, list(head.parameters()))
    naive = torch.autograd.grad(wanted, list(head.parameters()))
    for (part, _), a, b in zip(head.named_parameters(), ours, naive, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=lambda text, part=part: f"{part}: {text}")
    starts, logits = head.teacher_forced_logits(batch)
    for row, t in supervised(batch.loss_mask, 0):
        at = starts.positions[row].tolist().index(t)
        for depth, naive_logits in enumerate(NAIVE[head_type](head, batch, row, t)):
            assert bool(starts.valid[row, at, depth]) == ((row, t) in set(supervised(batch.loss_mask, depth)))
            if starts.valid[row, at, depth]:
                torch.testing.assert_close(logits[row, at, depth], naive_logits, rtol=1e-4, atol=1e-4)


def test_counts_and_hits_are_of_the_supervised_chains(head_type, target, make_batch):
    head = perturbed(head_type, target, num_depths=3)
    batch = make_batch(target, head)
    out = head.loss(batch)
    starts, logits = head.teacher_forced_logits(batch)
    for depth in range(3):
        chains = list(supervised(batch.loss_mask, depth))
        assert out.depth_count[depth] == len(chains)
        right = 0
        for row, t in chains:
            at = starts.positions[row].tolist().index(t)
            is_hit = int(logits[row, at, depth].argmax()) == int(batch.input_ids[row, t + 2 + depth])
            assert bool(out.hits[row, at, depth]) == is_hit
            right += is_hit
        assert int(out.hits[..., depth].sum()) == right


def test_halves_with_shared_denominators_add_up_to_the_whole(head_type, target, make_batch):
    """What makes the gradient independent of accumulation and of the number of ranks."""
    head = perturbed(head_type, target)
    batch = make_batch(target, head, num_rows=5)
    counts = chain_starts(batch.loss_mask, head.num_depths).counts()
    whole = torch.autograd.grad(head.loss(batch).loss, list(head.parameters()))
    total, value = [torch.zeros_like(p) for p in head.parameters()], 0.0
    for rows in (slice(0, 2), slice(2, 5)):
        ids, mask = batch.input_ids[rows], batch.loss_mask[rows]
        output = target.forward(ids, feature_layers=head.feature_layers)
        out = head.loss(DraftBatch(ids, mask, output), counts)
        value += out.loss.item()
        total = [a + b for a, b in zip(total, torch.autograd.grad(out.loss, list(head.parameters())), strict=True)]
    assert value == pytest.approx(head.loss(batch).loss.item(), rel=1e-5)
    for a, b in zip(total, whole, strict=True):  # scores of these weights reach hundreds: fp32 holds 1e-5 of them
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize("output", ["own", "shared"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_untrained_medusa_head_is_the_targets_output_layer(output, bias, family, tiny_model):
    model = tiny_model(family)
    if bias:
        layer = torch.nn.Linear(32, 61)
        layer.weight = model.get_output_embeddings().weight
        model.set_output_embeddings(layer)
    target = Target(model, name="tiny", fingerprint=fingerprint_of_tensors(dict(model.named_parameters())))
    head = build_head(MedusaConfig(output=output, num_blocks=2), target)
    ids = torch.arange(3, 40)[None]
    states = target.forward(ids)
    starts, logits = head.teacher_forced_logits(DraftBatch(ids, torch.ones_like(ids).bool(), states))
    wanted = starts.take(target.logits(states.post_norm))
    for k in range(head.num_depths):
        assert torch.equal(logits[:, :, k], wanted)
        assert output == "shared" or (f"{k}.2.bias" in head.state_dict()) == bias


def test_draft_vocabulary_offsets_are_the_engines(target, make_batch, tmp_path):
    """d2t: target id minus draft id; t2d: whether a target token can be drafted."""
    head = perturbed("eagle3", target, ids=CUT)
    tensors = load_file(save_head(head, tmp_path / "head") / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert [i + int(d) for i, d in enumerate(tensors["d2t"])] == CUT.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == CUT.tolist() and len(tensors["t2d"]) == 61
    loaded = load_head(tmp_path / "head", target)
    assert loaded.vocabulary is not None and torch.equal(loaded.vocabulary.to_target, CUT)
    batch = make_batch(target, head)
    assert torch.equal(loaded.teacher_forced_logits(batch)[1], head.teacher_forced_logits(batch)[1])
    state_logits = torch.randn(3, len(CUT))
    assert loaded.to_target(state_logits.argmax(-1)).tolist() == CUT[state_logits.argmax(-1)].tolist()


def test_an_untrained_eagle3_head_starts_from_the_targets_output(target):
    head = build_head(
        HEADS["eagle3"].config_class(type="eagle3", draft_vocab_size=len(CUT)), target, draft_token_ids=CUT
    )
    weights = dict(head.named_parameters())
    assert torch.equal(weights["lm_head.weight"], target.output_layer.weight[CUT])
    torch.testing.assert_close(weights["norm.weight"], target.final_norm_scale())
