"""MTP modules written into a copy of their target's checkpoint, replacing its own modules or added to its layers."""

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...configs.errors import BadInput
from ..importing.mtp_checkpoint import count_key, mtp_layout, stitch, tensor_locations, views_on_disk
from .folder import EMBEDDINGS, HeadFolder, write_config, write_ends

# kinds of target (model_type) that engines load modules of a layout with
SERVED = {
    "deepseek_v3": ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"),
    "mimo": ("mimo", "qwen2"),
    "qwen3_next": ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
}
BESIDE = "model-mtp.safetensors"
CARD_FILES = ("README.md", ".git*", ".cache")


def write_stitched(head: HeadFolder, folder: Path, *, to: str) -> None:
    """Write the whole target with the head's modules; its other tensors stay byte for byte the same.

    Raises: BadInput if the target is not a local folder, or no engine loads modules of this layout with it.
    """
    if not Path(head.target).is_dir():
        why = "no local folder; name one with --target: the modules go into a copy of it"
        raise BadInput(f"target {head.target}: {why}")
    tensors = {name: value for name, value in head.tensors.items() if name not in ("d2t", "t2d")}
    where = tensor_locations(head.target)
    if all(name in where for name in views_on_disk(tensors, where)):
        stitch(tensors, head.target, folder)
    else:
        write_beside(head, folder, tensors, where)
    for name in CARD_FILES:  # the target's model card does not describe the new checkpoint
        for path in folder.glob(name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    config = json.loads((folder / "config.json").read_text())
    inner = config.get("text_config", config)
    inner[count_key(config["model_type"])] = num_modules(head)
    if head.own["layout"] == "mimo":
        config["architectures"] = ["MiMoForCausalLM"]
    write_config(folder, config)
    write_ends(folder)


def module_layout(folder: str | Path, kind: str) -> str | None:
    """The layout in which engines load MTP modules with a target: that of its own modules, or the one of its kind
    (model_type); None: they load none. Raises BadInput if a file of its folder cannot be read."""
    own = None if not Path(folder).is_dir() else mtp_layout(tensor_locations(folder))
    return own or next((layout for layout, kinds in SERVED.items() if kind in kinds), None)


def num_modules(head: HeadFolder) -> int:
    """How many modules an MTP head has."""
    return head.own["num_depths"] if head.own["independent"] else 1


def write_beside(head: HeadFolder, folder: Path, tensors: dict[str, Tensor], where: dict[str, Path]) -> None:
    """Copy a target that has no MTP modules, and add a file with the head's. Raises BadInput as `write_stitched`."""
    own = head.own["layout"]
    kind = str((head.target_config or {}).get("model_type"))
    if kind not in SERVED[own]:
        other = module_layout(head.target, kind)
        instead = f"with head.layout={other}" if other else "eagle3"
        raise BadInput(
            f"target {head.target}: no engine loads MTP modules of layout {own} with a {kind} target, only with "
            f"{', '.join(SERVED[own])}; train {instead} for this one"
        )
    new = {name: value.contiguous().clone() for name, value in views_on_disk(tensors, {}).items()}
    if own == "deepseek_v3":  # modules of this layout repeat the target's embedding and output layer
        embedding = next(name for name in EMBEDDINGS if name in where)
        if embedding.startswith("language_model."):
            why = f"its embedding is {embedding}: no engine is known to load MTP modules beside such a text model"
            raise BadInput(f"target {head.target}: {why}")
        output = "lm_head.weight" if "lm_head.weight" in where else embedding
        first = int((head.target_config or {})["num_hidden_layers"])
        for i in range(first, first + num_modules(head)):
            for name, source in (("embed_tokens", embedding), ("shared_head.head", output)):
                with safe_open(where[source], framework="pt") as opened:
                    new[f"model.layers.{i}.{name}.weight"] = opened.get_tensor(source)
    shutil.copytree(head.target, folder, dirs_exist_ok=True)
    save_file(new, folder / BESIDE, metadata={"format": "pt"})
    files = {name: path.name for name, path in where.items()} | dict.fromkeys(new, BESIDE)
    size = sum((folder / name).stat().st_size for name in set(files.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
