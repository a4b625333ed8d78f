"""The weights of one decoder layer, as the decoders and their kernels read them."""

from typing import Any, NamedTuple

from torch import Tensor


class LayerWeights(NamedTuple):
    """For F channels of the MLP, or of each of E experts, whose gate_up and down follow each other. Biases, sinks and
    norms only in some families; convolutions with G groups of channels around attention and MLP in DFlash2's layers."""

    attention_norm: Any  # [D] or None
    qkv: Tensor  # [(N + 2 Nkv) H, D]
    bias: Tensor | None  # [(N + 2 Nkv) H]
    query_norm: Tensor | None  # [H], or [N H] of all heads together
    key_norm: Tensor | None  # [H] or [Nkv H]
    output: Tensor  # [D, N H]
    mlp_norm: Any  # [D] or None
    gate_up: Tensor  # [2 F, D]
    down: Tensor  # [D, F]
    attention_taps: Tensor | None = None  # [2, taps, D]
    attention_correction: Tensor | None = None  # [2 * taps * G, D]
    mlp_taps: Tensor | None = None
    mlp_correction: Tensor | None = None
    attention_after: Tensor | None = None  # [D] of a norm behind attention
    mlp_after: Tensor | None = None  # [D]
    output_bias: Tensor | None = None  # [D]
    gate_up_bias: Tensor | None = None  # [2 F]
    down_bias: Tensor | None = None  # [D]
    sinks: Tensor | None = None  # [N] scores of nothing
    router: Tensor | None = None  # [E, D]
