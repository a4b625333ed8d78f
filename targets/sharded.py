"""A target whose layers are spread over the processes that train: each holds its share of every layer's weights.

A layer is gathered when it runs and freed behind it, by torch's FSDP2, so all processes must call `forward` equally
often, with any rows. The embedding, the final norm and the output layer, which heads use by themselves, are whole in
each.
"""

from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..base.errors import BadInput, first_line
from .layers.runs import layer_list
from .loading import (
    Checkpoint,
    TargetConfig,
    cast_weights,
    drop_other_modalities,
    empty_model,
    quantization,
    quiet_loading,
    text_decoder,
    torch_dtype,
)
from .target import Target
from .weights.reading import WeightReader, make_room


class ShardedTarget(Target):
    """A target that runs in step with those of the other processes; it trains heads, and does not decode."""

    is_sharded = True

    @classmethod
    def read(cls, source: TargetConfig, device: torch.device, *, num_processes: int) -> Self:
        """Read a checkpoint layer by layer, of which this process keeps its share. All processes must call it.

        Args: source: its `device_map` does not count. device: this process's.
        Raises: BadInput if there is no such model, or it is stored quantised, damaged, or cannot be read so.
        """
        wanted, checkpoint = torch_dtype(source.dtype), Checkpoint.of(source)
        path = checkpoint.path
        if (method := quantization(checkpoint.config)) is not None:
            raise BadInput(f"target {path}: stored quantised ({method}): not with train.shard_target")
        fingerprint = checkpoint.fingerprint()
        try:
            model = empty_model(source, dtype=checkpoint.dtype)
            drop_other_modalities(model)
            base = text_decoder(model)
            kind = type(base)
            layers = list(layer_list(base) or ())
            mesh = init_device_mesh(device.type, (num_processes,))
            reader = WeightReader(model, checkpoint.stored, name=path, dtype=checkpoint.dtype, device=device)
            inside = {module for layer in layers for module in layer.modules()}
            outside = [module for module in model.modules() if module not in inside]
            for module in model.modules():  # the model may compute those of its layers, as FalconH1 does
                make_room(module, module._non_persistent_buffers_set, device)
            load(reader, outside, wanted, ties=True)
            for layer in layers:
                load(reader, list(layer.modules()), wanted, ties=False)
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            # whose forward lets the next layer be gathered while one runs
            fully_shard(base, mesh=mesh, ignored_params=set[nn.Parameter](base.parameters()))
            base.__class__ = kind  # transformers finds by it what the model's own forward records
            with torch.no_grad():  # in which FSDP finds all layers, of which `check_target` may take some away
                base(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
        except BadInput:
            raise
        except Exception as error:  # whatever the code of an unknown model raises
            why = f"cannot be read layer by layer ({first_line(error)}): not with train.shard_target"
            raise BadInput(f"target {path}: {why}") from error
        target = cls.of(model, name=source.path, fingerprint=fingerprint, source=source)
        target.undecodable = "its layers are sharded over processes"
        return target

    def may_use(self, kind: Any) -> bool:
        return False

    def to(self, device: str | torch.device) -> Self:
        return self


def load(reader: WeightReader, modules: list[nn.Module], dtype: torch.dtype | str, *, ties: bool) -> None:
    """Give modules all their weights and buffers. Raises BadInput if the checkpoint lacks one."""
    with quiet_loading():
        missing = reader.read(modules, ties=ties)
        if set(missing) & set(reader.model.all_tied_weights_keys):
            raise BadInput(f"target {reader.name}: its layers share weights: not with train.shard_target")
        if missing:
            raise BadInput(f"target {reader.name}: weights missing in the checkpoint: {missing[:3]} ...")
        reader.finish(modules)
    for module in modules:
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)
    if isinstance(dtype, torch.dtype):
        cast_weights(reader.model, modules, dtype)
