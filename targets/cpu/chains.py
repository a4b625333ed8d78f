"""Greedy chains of a head whose one layer reads its own output, drafted by one call, in bf16 on a CPU.

So little is computed between two drafts that calling torch's operations one by one would take nearly as long again.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ..caches.cache import SlotCache
from ..layers.rotary import Tables
from .build import kernels
from .decoder import CpuLayers
from .products import blocked
from .structs import Chain, address_of


@dataclass
class DraftedChains:
    """For K drafts of each row. tokens: [B, K] target ids. logits: [K, B, Vd]. probabilities: [B, K] of the tokens."""

    tokens: Tensor
    logits: Tensor
    probabilities: Tensor


class CpuChains:
    """A head's layer, with what it reads between two drafts: the drafted token's embedding, and its own output."""

    def __init__(
        self,
        layers: CpuLayers,
        *,
        embedding: Tensor,
        embedding_norm: Tensor,
        hidden_norm: Tensor,
        output_norm: Tensor,
        output: Tensor,
        to_target: Tensor | None,
    ):
        """All tensors are bf16, but for to_target.

        Args:
            layers: one layer, whose attention reads the embedding and the output, each normalised, in this order.
            embedding: [V, D] the target's. output: [Vd, D] the head's output layer.
            embedding_norm, hidden_norm, output_norm: [D] gains of the norms of both and of the output layer's input.
            to_target: [Vd] int64, the target id of each draft id; None: the same.
        """
        self.layers, self.num_outputs = layers, len(output)
        tensors = {
            "embedding": embedding,
            "embedding_norm": embedding_norm,
            "hidden_norm": hidden_norm,
            "output_norm": output_norm,
            "output": blocked(output),
            "to_target": to_target,
        }
        self.tensors = {name: None if x is None else x.detach().contiguous() for name, x in tensors.items()}
        addresses = {name: address_of(x) for name, x in self.tensors.items()}
        self.chain = Chain(**addresses, num_outputs=self.num_outputs)

    def draft(
        self, hidden: Tensor, cache: SlotCache, tables: Tables, positions: Tensor, *, num_tokens: int
    ) -> DraftedChains:
        """Draft behind the layer's output hidden [B, 1, D] for the tokens at positions [B]."""
        library, hidden, num_rows = kernels(), hidden.clone(memory_format=torch.contiguous_format), len(hidden)
        assert library is not None
        logits = hidden.new_empty(num_tokens, num_rows, self.num_outputs)
        tokens, probabilities = torch.empty(num_rows, num_tokens, dtype=torch.long), torch.empty(num_rows, num_tokens)
        positions = positions.contiguous()
        forward = self.layers.forward_over(hidden, cache, tables)
        forward.positions, self.chain.num_tokens = positions.data_ptr(), num_tokens
        library.draft(
            *(self.layers.layers, ctypes.byref(forward), ctypes.byref(self.chain)),
            *(x.data_ptr() for x in (hidden, logits, tokens, probabilities)),
        )
        return DraftedChains(tokens, logits, probabilities)
