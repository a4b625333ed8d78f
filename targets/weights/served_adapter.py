"""A LoRA adapter (Hu et al. 2022) that is served on a target, read as peft writes it and merged into the weights.

Adapters that a head trains on its target are another thing: targets/adapters.py.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...base.errors import BadInput
from ...base.files import lack_of
from ...base.jsonl import loads
from ...base.typed import TypedKeys
from .stored import (
    PLAIN,
    StoredTensor,
    digests_of,
    fingerprint_of_digests,
    fingerprint_of_stored,
    read_header,
    stored_tensors,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # what peft puts before a module's name in its files
# config keys of what is more than a low-rank sum on linear layers; vLLM refuses all of them but the last two too
NOT_PLAIN = "use_dora modules_to_save lora_bias layer_replication alora_invocation_tokens use_bdlora use_qalora".split()
NOT_PLAIN += ["trainable_token_indices", "target_parameters"]
PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")  # of `init_lora_weights`; others change the target


@dataclass(frozen=True, kw_only=True)
class AdapterInfo:
    """What reports say of an adapter, or of a checkpoint in the place of the target."""

    path: str  # its folder
    fingerprint: str  # of its tensors and, of an adapter, scales
    base: str | None = None  # the target that it names, a folder or hub id


@dataclass(frozen=True)
class ServedWeights:
    """What is served in the place of a target's own weights: an adapter on them, or a checkpoint of their training."""

    info: AdapterInfo

    @property
    def path(self) -> str:
        return self.info.path

    def fingerprint_on(self, fingerprint: str) -> str:
        """The fingerprint of a target with these. Args: fingerprint: of the target itself."""
        return hashlib.sha256(f"{fingerprint} {self.info.fingerprint}".encode()).hexdigest()[:40]


