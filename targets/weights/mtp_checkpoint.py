"""MTP modules inside a target's checkpoint: their names in each family, reading them, and writing them back.

transformers drops these tensors when it loads a target and does not save them. So they are read from and written to
the safetensors files directly.
"""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...base.errors import BadInput
from .stored import PLAIN, StoredTensor, indexed_tensors
from .tensor_files import views_on_disk

QWEN_3_5 = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
COUNT = "num_nextn_predict_layers"  # the usual config key of how many modules a target has


@dataclass(frozen=True)
class Layout:
    """How a family of checkpoints stores and joins its MTP modules, and which targets engines load them with.

    In names, {module} is the module's number from 0, and {layer} is that plus the target's number of layers.
    """

    enorm: str  # enorm to block: tensor name prefixes of the five parts of a module
    hnorm: str
    eh_proj: str
    norm: str
    block: str
    marks: tuple[str, ...]  # parts of tensor names; none of the layouts behind it has them all
    kinds: Mapping[str, str]  # of targets (model_type) that it is loaded with, and the config key of their number
    first: tuple[str, ...] = ()  # the kinds whose module is like the target's first layer, not its last with attention
    renamed: Mapping[str, str] = field(default_factory=dict)  # parts of names: transformers', the checkpoint's
    hidden_first: bool = False  # the projection reads [hidden, embedding]
    masks_first: bool = True  # the embedding beside position 0 is zero
    repeats_tables: bool = False  # a module has copies of the target's embedding and output layer

    def served_name(self, name: str, *, num_layers: int, module: int = 0) -> str:
        """The checkpoint's name, in a module of this number, of our head's parameter `module.{part}.{rest}`."""
        _, part, *rest = name.split(".")
        behind = ".".join(rest)
        for ours, theirs in self.renamed.items():
            behind = behind.replace(ours, theirs)
        return f"{getattr(self, part).format(module=module, layer=num_layers + module)}.{behind}"


def behind_layers(
    layers: str,
    marks: tuple[str, ...],
    kinds: Mapping[str, str],
    *,
    norm: str = "shared_head.norm",
    renamed: Mapping[str, str] = {},
    repeats_tables: bool = False,
) -> Layout:
    """DeepSeek's names: a module is one more layer, numbered on."""
    place = f"{layers}.{{layer}}"
    enorm, hnorm, eh_proj, last = (f"{place}.{part}" for part in ("enorm", "hnorm", "eh_proj", norm))
    return Layout(enorm, hnorm, eh_proj, last, place, marks, kinds, renamed=renamed, repeats_tables=repeats_tables)


# tensor names and conventions as vLLM 0.32 and SGLang 0.5 read them; vLLM masks the first embedding of the DeepSeek
# layout, SGLang does not
LAYOUTS = {
    "mimo": Layout(
        enorm="model.mtp_layers.{module}.token_layernorm",
        hnorm="model.mtp_layers.{module}.hidden_layernorm",
        eh_proj="model.mtp_layers.{module}.input_proj",
        norm="model.mtp_layers.{module}.final_layernorm",
        block="model.mtp_layers.{module}",
        marks=(".mtp_layers.",),
        kinds=dict.fromkeys(("mimo", "qwen2"), COUNT),
        hidden_first=True,
    ),
    "qwen3_next": Layout(
        enorm="mtp.pre_fc_norm_embedding",
        hnorm="mtp.pre_fc_norm_hidden",
        eh_proj="mtp.fc",
        norm="mtp.norm",
        block="mtp.layers.{module}",
        marks=("mtp.fc.",),
        kinds={
            **dict.fromkeys(("qwen3_next", "exaone_moe"), COUNT),
            **dict.fromkeys(QWEN_3_5, "mtp_num_hidden_layers"),
        },
        first=("exaone_moe",),  # dense, with a window and rotary positions
        masks_first=False,
    ),
    "hy_v3": behind_layers(
        "model.layers",
        norm="final_layernorm",
        marks=(".eh_proj.", ".final_layernorm."),
        kinds={"hy_v3": COUNT},
        renamed={
            "mlp.gate.": "mlp.router.gate.",
            "e_score_correction_bias": "expert_bias",
            "shared_experts": "shared_mlp",
        },
    ),
    "glm_ocr": behind_layers(
        "model.language_model.layers",
        marks=(".eh_proj.", ".language_model."),
        kinds=dict.fromkeys(("glm_ocr", "glm_ocr_text"), COUNT),
        repeats_tables=True,
    ),
    "deepseek_v3": behind_layers(
        "model.layers",
        marks=(".eh_proj.",),
        kinds=dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"), COUNT),
        repeats_tables=True,
    ),
}
# modules that are no layer of the target's, by a part of their tensor names
UNLIKE = {
    "model.mtp.layers.": "MiMo-V2's MTP modules have a window, attention sinks and a dense MLP, unlike its last layer",
    "mtp.layers.0.mixer.": "Nemotron 3's MTP module is two layers, attention without positions and experts",
    ".shared_head.output.": "Step 3.5's MTP modules have a window and a dense MLP, unlike its last layer",
}


def mtp_layout(names: Iterable[str]) -> str | None:
    """The layout of the MTP modules among tensors of these names; None if there are none that we know."""
    names = list(names)
    found = {mark for layout in LAYOUTS.values() for mark in layout.marks if any(mark in name for name in names)}
    matching = (key for key, layout in LAYOUTS.items() if found.issuperset(layout.marks))
    return None if unlike_ours(names) else next(matching, None)


