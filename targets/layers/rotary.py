"""The target's rotary embedding as tables of cosines and sines by position, and the rotation itself."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class Tables(NamedTuple):
    """Cosines and sines of a rotary embedding, by position."""

    cos: Tensor  # [positions, H]
    sin: Tensor


class Rotary:
    """Cosine and sine tables of the target's rotary embedding, by position (Su et al. 2021).

    The tables come from transformers' own initialisation, so every scaling it knows (linear, llama3, yarn, ...) is
    the target's. Half-split rotation as in Llama: the pair of channel i is i + H/2.
    """

    def __init__(self, config: LlamaConfig):
        self.embedding = LlamaRotaryEmbedding(config)
        # by size; never evicted, as a captured CUDA graph reads the table that it was captured with
        self.made: dict[tuple[int, torch.device, torch.dtype], Tables] = {}

    @property
    def frequencies(self) -> Tensor:
        """[H / 2] radians per position."""
        return self.embedding.get_buffer("inv_freq").float().cpu()

    def __call__(self, positions: Tensor, *, like: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """cos, sin [B, 1, Q, H] in `like`'s dtype for positions [B, Q], all below num_positions."""
        cos, sin = self.tables(num_positions, like=like)
        return cos[positions][:, None], sin[positions][:, None]

    def tables(self, num_positions: int, *, like: Tensor) -> Tables:
        """Tables for at least this many positions, in `like`'s dtype and on its device."""
        key = max(256, 1 << (num_positions - 1).bit_length()), like.device, like.dtype
        if key not in self.made:
            positions = torch.arange(key[0], device=like.device)[None]
            cos, sin = self.embedding.to(like.device)(torch.zeros(1, device=like.device), positions)
            self.made[key] = Tables(cos[0].to(like.dtype), sin[0].to(like.dtype))
        return self.made[key]


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [B, N, Q, H] by cos, sin [B, 1, Q, H]."""
    cos, sin = rotary
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
