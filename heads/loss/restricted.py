"""The target's logits of the tokens that a head can draft, without those of all others (FR-Spec, Zhao et al. 2025)."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...targets.cpu.build import multiplies_bf16
from ...targets.cpu.packing import pack_linears
from ...targets.cpu.products import product
from .functions import DraftVocabulary, output_layer_rows

FEW = 256  # positions, at most, for which `packed` is used: those of a round of drafting


class RestrictedLogits:
    """[n, D] post-norm states -> [n, Vd], as `Target.logits` computes them for the draft vocabulary.

    Keeps a copy of these rows of the output layer from the first call on, and another for the bf16 CPU kernels where
    they are used, unless the target is spread over devices: then all logits are computed.
    """

    def __init__(self, target: Any, vocabulary: DraftVocabulary | None):
        """Args: target: a `Target`. vocabulary: None: the whole."""
        self.target, self.vocabulary = target, vocabulary

    @cached_property
    def rows(self) -> dict[str, Tensor] | None:
        """The state dict of these rows; None: all logits are computed."""
        is_whole = self.vocabulary is None or self.target.is_spread
        return None if is_whole else output_layer_rows(self.target.output_layer, self.vocabulary)

    @cached_property
    def packed(self) -> nn.Linear | None:
        """A layer of these rows for drafting, by the bf16 CPU kernels; None: the target has no nn.Linear."""
        if self.rows is None or type(self.target.output_layer) is not nn.Linear:
            return None
        num, size = self.rows["weight"].shape
        layer = nn.Linear(size, num, bias="bias" in self.rows, device="meta").requires_grad_(False)
        layer.load_state_dict(self.rows, assign=True)
        pack_linears(layer)
        return layer

    def __call__(self, post_norm: Tensor) -> Tensor:
        if self.rows is None:
            logits = self.target.logits(post_norm)
            return logits if self.vocabulary is None else logits[..., self.vocabulary.to_target]
        layer, states = self.target.output_layer, post_norm.to(self.target.dtype)
        has_gradients, is_few = torch.is_grad_enabled() or torch.compiler.is_compiling(), states[..., 0].numel() <= FEW
        if self.packed is not None and not has_gradients and (is_few or not multiplies_bf16()):
            return self.target.as_logits(self.packed(states))
        if self.packed is not None and not multiplies_bf16():
            return self.target.as_logits(product(self.packed, states))
        return self.target.as_logits(torch.func.functional_call(layer, self.rows, (states,)))
