"""What a training step costs at a shape: its time, how much of the machine it uses, where that goes, and its memory.

A step is loss, backward and AdamW on random rows; the target's own forward is left aside, its states being given. Its
memory is counted while it runs, or estimated with tensors that have no contents: the head, its gradients, AdamW's two
moments, what the step keeps for backward, and the loss, but not what kernels take for themselves while they run.
docs/results/train.md defines the figures.
"""

import statistics
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, LlamaConfig

from ..engines.heads import head_class
from ..heads.base import DraftBatch, DraftHead
from ..heads.loss import chunked, sight
from ..heads.loss.chains import ChainStarts
from ..heads.loss.chunked import ChunkPlan
from ..heads.loss.fusing import Fusable
from ..heads.nn import chain_attention, kept
from ..targets.cpu import products
from ..targets.layers.target_output import TargetOutput
from ..targets.target import Target
from ..train.watching.speed import synchronize
from .operations import Operations, matmul_rate, profiled
from .store import Figures

GPU_BYTES = 80 * 2**30  # of the GPU for which memory is estimated


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
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=4,
            num_attention_heads=self.num_heads, num_key_value_heads=self.num_kv_heads, vocab_size=self.vocabulary,
            max_position_embeddings=2 * self.context, tie_word_embeddings=False,
        )  # fmt: skip


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors while code runs within it: each storage from its allocation to its release.

    Under torch's FakeTensorMode the same code is counted at sizes that no machine at hand could hold. now, peak: bytes;
    storages that were there before count once `count` is called with them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def count(self, *tensors: Tensor) -> None:
        """Count the storages of these tensors, each once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._end, key, size).atexit = False

    def leave_aside(self, *tensors: Tensor) -> None:
        """Never count the storages of these tensors, which outlive the mode, nor what is seen of them in views."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(*(leaf for leaf in tree_iter(out) if isinstance(leaf, Tensor)))
        return out


class PreparedStarts(ChainStarts):
    """Chain starts of tensors without contents, with all that the host reads of them."""

    made: ChunkPlan

    def plan(self, num_positions: int, *, size: int) -> ChunkPlan:
        return self.made


def build_step(shape: Shape, *, device: str = "cpu") -> tuple[DraftHead, DraftBatch]:
    """A random target and a head on it, and a batch of random full rows, all of it supervised, with its states."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if shape.dtype == "bf16" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.target_config, dtype=dtype)
        target = Target.of(model, name="random", fingerprint="")
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
    """Loss and backward, on the chains that the training loop would draw unless the batch names some."""
    kind = batch.input_ids.device.type
    if batch.starts is None:
        batch = replace(batch, starts=head.training_starts(batch.loss_mask))
    with torch.autocast(kind, torch.bfloat16) if dtype == "bf16" else nullcontext():
        loss = head.loss(batch).loss
    loss.backward()


def peak_bytes(head: DraftHead, batch: DraftBatch, *, dtype: str) -> int:
    """Peak bytes of live tensors in a step after the first, when weights, moments and gradients exist. The target and
    the batch are left aside."""
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    with LiveBytes() as live:
        live.leave_aside(*given(head, batch))
        live.count(*head.parameters(), *head.buffers())
        moments = [torch.zeros_like(parameter) for parameter in [*trained, *trained]]
        run_step(head, batch, dtype=dtype)
        del moments
    for parameter in trained:
        parameter.grad = None
    return live.peak


def given(head: DraftHead, batch: DraftBatch) -> list[Tensor]:
    """What a step is given: the target's weights, tokens and states."""
    return [
        *head.target.model.parameters(), batch.input_ids, batch.loss_mask, batch.output.features, batch.output.post_norm
    ]  # fmt: skip


