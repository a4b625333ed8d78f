"""Which activations a training step keeps for backward, and which backward computes again (Chen et al. 2016, arXiv
1604.06174)."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from .chain_attention import recomputing

P = ParamSpec("P")
R = TypeVar("R")

SHARE = 8  # a step keeps activations of at most this part of its device's memory


@cache
def most_kept(device: torch.device) -> int:
    """Bytes of activations that the layers of a head keep in a step. By the device's total memory, not what is free of
    it, so that runs are repeatable."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // SHARE
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SHARE


def is_kept(num_bytes: int, device: torch.device) -> bool:
    """Whether a step keeps all activations of a head's layers, given roughly how many bytes they are."""
    return num_bytes <= most_kept(device)


def layer_bytes(config: LlamaConfig, *, num_positions: int, itemsize: int) -> int:
    """Roughly what a Llama layer keeps for backward. itemsize: bytes of an activation's element."""
    return num_positions * (16 * config.hidden_size + 4 * config.intermediate_size) * itemsize


def recomputed(run: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """run(*args, **kwargs), whose activations backward computes again; values and gradients are the same.

    `run` is called twice: it must not change what it is given, nor draw random numbers.
    """
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), recomputing()

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)
