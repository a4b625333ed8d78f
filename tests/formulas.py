"""The papers' formulas in plain loops, as the tests of several heads share them: a Llama layer, chains, losses."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def rms(x: Tensor, norm: Any, eps: float = 1e-6) -> Tensor:
    return norm.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [T, N, H] at positions 0..T-1: channel i pairs with i + H/2 (Su et al. 2021)."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(len(x)).float(), theta ** (-torch.arange(half).float() / half))[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), low * angles.sin() + high * angles.cos()], -1)


def attention(weights: Any, x: Tensor, llama: Any, window: int | None = None) -> Tensor:
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


def mlp(layer: Any, hidden: Tensor, llama: Any) -> Tensor:
    """[T, D] with a layer's MLP, behind its norm, added."""
    x = rms(hidden, layer.post_attention_layernorm, llama.rms_norm_eps)
    gate, up = x @ layer.mlp.gate_proj.weight.T, x @ layer.mlp.up_proj.weight.T
    return hidden + (gate / (1 + (-gate).exp()) * up) @ layer.mlp.down_proj.weight.T


def llama_layer(layer: Any, hidden: Tensor, llama: Any, *, is_normed: bool = True) -> Tensor:
    """A Llama layer over a sequence [T, D]; is_normed: whether it has a norm at its input."""
    x = rms(hidden, layer.input_layernorm, llama.rms_norm_eps) if is_normed else hidden
    return mlp(layer, hidden + attention(layer.self_attn, x, llama), llama)


def supervised(mask: Tensor, depth: int) -> Iterator[tuple[int, int]]:
    """(row, t) of every chain start t whose tokens x_{t+1} .. x_{t+2+depth} all count."""
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1] - 2 - depth):
            if bool(mask[row, t + 1 : t + 3 + depth].all()):
                yield row, t


def check_gradients(head: Any, ours: Tensor, wanted: Tensor, *, rtol: float = 1e-3) -> None:
    """Of all of a head's parameters."""
    found, plain = (torch.autograd.grad(loss, list(head.parameters())) for loss in (ours, wanted))
    for (name, _), a, b in zip(head.named_parameters(), found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def check_formulas(
    head: Any,
    batch: Any,
    drafted: Callable[[int, int], Iterable[Tensor]],
    *,
    is_hard: bool = False,
    decay: Callable[[int], float] = lambda depth: 0.8**depth,
    rtol: float = 1e-3,
) -> None:
    """A head's logits are the formulas', its loss the sum over depths k of decay(k) times the mean over supervised
    chains of -sum_v p(v) log q(v), p one-hot for hard labels; and its gradients are those of that.

    Args: drafted: (row, t) -> the formulas' draft logits [Vd] of the chain at t, by depth. rtol: of the gradients.
    """
    chains = {(row, t): list(drafted(row, t)) for row, t in supervised(batch.loss_mask, 0)}
    said = head.target.model(input_ids=batch.input_ids, use_cache=False).logits.detach()
    columns = list(range(said.shape[-1])) if head.vocabulary is None else head.vocabulary.to_target.tolist()
    loss = torch.zeros(())
    for depth in range(head.num_depths):
        terms = []
        for row, t in supervised(batch.loss_mask, depth):
            log_q, label = chains[row, t][depth].log_softmax(-1), int(batch.input_ids[row, t + 2 + depth])
            if is_hard:
                terms.append(-log_q[columns.index(label)] if label in columns else torch.zeros(()))
            else:
                terms.append(-(said[row, t + 1 + depth].softmax(-1)[columns] * log_q).sum())
        loss = loss + decay(depth) * torch.stack(terms).mean()
    ours = head.loss(batch).loss
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-5)
    check_gradients(head, ours, loss, rtol=rtol)
    starts, logits = head.teacher_forced_logits(batch)
    for (row, t), wanted in chains.items():
        at = starts.positions[row].tolist().index(t)
        for depth, one in enumerate(wanted):
            if starts.valid[row, at, depth]:
                torch.testing.assert_close(logits[row, at, depth], one, rtol=1e-5, atol=1e-5)