@dataclass(frozen=True)
class ServedAdapter(ServedWeights):
    """An adapter in a folder. tensors: A [r, in] and B [out, r] in the file, by layer. scales: of B A, by layer."""

    tensors: Mapping[str, tuple[StoredTensor, StoredTensor]]
    scales: Mapping[str, float]

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read adapter_config.json and the header of adapter_model.safetensors.

        Raises: BadInput, naming file and key, if there is no such file, it is damaged, or the adapter is not plain LoRA
        on linear layers.
        """
        folder = Path(folder).expanduser()
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise BadInput(f"adapter {folder}: {lack_of(folder, name)}")
        config = read_config(folder / CONFIG)
        pairs: dict[str, dict[str, StoredTensor]] = {}
        stored = read_header(folder / WEIGHTS)
        for name, tensor in stored.items():
            known = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight", name)
            if known is None or len(tensor.shape) != 2 or tensor.dtype not in PLAIN:
                raise BadInput(f"{folder / WEIGHTS}: tensor {name}: expected lora_A and lora_B of linear layers alone")
            pairs.setdefault(known[1], {})[known[2]] = tensor
        if not pairs:
            raise BadInput(f"{folder / WEIGHTS}: holds no tensor")
        tensors, scales = {}, {}
        for layer, parts in pairs.items():
            rank, scales[layer] = rank_and_scale(config, layer)
            found = [list(parts[part].shape) if part in parts else None for part in "AB"]
            if len(parts) < 2 or (parts["A"].shape[0], parts["B"].shape[1]) != (rank, rank):
                what = f"lora_A {found[0]} and lora_B {found[1]}"
                raise BadInput(f"{folder / WEIGHTS}: {layer}: {what}: expected both, of rank {rank} as {CONFIG} says")
            tensors[layer] = parts["A"], parts["B"]
        digests = digests_of(stored)
        values = [(name, tensor.dtype, tensor.shape, digests[name]) for name, tensor in stored.items()]
        values += [(name, "scale", (), repr(scale)) for name, scale in scales.items()]
        base = config.read("base_model_name_or_path", str)
        return cls(
            AdapterInfo(path=str(folder), fingerprint=fingerprint_of_digests(values), base=base), tensors, scales
        )

    @property
    def name(self) -> str:
        """By which a server serves it: the folder's."""
        return Path(self.path).absolute().name

    @property
    def rank(self) -> int:
        """The largest of its layers'."""
        return max(first.shape[0] for first, _ in self.tensors.values())

    def check_base(self, name: str, fingerprint: str, *, num_layers: int) -> None:
        """Raises BadInput if the target that it names is a local folder of other weights than those of this target.

        Of a hub id nothing is known, nor of a folder with quantised weights, on which QLoRA trains."""
        base = Path(self.info.base or "")
        if not self.info.base or not (base / "config.json").is_file():
            return
        stored = stored_tensors(str(base))
        is_full = all(tensor.dtype in PLAIN for tensor in stored.values())
        if is_full and fingerprint_of_stored(stored, num_layers=num_layers) != fingerprint:
            where = f"{Path(self.path, CONFIG)}: base_model_name_or_path {base}"
            raise BadInput(f"{where}: has other weights than target {name}")

    def layers_in(self, model: Any) -> dict[str, nn.Module]:
        """The layers of a model that it changes, by name; the model may be on torch's meta device.

        Raises: BadInput if the model has no such layer, or one of another shape, or it is the output layer, which heads
        share with the target.
        """
        where, layers = Path(self.path, WEIGHTS), {}
        output = model.get_output_embeddings()
        of_text = {f"model.{name}": part for name, part in model.get_decoder().named_modules()}
        modules = of_text | dict(model.named_modules())  # adapters of a multimodal one may be trained on its text model
        for name, (first, second) in self.tensors.items():
            layer: Any = modules.get(name)
            if not isinstance(layer, nn.Linear | Conv1D):
                what = "the target has no linear layer of that name" if layer is None else type(layer).__name__
                raise BadInput(f"{where}: {name}: expected a linear layer: {what}")
            if layer is output:
                raise BadInput(f"{where}: {name}: changes the output layer, which heads share with the target")
            weight = layer.weight
            if not weight.is_floating_point() or weight.itemsize < 2:
                raise BadInput(f"{where}: {name}: the target's weights are quantised, so it cannot be merged into them")
            expected = tuple(weight.shape[::-1] if isinstance(layer, Conv1D) else weight.shape)
            found = second.shape[0], first.shape[1]
            if found != expected:
                raise BadInput(f"{where}: {name}: changes a layer of shape {found}, the target's is {expected}")
            layers[name] = layer
        return layers

    @torch.no_grad()
    def merge(self, model: Any) -> None:
        """Add scale * B A to the weights, summed in fp32 and rounded once to the weight's dtype.

        Raises: BadInput as `layers_in`, and if a layer is not in memory."""
        values = load_file(Path(self.path, WEIGHTS))
        for name, layer in self.layers_in(model).items():
            weight: Tensor = layer.weight.data  # type: ignore[assignment]
            if weight.is_meta:
                raise BadInput(f"target.device_map: {name} is outside of memory, so no adapter can be merged into it")
            first, second = (values[f"{PREFIX}{name}.lora_{part}.weight"].to(weight.device).float() for part in "AB")
            change = second @ first * self.scales[name]  # [out, in]
            change = change.T if isinstance(layer, Conv1D) else change
            layer.weight.data = (weight.float() + change).to(weight.dtype)


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder holds a whole model, not an adapter."""
    return Path(folder, "config.json").is_file() and not Path(folder, CONFIG).is_file()


def lora_of(served: ServedWeights | None) -> ServedAdapter | None:
    """What a server puts on its target. Raises BadInput of a checkpoint, which it has in the target's place."""
    if served is None or isinstance(served, ServedAdapter):
        return served
    raise BadInput(f"adapter {served.path}: a checkpoint of the whole target: serve it as the target itself")


def read_config(path: Path) -> TypedKeys:
    """adapter_config.json. Raises BadInput if it is damaged, or of more than plain LoRA."""
    try:
        values = loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{path}: no JSON object")
    config = TypedKeys(values, f"{path}: ")
    if (kind := config.read("peft_type", str)) != "LORA":
        raise BadInput(f"{path}: peft_type {kind}: expected LORA")
    more = next((key for key in NOT_PLAIN if values.get(key)), "")
    if values.get("bias", "none") != "none":
        more = "bias"
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in PLAIN_STARTS:
        more = "init_lora_weights"
    if more:
        raise BadInput(f"{path}: {more} {values[more]!r}: expected plain LoRA, a low-rank sum on linear layers")
    return config


def rank_and_scale(config: TypedKeys, layer: str) -> tuple[int, float]:
    """The rank of a layer's adapter, and the factor of B A: alpha / rank, or alpha / sqrt(rank) of rsLoRA
    (Kalajdzievski 2023). As in peft, the first pattern that is the layer's name or its end counts."""

    def of_pattern(key: str) -> Any:
        patterns = config.read(key, dict[str, float]) or {}
        return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer)), None)

    rank, alpha = of_pattern("rank_pattern") or config.need("r", int), of_pattern("alpha_pattern")
    alpha = config.need("lora_alpha", float) if alpha is None else alpha
    if rank < 1:
        raise BadInput(f"{config.where}r {rank}: expected at least 1")
    return int(rank), alpha / (math.sqrt(rank) if config.read("use_rslora", bool) else rank)