def unlike_ours(names: Iterable[str]) -> str | None:
    """Says why the MTP modules among tensors of these names cannot be read here; None if they can, or there are
    none."""
    return next((why for name in names for mark, why in UNLIKE.items() if mark in name), None)


def count_key(model_type: str) -> str:
    """The config key in which engines read how many modules a target of this kind has."""
    return next((one.kinds[model_type] for one in LAYOUTS.values() if model_type in one.kinds), COUNT)


def check_modules(folder: str | Path, layout: str) -> None:
    """Raises BadInput unless the folder of a target is local and holds MTP modules of this layout."""
    if not Path(folder).is_dir():
        raise BadInput(f"head.init checkpoint: {folder} is no local folder: download the target first")
    names = indexed_tensors(folder)
    own = mtp_layout(names)
    if own != layout:
        why = unlike_ours(names) or (f"its MTP modules are of layout {own}" if own else "it has no MTP modules")
        raise BadInput(f"head.init checkpoint, head.layout {layout}: {folder}: {why}")


def read_modules(folder: str | Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read MTP tensors from a target's folder.

    Args: state: tensors by served name, whose names and shapes are wanted.
    Raises: BadInput if the folder lacks a tensor, or one has another shape or is quantised.
    """
    wanted = {name: value.detach().clone() for name, value in state.items()}
    stored = indexed_tensors(folder)
    for name, view in views_on_disk(wanted, stored).items():
        _check(folder, stored, name, view.shape)
        with safe_open(stored[name].file, framework="pt") as opened:
            view.copy_(opened.get_tensor(name))
    return wanted


def stitch(state: dict[str, Tensor], folder: str | Path, output_folder: str | Path) -> None:
    """Copy a checkpoint into a folder, replacing its MTP tensors by our own in the checkpoint's dtypes.

    All other tensors are copied byte for byte; names, shapes and dtypes before and after are compared, so that nothing
    is dropped or added. MTP tensors that the head does not train (copies of the embedding and output layer) stay.

    Args: state: the head's tensors by served name. output_folder: an empty folder.
    Raises: BadInput if the checkpoint lacks one of these tensors.
    """
    folder, output_folder = Path(folder), Path(output_folder)
    before = indexed_tensors(folder)
    new = views_on_disk(state, before)
    for name, value in new.items():
        _check(folder, before, name, value.shape)
    changed = {before[name].file.name for name in new}
    shutil.copytree(folder, output_folder, ignore=shutil.ignore_patterns(*changed), dirs_exist_ok=True)
    for file in changed:
        with safe_open(folder / file, framework="pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(folder / file)
        for name in tensors.keys() & new.keys():
            tensors[name] = new[name].detach().cpu().to(tensors[name].dtype).contiguous()
        save_file(tensors, output_folder / file, metadata)
    both = before, indexed_tensors(output_folder)
    kinds_before, kinds = ({name: (one.dtype, one.shape) for name, one in stored.items()} for stored in both)
    if kinds != kinds_before:
        raise BadInput(f"{folder}: stitched, its tensors would differ in name, shape or dtype")


def _check(folder: str | Path, stored: dict[str, StoredTensor], name: str, shape: torch.Size) -> None:
    """Raises BadInput if a checkpoint lacks a tensor, or it has another shape or is quantised."""
    if name not in stored:
        raise BadInput(f"{folder}: no tensor {name}: the checkpoint has no such MTP module")
    found = stored[name]
    if found.shape != shape:
        raise BadInput(f"{found.file}: tensor {name}: expected {tuple(shape)}, found {found.shape}")
    if found.dtype not in PLAIN:
        raise BadInput(f"{found.file}: tensor {name} is quantised ({found.dtype}): use a checkpoint in bfloat16")


def serve_names(head: Any) -> None:
    """Let an MTP head's `state_dict` have the names of its layout, and `load_state_dict` read them."""
    head.register_state_dict_post_hook(_to_served_names)
    head.register_load_state_dict_pre_hook(_from_served_names)


def _to_served_names(head: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    layout, num_layers = head.layout, head.target.num_layers
    for name in [name for name in state if name.startswith(f"{prefix}module.")]:
        state[prefix + layout.served_name(name.removeprefix(prefix), num_layers=num_layers)] = state.pop(name)


def _from_served_names(head: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
    layout, num_layers = head.layout, head.target.num_layers
    for name in [name for name, _ in head.named_parameters()] + [name for name, _ in head.named_buffers()]:
        served = prefix + layout.served_name(name, num_layers=num_layers)
        if served in state:
            state[prefix + name] = state.pop(served)


def module_layout(folder: str | Path, kind: str) -> str | None:
    """The layout in which engines load MTP modules with a target: that of its own modules, or the one of its kind
    (model_type); None: they load none. Raises BadInput if a file of its folder cannot be read."""
    # else it is no folder, or one of a config alone or of .bin files
    is_stored = any(Path(folder).glob("model*.safetensors*"))
    own = mtp_layout(indexed_tensors(folder)) if is_stored else None
    return own or next((name for name, layout in LAYOUTS.items() if kind in layout.kinds), None)
