"""The memory of a training step at a shape: counted while it runs, or estimated with tensors that have no contents.

The target and its states are left aside: what counts is the head, its gradients, AdamW's two moments, what the step
keeps for backward, and the loss. What kernels take for themselves while they run is not counted.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, LlamaConfig

from ...heads import base
from ...heads.base import DraftBatch, DraftHead
from ...heads.loss import chunked
from ...heads.loss.chains import ChainStarts, chain_starts
from ...heads.loss.chunked import Plan
from ...heads.nn import chain_attention
from ...heads.registry import head_class
from ...heads.target import Target, TargetOutput


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama target's sizes, a head on it and a batch."""

    head: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int
    context: int
    batch_size: int = 1
    depths: int = 7
    dtype: str = "fp32"  # of matrix products, fp32 or bf16; weights, gradients and moments are fp32
    draft_vocabulary: int | None = None  # None: the whole one
    options: dict[str, Any] = field(default_factory=dict)  # more of the head's config

    @property
    def target_config(self) -> LlamaConfig:
        """Of few layers: the target is not counted."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=4,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=2 * self.context,
            tie_word_embeddings=False,
        )


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors that are alive while code runs within it: every storage from its making to its end.

    Under torch's FakeTensorMode the same code is counted at sizes that no machine at hand could hold. now, peak: bytes;
    storages that were there before count once `count` is called with them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def count(self, *tensors: Tensor) -> None:
        """Take in the storages of tensors, each once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._end, key, size).atexit = False

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(*(leaf for leaf in tree_iter(out) if isinstance(leaf, Tensor)))
        return out


class Unchecked(Target):
    """A target whose tensors have no contents that could be compared."""

    def _check_against_model(self) -> None:
        pass


class PreparedStarts(ChainStarts):
    """Chain starts of tensors without contents, with all that the host reads of them."""

    made: Plan

    def plan(self, num_positions: int, *, size: int) -> Plan:
        return self.made


def build_step(
    shape: Shape, *, device: str = "cpu", target_class: type[Target] = Target
) -> tuple[DraftHead, DraftBatch]:
    """A random target and a head on it, and a batch of random full rows, all of it supervised, with its states."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if shape.dtype == "bf16" else torch.float32
    with torch.device(device):
        target = target_class(
            AutoModelForCausalLM.from_config(shape.target_config, dtype=dtype), name="random", fingerprint=""
        )
    config_class = head_class(shape.head).config_class
    size = shape.draft_vocabulary
    config = config_class(type=shape.head, num_depths=shape.depths, draft_vocab_size=size, **shape.options)
    ids = None if size is None else torch.arange(size, device=device)
    with torch.device(device):
        head = head_class(shape.head)(config, target, ids).train()
    rows = torch.randint(shape.vocabulary, (shape.batch_size, shape.context), device=device)
    features = torch.randn(*rows.shape, len(head.feature_layers), shape.hidden, device=device, dtype=target.dtype)
    post_norm = torch.randn(*rows.shape, shape.hidden, device=device, dtype=target.dtype)
    return head, DraftBatch(rows, supervised(shape).to(device), TargetOutput(features, post_norm))


def supervised(shape: Shape) -> Tensor:
    """[B, T] all tokens but the first."""
    return torch.arange(shape.context).expand(shape.batch_size, -1) > 0


def run_step(head: DraftHead, batch: DraftBatch, *, dtype: str) -> None:
    """Loss and backward."""
    kind = batch.input_ids.device.type
    with torch.autocast(kind, torch.bfloat16) if dtype == "bf16" else nullcontext():
        loss = head.loss(batch).loss
    loss.backward()


def peak_bytes(head: DraftHead, batch: DraftBatch, *, dtype: str) -> int:
    """The most that was alive at once in a step behind the first: weights, moments and gradients are there."""
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    with LiveBytes() as live:
        live.count(*head.parameters(), *head.buffers())
        moments = [torch.zeros_like(parameter) for parameter in [*trained, *trained]]
        run_step(head, batch, dtype=dtype)
        del moments
    for parameter in trained:
        parameter.grad = None
    return live.peak


def estimated_peak(shape: Shape, *, device: str = "cuda") -> int:
    """`peak_bytes` of a step on a device that is not at hand, or at a size that it has no memory for.

    device: whose sizes of chunks and blocks hold. Only on a fake CPU does autocast work without the device.
    """
    starts = chain_starts(supervised(shape), shape.depths)
    with ExitStack() as stack:
        if device != "cpu":
            stack.enter_context(as_elsewhere())
        blocks = starts.blocks
        mode = stack.enter_context(FakeTensorMode())
        head, batch = build_step(shape, target_class=Unchecked)
        prepared = PreparedStarts(mode.from_tensor(starts.positions), mode.from_tensor(starts.valid))
        prepared.blocks = blocks
        with unset_fake_temporarily():
            plan = starts.plan(shape.context, size=head.positions_per_chunk(shape.depths))
        chains, positions = (mode.from_tensor(tensor) for tensor in (plan.chains, plan.positions))
        prepared.made = Plan(positions, chains, plan.sizes, plan.size)
        stack.enter_context(patch.object(base, "chain_starts", lambda *_: prepared))
        return peak_bytes(head, batch, dtype=shape.dtype)


@contextmanager
def as_elsewhere() -> Iterator[None]:
    """CPU tensors are treated as those of any other device."""
    with (
        patch.object(chunked, "CHUNK", {}),
        patch.object(chain_attention, "QUERY_BLOCK", {}),
        patch.object(chain_attention, "is_flash", lambda *_: False),
    ):
        yield
