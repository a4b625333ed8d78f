"""The head and its optimizer under DDP, DeepSpeed or FSDP2: everything that differs between these backends.

The loop and the checkpoints are independent of the backend. Each backend shards the head as one unit: a rank gathers
all its weights for the whole step, and every checkpoint holds whole tensors.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import pad

from ..base.errors import BadInput
from ..heads.base import DraftBatch, DraftHead, LossOutput
from .checkpoint import head_tensors
from .inputs.config import TrainConfig
from .inputs.launch import actual_launch, product_dtype


class Step(nn.Module):
    """The head's loss as a tuple, since wrappers hook tensors in tuples but not in dataclasses."""

    def __init__(self, head: DraftHead, *, dtype: torch.dtype):
        super().__init__()
        self.head, self.dtype = head, dtype

    def autocast(self) -> Any:
        """bf16 where the run asks for it; weights stay fp32."""
        kind = self.head.target.device.type
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(kind, self.dtype)

    def forward(self, batch: DraftBatch, denominators: Tensor) -> tuple[Any, ...]:
        with self.autocast():
            out = self.head(batch, denominators)
        return out.loss, out.depth_loss, out.depth_count, out.starts, out.hits


class Backend:
    """A head and its optimizer under the launched backend.

    autocast(): the context of the run's precision, which `loss` enters itself.
    """

    def __init__(
        self, accelerator: Accelerator, head: DraftHead, optimizer: torch.optim.Optimizer, config: TrainConfig
    ):
        """Raises BadInput on what the backend cannot train correctly."""
        self.accelerator, self.head, self.config = accelerator, head, config
        self.is_zero = accelerator.distributed_type == DistributedType.DEEPSPEED
        self.is_fsdp = accelerator.distributed_type == DistributedType.FSDP
        self.is_zero3 = self.is_zero and cast(Any, accelerator.state).deepspeed_plugin.zero_stage == 3
        self.is_zero2 = self.is_zero and not self.is_zero3
        if head.adapts_target and (self.is_zero3 or self.is_fsdp):
            name = actual_launch(accelerator).backend
            raise BadInput(f"{name} would shard the adapters that the target runs through: launch this head with ddp")
        if head.adapts_target and config.context_parallel > 1:
            why = "each process would learn the adapted target's own loss of the same rows"
            raise BadInput(f"train.context_parallel {config.context_parallel}: {why}: leave it out with this head")
        step = Step(head, dtype=product_dtype(config))
        self.plain = without_weights(head) if self.is_zero3 or self.is_fsdp else head
        if self.is_zero3:
            from deepspeed.runtime.zero import register_external_parameter

            for parameter in head.parameters():
                register_external_parameter(step, parameter)
        self.autocast = step.autocast
        for state in optimizer.state.values():
            if "scale" in state:  # measured by each rank, perhaps on states that a server rounded otherwise
                broadcast(state["scale"])
        self.wrapped, self.optimizer = cast(Any, accelerator.prepare(step, optimizer))
        if self.is_zero3:
            gather_as_one(step, self.optimizer.optimizer.parameter_offload)

    def loss(self, batch: DraftBatch, denominators: Tensor) -> LossOutput:
        """The head's loss, for `backward`."""
        return LossOutput(*self.wrapped(batch, denominators))

    @contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        """Context of a batch's loss and backward pass; gradients are reduced over ranks only in a step's last batch."""
        self.accelerator.sync_gradients = is_last
        with nullcontext() if is_last else self.accelerator.no_sync(self.wrapped):
            yield

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of the sum of `loss` over ranks, compensating for data parallelism's mean."""
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def update(self) -> float:
        """Clip, step and clear the gradients; returns their norm before clipping. DeepSpeed does this in `backward`."""
        most = self.config.max_grad_norm or math.inf  # 0: not clipped
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), most)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(whole_tensor(norm))

    def is_finite(self) -> bool:
        """Whether all weights and the optimizer's state are finite, over all ranks."""
        parameters = cast(Any, self.head.parameters())
        weights = [parameter.ds_tensor if self.is_zero3 else parameter for parameter in parameters]
        state = [value for part in self._torch_optimizer.state.values() for value in part.values()]
        held = [own_part(value) for value in [*weights, *state] if isinstance(value, Tensor)]
        is_bad = any(not bool(value.isfinite().all()) for value in held)
        return not self.total(torch.tensor([float(is_bad)], device=self.accelerator.device)).any()

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""
        return cast(Tensor, self.accelerator.reduce(values, "sum"))

    @contextmanager
    def whole(self) -> Iterator[DraftHead]:
        """A context with the head's whole weights in every process, read-only, for any use except the training step.

        All processes must enter and leave it together; what they do inside may differ.
        """
        if self.plain is self.head:
            yield self.head
            return
        copies = dict(self.plain.named_parameters())
        for name, parameter in self.head.named_parameters():
            with self._gathered(parameter) as value:
                copies[name].data = value.detach().clone()
        yield self.plain
        for parameter in copies.values():
            parameter.data = parameter.new_empty(0)

    @contextmanager
    def _gathered(self, parameter: Any) -> Iterator[Tensor]:
        if self.is_fsdp:
            yield parameter.full_tensor()
            return
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(parameter):
            yield parameter

    def weights(self) -> dict[str, Tensor]:
        """The head's tensors for a checkpoint, in the main process; empty elsewhere."""
        with self.whole() as head:
            return head_tensors(head) if self.accelerator.is_main_process else {}

    def optimizer_state(self) -> dict[str, Tensor]:
        """The whole state of each parameter by `NAME|KEY`, on the CPU in the main process; empty elsewhere."""
        if self.is_zero2:
            self._link_state()
        whole = {}
        for name, parameter in self.head.named_parameters():
            for key, value in self._state_of(parameter).items():
                value = whole_tensor(value)
                if self.accelerator.is_main_process:
                    whole[f"{name}|{key}"] = value.detach().cpu().contiguous()
        return whole

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        if not self.is_zero:
            state = self._torch_optimizer.state.get(parameter, {})
            return {key: torch.as_tensor(value) for key, value in state.items()}
        from deepspeed.utils import safe_get_full_optimizer_state as full

        if not parameter.requires_grad:
            return {}
        flat = next(iter(self._torch_optimizer.state.values()), {})  # of any partition, as all are at the same step
        return {key: full(parameter, key) if value.ndim else value.clone() for key, value in flat.items()}

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `optimizer_state`, which may come from another backend."""
        optimizer, parameters = self._torch_optimizer, dict(self.head.named_parameters())
        if self.is_zero and state:
            self._make_room(state)
        for entry, value in state.items():
            name, _, key = entry.rpartition("|")
            parameter = cast(Any, parameters[name])
            value = value.to(parameter.device)  # also the number of steps, which a fused optimizer counts there
            if self.is_fsdp and value.ndim:
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            if not self.is_zero:
                optimizer.state[parameter][key] = value
            elif value.ndim:
                self._fill(parameter, key, value)

    def _make_room(self, state: Mapping[str, Tensor]) -> None:
        """Allocate the state of ZeRO's flat partitions as its first step would: zeros, at the step count of `state`."""
        zero, keys = self.optimizer.optimizer, {entry.rpartition("|")[2]: value for entry, value in state.items()}
        for flat in zero.single_partition_of_fp32_groups if self.is_zero2 else zero.fp32_partitioned_groups_flat:
            self._torch_optimizer.state[flat] = {
                key: torch.zeros_like(flat) if value.ndim else value.to(flat.device, copy=True)
                for key, value in keys.items()
            }
        if self.is_zero2:
            self._link_state()

    def _link_state(self) -> None:
        """Link each parameter to its state in ZeRO-2's flat partitions.

        DeepSpeed does so when its first step updates the first parameter group, which is too early for other groups.
        """
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        zero, state = self.optimizer.optimizer, self._torch_optimizer.state
        for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            lazy_init_hp_params_optimizer_state(parameters, flat, state)

    def _fill(self, parameter: Any, key: str, value: Tensor) -> None:
        """Write this rank's part of a whole tensor into ZeRO's partitions."""
        if self.is_zero2:
            from deepspeed.utils import safe_set_full_optimizer_state

            safe_set_full_optimizer_state(parameter, value, key)
            return
        from deepspeed.utils import safe_set_local_optimizer_state

        size, rank = parameter.ds_tensor.numel(), self.accelerator.process_index
        padding = size * self.accelerator.num_processes - value.numel()  # parts are of one size
        safe_set_local_optimizer_state(parameter, pad(value.flatten(), (0, padding))[rank * size :][:size], key)

    @property
    def _torch_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside the wrappers of Accelerate and, under ZeRO, DeepSpeed."""
        return self.optimizer.optimizer.optimizer if self.is_zero else self.optimizer.optimizer


def gather_as_one(step: Step, offload: Any) -> None:
    """Make ZeRO-3 gather all weights only at the start of a step's forward and of its backward.

    DeepSpeed fetches, prefetches and releases each module's weights whenever it is called or differentiated, in an
    order that must be the same in all ranks. Here the number of calls depends on a rank's rows (chunks of the loss,
    recomputed depths), so all hooks except those of the whole module are removed.
    """
    whole = (step._forward_pre_hooks, step._forward_hooks)
    for hook in [*offload.forward_hooks, *offload.backward_hooks]:
        if not any(hook.hooks_dict_ref() is hooks for hooks in whole):
            hook.remove()


def without_weights(head: DraftHead) -> DraftHead:
    """A copy of a head for the same target, its parameters empty."""
    copied = copy.deepcopy(head, {id(head.target): head.target})
    for parameter in copied.parameters():
        parameter.data = parameter.new_empty(0)
    return copied


def whole_tensor(value: Any) -> Any:
    """The whole of a tensor that FSDP2 holds in parts; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def own_part(value: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value
