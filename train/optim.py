"""The optimizer, and the learning rate at each step."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base.errors import BadInput
from ..heads.base import DraftHead
from ..targets.cpu.build import multiplies_bf16
from .inputs.config import TrainConfig

BETAS = (0.9, 0.95)  # of AdamW; Muon's momentum is 0.95


class WideMuon(torch.optim.Muon):
    """Muon that orthogonalises in fp32, for CPUs that emulate bf16, in which torch's does: there a step of it takes ten
    times as long as the rest of training."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                buffer = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix.grad))
                buffer.lerp_(matrix.grad, 1 - group["momentum"])
                update = matrix.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                update = orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """[m, n] with all singular values near 1, by Newton and Schulz's iteration of degree 5 (Jordan 2024)."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as one optimizer with one state and one list of groups.

    Muon orthogonalises the momentum of a matrix, so that every direction of the update has the same size (Jordan 2024).
    It is scaled to the size of AdamW's updates (Liu et al. 2025), so that both use learning rates of the same order.

    A matrix with a `scale` in its state, broadcast to it, is updated as if it were divided by that, and its inputs or
    outputs multiplied: `DraftHead.matrix_scales`.
    """

    def __init__(self, matrices: list[dict[str, Any]], others: list[dict[str, Any]]):
        is_emulated = matrices[0]["params"][0].device.type == "cpu" and not multiplies_bf16()
        muon = WideMuon if is_emulated else torch.optim.Muon
        self.parts = [
            muon(matrices, adjust_lr_fn="match_rms_adamw"),
            *([torch.optim.AdamW(others, betas=BETAS, fused=True)] if others else []),
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Make both parts use this optimizer's groups and state, also after loading."""
        start = 0
        for part in self.parts:
            count = len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start : start + count], self.state
            start += count

    def rescale(self, head: DraftHead) -> None:
        """Take the scales of the head's matrices that are known by now."""
        matrices = {id(p) for group in self.parts[0].param_groups for p in group["params"]}
        scales = head.matrix_scales()
        for name, p in head.named_parameters():
            if name in scales and id(p) in matrices:
                self.state[p]["scale"] = scales[name].to(p, copy=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        scaled = [(p, p.grad, of["scale"]) for p, of in self.state.items() if "scale" in of]
        scaled = [(p, grad, scale) for p, grad, scale in scaled if grad is not None]
        for matrix, grad, scale in scaled:
            grad.mul_(scale)
            matrix.div_(scale)
        for part in self.parts:
            part.step()
        for matrix, _, scale in scaled:
            matrix.mul_(scale)


def build_optimizer(head: DraftHead, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, or Muon with AdamW for vectors and `DraftHead.vocabulary_matrices`; weight decay only on matrices.

    Each group has `peak`, the learning rate that `learning_rate_share` scales, and `part`: its prefix of parameter
    names in `DraftHead.learning_rate_scales`, or "".
    """
    named = {name: p for name, p in head.named_parameters() if p.requires_grad}
    is_muon = config.optimizer == "muon"
    of_tokens = {id(matrix) for matrix in head.vocabulary_matrices()}
    inner = [name for name, p in named.items() if is_muon and p.ndim == 2 and id(p) not in of_tokens]
    outer = [name for name, p in named.items() if p.ndim >= 2 and name not in inner]
    vectors = [name for name, p in named.items() if p.ndim < 2]

    def groups(names: Sequence[str], *, peak: float, decay: float) -> list[dict[str, Any]]:
        by_part: dict[str, dict[str, Any]] = {}
        for name in names:
            part = next((part for part in head.learning_rate_scales() if name.startswith(part)), "")
            fresh = {"params": [], "part": part, "peak": peak, "lr": peak, "weight_decay": decay}
            by_part.setdefault(part, fresh)["params"].append(named[name])
        return list(by_part.values())

    peak, decay = config.learning_rate, config.weight_decay
    others = [*groups(outer, peak=peak, decay=decay), *groups(vectors, peak=peak, decay=0.0)]
    if not inner:
        return torch.optim.AdamW(others, betas=BETAS, fused=True)
    matrices = groups(inner, peak=config.matrix_learning_rate or peak, decay=decay)
    optimizer = MuonAdamW(matrices, others)
    optimizer.rescale(head)
    return optimizer


def without_whole_matrices(config: TrainConfig, backend: str) -> TrainConfig:
    """A config with Muon, for a backend whose ranks hold parts of matrices: AdamW replaces Muon.

    Raises: BadInput if the config has no learning rate for AdamW.
    """
    if config.adamw_learning_rate is None:
        why = "it needs whole matrices, and a rank has parts"
        raise BadInput(f"train.optimizer muon under {backend}: {why}; take ddp, or give train.adamw_learning_rate")
    rates: dict[str, Any] = {"learning_rate": config.adamw_learning_rate, "adamw_learning_rate": None}
    return replace(config, optimizer="adamw", matrix_learning_rate=None, **rates)


def learning_rate_share(step: int, config: TrainConfig) -> float:
    """Share of the peak learning rates at 0-based `step`: linear warm-up, then half a cosine down to min_lr_ratio."""
    if step < config.warm_up:
        return (step + 1) / config.warm_up
    progress = (step - config.warm_up) / (config.max_steps - config.warm_up)
    low = config.min_lr_ratio
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rates(optimizer: torch.optim.Optimizer, head: DraftHead, step: int, config: TrainConfig) -> float:
    """Give each group of `build_optimizer` its rate at 0-based `step`; returns the share of the peak."""
    share, scales = learning_rate_share(step, config), head.learning_rate_scales()
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share * scales.get(group["part"], 1.0)
    return share
