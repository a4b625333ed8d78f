"""A target without its layers: what heads read of it when the states of its layers were extracted before.

The embedding, the final norm and the output layer are read from the checkpoint alone.
"""

from typing import Any, NoReturn, Self

import torch
from torch import nn
from transformers.quantizers.auto import AutoHfQuantizer

from ..base.errors import BadInput, first_line
from .check import find_output_use
from .frozen_model import OutputUse
from .layers.target_output import TargetOutput
from .loading import (
    Checkpoint,
    TargetConfig,
    cast_weights,
    empty_model,
    quantization,
    quiet_loading,
    torch_dtype,
)
from .target import Target
from .weights.reading import WeightReader
from .weights.served_adapter import ServedAdapter
from .weights.stored import PLAIN, StoredTensor


class NeedsLayers(BadInput):
    """A target cannot be loaded without its layers."""


class BareTarget(Target):
    """A target of which the embedding, the final norm, the output layer and what stands before it have weights."""

    @classmethod
    def read(cls, source: TargetConfig, use: OutputUse | None = None) -> Self:
        """Read these parts of a checkpoint, on the CPU.

        Args: source: its `device_map` does not count. use: of the output layer, as the whole target was found to; None:
            it is found here, see `find_output_use`.
        Raises: NeedsLayers if these parts cannot be read alone, or the use cannot be found; BadInput if there is no
            such model, or it is damaged.
        """
        wanted, checkpoint = torch_dtype(source.dtype), Checkpoint.of(source)
        adapter = None if source.adapter is None else ServedAdapter.read(source.adapter)
        try:
            model = empty_model(source, dtype=checkpoint.dtype)
            with torch.device("meta"), quiet_loading():
                fingerprint = checkpoint.fingerprint()
                if adapter is not None:  # it changes none of the parts that are read
                    adapter.check_base(checkpoint.path, fingerprint, num_layers=checkpoint.num_layers)
                    adapter.layers_in(model)
                target = cls(model, name=source.path, fingerprint=fingerprint, source=source, adapter=adapter)
            target.undecodable = "it was loaded without its layers"
            if use is not None:
                target.logit_scale, target.caps_wide = use.logit_scale, use.caps_wide
                target.logit_cap = target.logit_cap if use.is_capped else None
            with quiet_loading():
                target._read(checkpoint.stored, checkpoint.dtype)
        except BadInput:
            raise
        except Exception as error:  # whatever the code of an unknown model raises
            raise NeedsLayers(f"{type(error).__name__}: {first_line(error)}") from error
        if isinstance(wanted, torch.dtype):
            cast_weights(model, model.modules(), wanted)
        if use is None:
            try:
                find_output_use(target)
            except Exception as error:  # as above
                raise NeedsLayers(f"how it uses its output layer is not found: {first_line(error)}") from error
        return target

    @property
    def parts(self) -> list[nn.Module]:
        """The parts that have weights."""
        parts = self.input_embedding, self.final_norm, self.output_layer
        return [part for part in parts if part is not None]

    def _modules(self) -> list[nn.Module]:
        return list({module: None for part in self.parts for module in part.modules()})

    def _read(self, stored: dict[str, StoredTensor], dtype: torch.dtype | None) -> None:
        """Give the parts their weights. Raises: NeedsLayers if the checkpoint has none for one of them."""
        plain = {name: tensor for name, tensor in stored.items() if tensor.dtype in PLAIN}
        reader = WeightReader(self.model, plain, name=self.name, dtype=dtype)
        missing = reader.read(self._modules(), ties=True)
        if missing and quantization(self.model.config) is not None:
            quantizer = AutoHfQuantizer.from_config(self.model.config.quantization_config, pre_quantized=True)
            quantizer.validate_environment(device_map=None, weights_only=True)
            quantizer.preprocess_model(model=self.model, dtype=dtype, device_map=None)
            self.output_layer = self.model.get_output_embeddings()
            reader = WeightReader(self.model, stored, name=self.name, dtype=dtype, quantizer=quantizer)
            missing = reader.read(self._modules(), ties=True)
        if missing:
            raise NeedsLayers(f"no weights for {missing[0]} under a known name")
        reader.finish(self._modules())
        self.model.eval().requires_grad_(False)

    def to(self, device: str | torch.device) -> Self:
        device = torch.device(device)
        for part in self.parts:
            part.to("cpu" if device.type == "cpu" else device)  # to `cpu:0` it would be a copy
        return self

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise BadInput(f"target {self.name}: it was loaded without its layers, so it cannot read tokens")

    def read_texts(self, *args: Any, **kwargs: Any) -> TargetOutput:
        self.forward()
