"""The target's logits of the tokens that a head can draft, without those of all others."""

from typing import Any

import torch
from torch import Tensor

from .functions import DraftVocabulary, drafted_rows


class RestrictedLogits:
    """[n, D] post-norm states -> [n, Vd], as `Target.logits` computes them for the draft vocabulary.

    Keeps a copy of these rows of the output layer, unless the target is spread over devices: then all are computed.
    """

    def __init__(self, target: Any, vocabulary: DraftVocabulary | None):
        """Args: target: a `Target`. vocabulary: None: the whole."""
        self.target, self.vocabulary = target, vocabulary
        is_whole = vocabulary is None or target.is_spread
        self.rows = None if is_whole else drafted_rows(target.output_layer, vocabulary)

    def __call__(self, post_norm: Tensor) -> Tensor:
        if self.rows is None:
            logits = self.target.logits(post_norm)
            return logits if self.vocabulary is None else logits[..., self.vocabulary.to_target]
        layer = self.target.output_layer
        logits = torch.func.functional_call(layer, self.rows, (post_norm.to(layer.weight.dtype),))
        return self.target.softcapped(logits)
