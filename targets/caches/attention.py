"""Grouped-query attention of the target over a masked cache, without repeating the cache for every query head."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .prompt_attention import is_prompt, prompt_attention
from .split_attention import masked_attention

NAME = "headstart_grouped"

# without cuDNN's kernel, which torch 2.11 prefers on Hopper
UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def any_shape(device: torch.device) -> AbstractContextManager[object]:
    """A context in which attention takes no kernel that is planned anew, in up to half a second, for each shape."""
    return nullcontext() if device.type == "cpu" else sdpa_kernel(UNPLANNED)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' scaled dot product attention, except for masked queries (verification, trees, drafts, batches).

    For those, transformers repeats keys and values for every query head of a group, which copies the whole cache in
    every layer and round. Here the queries that share a key head are concatenated instead, and the mask is tiled.

    Args:
        query: [B, N, Q, H]. key, value: [B, Nkv, P, H]. attention_mask: [B, 1, Q, P] additive.

    Returns: [B, Q, N, H].
    """
    num_rows, num_heads, num_queries, head_dim = query.shape
    groups = num_heads // key.shape[1]
    if attention_mask is None or attention_mask.shape[1] != 1 or kwargs.get("position_bias") is not None:
        with any_shape(query.device):
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if is_prompt(query):
        return prompt_attention(query, key, value, attention_mask, scale=scaling).transpose(1, 2).contiguous(), None
    packed = query.reshape(num_rows, key.shape[1], groups * num_queries, head_dim)  # [B, Nkv, G * Q, H]
    mask = attention_mask.repeat(1, 1, groups, 1) if groups > 1 else attention_mask  # [B, 1, G * Q, P]
    with any_shape(query.device):
        mixed = masked_attention(packed, key, value, mask, scale=scaling)
    return mixed.reshape(num_rows, num_heads, num_queries, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