def estimated_peak(shape: Shape, *, device: str = "cuda", gpu_bytes: int = GPU_BYTES) -> int:
    """`peak_bytes` of a step on a device that is not at hand, or at a size that it has no memory for.

    device: whose sizes of chunks and blocks hold. Only on a fake CPU does autocast work without the device.
    gpu_bytes: its memory, by which a step chooses what it keeps and how many logits exist at a time.
    """
    with ExitStack() as stack:
        if device != "cpu":
            stack.enter_context(as_on_gpu(gpu_bytes))
        mode = stack.enter_context(FakeTensorMode())
        head, batch = build_step(shape)
        with unset_fake_temporarily():
            starts = head.training_starts(supervised(shape))
            blocks, plan = starts.blocks, starts.plan(shape.context, size=head.positions_per_chunk(shape.depths))
        positions, valid = mode.from_tensor(starts.positions), mode.from_tensor(starts.valid)
        prepared = PreparedStarts(positions, valid, has_gaps=starts.has_gaps)
        prepared.blocks = blocks
        prepared.made = ChunkPlan(
            mode.from_tensor(plan.positions), mode.from_tensor(plan.chains), plan.scored, plan.size
        )
        batch = replace(batch, starts=prepared)
        return peak_bytes(head, batch, dtype=shape.dtype)


@contextmanager
def as_on_gpu(num_bytes: int) -> Iterator[None]:
    """CPU tensors are treated as those of a GPU with that much memory."""
    with (
        patch.object(chunked, "CHUNK", {}),
        patch.object(chunked, "CHUNK_ELSEWHERE", chunked.logits_held(num_bytes)),
        patch.object(sight, "QUERY_BLOCK", {}),
        patch.object(chain_attention, "OWN_PRODUCTS", {}),
        patch.object(kept, "most_kept", lambda device: num_bytes // kept.SHARE),
        patch.object(chain_attention, "is_flash", lambda *_: False),
        patch.object(products, "multiplies_bf16", lambda: True),
    ):
        yield


class TrainingStep:
    """A head of a shape, its optimizer and a batch; each call is one step.

    is_compiled: with train.compile. On a CPU the memory of such a step is not seen.
    """

    def __init__(self, shape: Shape, *, device: str, is_compiled: bool = False):
        self.shape, self.device, self.is_compiled = shape, torch.device(device), is_compiled
        self.head, self.batch = build_step(shape, device=device)
        trained = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def __call__(self) -> None:
        with patch.object(Fusable, "is_fused", self.is_compiled):
            run_step(self.head, self.batch, dtype=self.shape.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self) -> float:
        """Of one step."""
        synchronize(self.device)
        start = time.perf_counter()
        self()
        synchronize(self.device)
        return time.perf_counter() - start

    def measure(self, *, steps: int) -> Figures:
        """Figures of that many timed steps, after two warm-up steps."""
        shape, seconds, rates = self.shape, [], []
        first = self.seconds()
        with Operations() as counted:
            self()
        kind = torch.bfloat16 if shape.dtype == "bf16" else torch.float32
        for _ in range(steps):
            rates.append(matmul_rate(self.device, kind, trials=1))
            seconds.append(self.seconds())
        typical, rate = statistics.median(seconds), max(rates)
        own = counted.total - counted.repeated
        return {
            "tokens_per_second": round(shape.batch_size * shape.context / typical, 1),
            "step_ms": round(1e3 * typical, 3),
            "step_ms_min": round(1e3 * min(seconds), 3),
            "step_ms_max": round(1e3 * max(seconds), 3),
            "num_steps": steps,
            "first_step_seconds": round(first, 2),
            "peak_bytes": self.peak(),
            "step_flops": own,
            "repeated_flops": counted.repeated,
            "matmul_flops_per_second": round(rate),
            "mfu": round(own / typical / rate, 3),
            "hfu": round(counted.total / typical / rate, 3),
        }

    def peak(self) -> int | None:
        """Peak bytes in a step."""
        if self.device.type != "cuda":
            return None if self.is_compiled else peak_bytes(self.head, self.batch, dtype=self.shape.dtype)
        torch.cuda.reset_peak_memory_stats()
        self()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - sum(tensor.nbytes for tensor in given(self.head, self.batch))

    def profile(self) -> Figures:
        """One step by operator."""
        return profiled(self, self.device)
