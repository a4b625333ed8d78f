"""The weights of one decoder layer of a Llama-shaped model, as the decoders and their kernels read them."""

from typing import NamedTuple

from torch import Tensor


class LayerWeights(NamedTuple):
    """For F channels of the MLP; bias, query_norm and key_norm only in some families, convolutions with G groups of
    channels around attention and MLP in DFlash2's layers."""

    attention_norm: Tensor  # [D]
    qkv: Tensor  # [(N + 2 Nkv) H, D]
    bias: Tensor | None  # [(N + 2 Nkv) H]
    query_norm: Tensor | None  # [H]
    key_norm: Tensor | None  # [H]
    output: Tensor  # [D, N H]
    mlp_norm: Tensor  # [D]
    gate_up: Tensor  # [2 F, D]
    down: Tensor  # [D, F]
    attention_taps: Tensor | None = None  # [2, taps, D]
    attention_correction: Tensor | None = None  # [2 * taps * G, D]
    mlp_taps: Tensor | None = None
    mlp_correction: Tensor | None = None
