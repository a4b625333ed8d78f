"""The target's logits of the tokens that a head can draft, without those of all others."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .functions import DraftVocabulary, drafted_rows


class RestrictedLogits:
    """[n, D] post-norm states -> [n, Vd], as `Target.logits` computes them for the draft vocabulary.

    Keeps a copy of these rows of the output layer from the first call on, unless the target is spread over devices:
    then all logits are computed.
    """

    def __init__(self, target: Any, vocabulary: DraftVocabulary | None):
        """Args: target: a `Target`. vocabulary: None: the whole."""
        self.target, self.vocabulary = target, vocabulary

    @cached_property
    def rows(self) -> dict[str, Tensor] | None:
        """The state dict of these rows; None: all logits are computed."""
        is_whole = self.vocabulary is None or self.target.is_spread
        return None if is_whole else drafted_rows(self.target.output_layer, self.vocabulary)

    def __call__(self, post_norm: Tensor) -> Tensor:
        if self.rows is None:
            logits = self.target.logits(post_norm)
            return logits if self.vocabulary is None else logits[..., self.vocabulary.to_target]
        layer = self.target.output_layer
        logits = torch.func.functional_call(layer, self.rows, (post_norm.to(layer.weight.dtype),))
        return self.target.softcapped(logits)
