"""Bytes that a decode step reads from memory, and the share of the machine's bandwidth that the baseline reaches."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin

from ...targets.target import Target
from ..decoding.loop import Generation
from ..decoding.replay import Stopwatch

COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}  # far larger than caches
NUM_COPIES = 3
# config keys, in a model's words: routed experts of a layer, and those that a token picks
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
PICKED = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")


@dataclass(frozen=True)
class Bandwidth:
    """The baseline's read bandwidth in GB/s (1e9 bytes per second), and as a share of the machine's copy bandwidth."""

    gigabytes_per_second: float | None = None
    share_of_copy: float | None = None


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of copying a large tensor: the median of NUM_COPIES after a warm-up.

    Uses torch's threads on a CPU, and at most a quarter of the free memory on a GPU.
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


def weight_bytes(target: Target, *, num_tokens: int = 1) -> float:
    """Bytes of weights that one forward over num_tokens new tokens reads, of all rows together; of a skeleton too.

    Counts what reads text, each parameter once, except embedding tables, of which a step reads one row per token; a
    table tied to the output layer is read completely. Of routed experts (parameters below a module `experts`) it counts
    the expected share if each token picks k of E uniformly: 1 - (1 - k / E) ** num_tokens. Routers and shared experts
    count fully.
    """
    tables = {id(module.weight) for module in target.base.modules() if isinstance(module, nn.Embedding)}
    share = 1 - (1 - experts_per_token(target.config)) ** num_tokens
    output = {id(parameter): parameter.nbytes for parameter in target.output_layer.parameters()}
    total = float(sum(output.values()))
    for name, parameter in target.base.named_parameters():  # a tied one is named once
        if id(parameter) not in tables and id(parameter) not in output:
            total += parameter.nbytes * (share if "experts" in name.split(".") else 1)
    return total


def experts_per_token(config: Any) -> float:
    """k / E of a mixture of experts; 1 for a dense model, and where its config does not say."""

    def said(names: Sequence[str]) -> Any:
        places = (config, getattr(config, "ffn_config", None))  # DBRX has a config of its own for its experts
        return next((value for place in places for name in names if (value := getattr(place, name, None))), None)

    num, picked = said(EXPERTS), said(PICKED)
    if isinstance(picked, list):  # by layer
        picked = statistics.mean(picked)
    return min(picked / num, 1.0) if num and picked else 1.0


def cache_bytes(target: Target, context: int) -> int:
    """Bytes that one token reads of what is kept of its context: keys and values, and states of recurrent layers."""
    return key_bytes(target, context) + target.state_bytes


def key_bytes(target: Target, context: int) -> int:
    """Bytes of keys and values that one token attends to in a context; in sliding layers at most the window's."""
    config = target.config
    window = getattr(config, "sliding_window", None) or context
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * target.num_layers
    without = {i for i, layer_cache in enumerate(target.kept) if not isinstance(layer_cache, CacheLayerMixin)}
    tokens = [min(context, window) if kind == "sliding_attention" else context for kind in kinds]  # by layer
    if not (num_tokens := sum(num for i, num in enumerate(tokens) if i not in without)):
        return 0
    if rank := getattr(config, "kv_lora_rank", None):  # latent attention keeps one latent and one rotary key
        return num_tokens * (rank + config.qk_rope_head_dim) * target.dtype.itemsize
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads
    return 2 * num_tokens * num_heads * head_dim * target.dtype.itemsize


def baseline_bandwidth(
    target: Target, batches: Iterable[tuple[Sequence[Sequence[int]], Sequence[Generation]]]
) -> Bandwidth:
    """Bytes that the baseline's steps had to read per second, without prefills; `Result.with_share` adds the share.

    Args: batches: for each batch the prompts and the baseline's generations.
    """
    num_bytes = seconds = 0.0
    for prompts, runs in batches:
        weights = weight_bytes(target, num_tokens=len(prompts))
        for run in runs:
            contexts = [len(prompt) + 1 for prompt in prompts]  # the prefill's token is read by the first step
            for step in run.rounds[1:]:
                num_bytes += weights + sum(cache_bytes(target, context) for context in contexts)
                seconds += step.seconds
                contexts = [n + num for n, num in zip(contexts, step.num_committed, strict=True)]
    return Bandwidth(round(num_bytes / seconds / 1e9, 4) if seconds else None)
