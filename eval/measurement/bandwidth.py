"""What a decode step must read from memory, and how much of the machine's bandwidth the baseline makes of it."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...heads.target import Target
from ..generate import Generation
from ..replay import Stopwatch
from .result import Bandwidth, Result

COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}  # far beyond caches
NUM_COPIES = 3


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that copying a large tensor moves, read and written: the median of NUM_COPIES, after one more.

    On a CPU with as many threads as torch has; on a GPU with at most a quarter of the memory that is free.
    """
    size = COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)  # free bytes, torch's own unused blocks not counted
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    watch, seconds = Stopwatch(device), []
    for _ in range(NUM_COPIES + 1):
        started = watch.now()
        copy.copy_(source)
        seconds.append(watch.now() - started)
    return 2 * size / statistics.median(seconds[1:])  # the first touches fresh pages


def weight_bytes(target: Target, *, num_rows: int = 1) -> float:
    """Bytes of weights that one decode step of num_rows rows reads.

    All parameters once, but embedding tables, of which a step reads a row per token; a table that is the output layer
    too is read whole as such. Of routed experts (parameters below a module `experts`), the share of them that is
    expected where each row picks k of E alike: 1 - (1 - k / E) ** num_rows, so k / E for one row. Routers and shared
    experts count whole.
    """
    model = target.model
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables.discard(id(target.output_layer.weight))
    share = 1 - (1 - experts_per_token(target.config)) ** num_rows
    total = 0.0
    for name, parameter in model.named_parameters():  # a tied one is named once
        if id(parameter) not in tables:
            total += parameter.nbytes * (share if "experts" in name.split(".") else 1)
    return total


def experts_per_token(config: Any) -> float:
    """k / E of a mixture of experts; 1 for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    return config.num_experts_per_tok / num_experts if num_experts else 1.0


def cache_bytes(target: Target, context: int) -> int:
    """Bytes of keys and values that one token attends to, of `context` tokens; in a sliding layer, of its window."""
    config = target.config
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None) or context
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * target.num_layers
    tokens = sum(min(context, window) if kind == "sliding_attention" else context for kind in kinds)  # over layers
    return 2 * tokens * num_heads * head_dim * target.dtype.itemsize


def bytes_per_step(target: Target, context: int, *, num_rows: int = 1) -> float:
    """Bytes that one decode step of num_rows rows reads: weights, and keys and values of `context` tokens a row."""
    return weight_bytes(target, num_rows=num_rows) + num_rows * cache_bytes(target, context)


def baseline_bandwidth(
    target: Target, batches: Iterable[tuple[Sequence[Sequence[int]], Sequence[Generation]]]
) -> Bandwidth:
    """Bytes that the baseline's steps had to read over their seconds, prefills left out; the share of a copy's
    bandwidth is left to `with_share`.

    Args: batches: prompts of each batch, and the baseline's generations from them.
    """
    num_bytes = seconds = 0.0
    for prompts, runs in batches:
        weights = weight_bytes(target, num_rows=len(prompts))
        for run in runs:
            contexts = [len(prompt) + 1 for prompt in prompts]  # the prefill's token is read by the first step
            for step in run.rounds[1:]:
                num_bytes += weights + sum(cache_bytes(target, context) for context in contexts)
                seconds += step.seconds
                contexts = [n + num for n, num in zip(contexts, step.num_committed, strict=True)]
    return Bandwidth(round(num_bytes / seconds / 1e9, 4) if seconds else None)


def with_share(result: Result, copy_gigabytes_per_second: float) -> Result:
    """A result whose `baseline_bandwidth` has the share of the machine's."""
    reached = result.baseline_bandwidth.gigabytes_per_second
    share = None if reached is None else round(reached / copy_gigabytes_per_second, 4)
    return replace(result, baseline_bandwidth=Bandwidth(reached, share))
