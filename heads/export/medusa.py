"""Medusa in vLLM's layout (up to 0.32) and in FasterDecoding's, which vLLM and TGI also read.

Neither has cut draft vocabularies: vLLM's code has a `token_map` for them, but its loader refuses a head that has it.
"""

import re
import shutil
from pathlib import Path

from torch import Tensor

from ...configs.errors import BadInput
from ..adapters import WEIGHTS as ADAPTER_WEIGHTS
from .folder import OUTPUTS, HeadFolder, table_rows, write_config, write_tensors

ADAPTER_FOLDER = "target_adapter"


def write_blocks(head: HeadFolder, folder: Path, *, to: str) -> None:
    """vLLM's layout: blocks.{k}.layers.{j} and lm_heads.{k}, or one lm_head if the head shares the target's.

    Raises: BadInput if the draft vocabulary is cut, or output layers have a bias, which vLLM does not support.
    """
    check_whole(head)
    tensors = {served_name(head, name): value for name, value in head.tensors.items()}
    is_shared = head.own["output"] == "shared"
    if is_shared:
        tensors["lm_head.weight"] = table_rows(head, OUTPUTS)
    config = {key: value for key, value in head.config.items() if not key.startswith("medusa_num_")}
    write_config(folder, {**config, "original_lm_head": is_shared, **head.provenance})
    write_tensors(folder, tensors)
    carry_adapter(head, folder)


def write_published(head: HeadFolder, folder: Path, *, to: str) -> None:
    """FasterDecoding's layout: {k}.{j}.linear and {k}.{num_blocks}, a copy of the target's output layer if shared.

    Raises: BadInput if the draft vocabulary is cut.
    """
    check_whole(head)
    tensors = dict(head.tensors)
    if head.own["output"] == "shared":
        rows, config = table_rows(head, OUTPUTS), head.config
        names = [f"{k}.{config['medusa_num_layers']}.weight" for k in range(config["medusa_num_heads"])]
        tensors |= {name: rows.clone() for name in names}
    own = {"base_model_name_or_path": head.target}
    write_config(folder, {**head.config, **own, **head.provenance})
    write_tensors(folder, tensors, name="medusa_lm_head.safetensors")
    carry_adapter(head, folder)


def check_whole(head: HeadFolder) -> None:
    """Raises BadInput if the draft vocabulary is cut."""
    size = head.own["draft_vocab_size"]
    if size is not None:
        raise BadInput(
            f"head {head.path}: draft_vocab_size {size}: engines draft the whole vocabulary from Medusa heads"
        )


def served_name(head: HeadFolder, name: str) -> str:
    """vLLM's name of a tensor. Raises BadInput on a bias of an output layer."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name)
    if found:
        k, j, kind = found.groups()
        return f"blocks.{k}.layers.{j}.{kind}"
    found = re.fullmatch(r"(\d+)\.\d+\.weight", name)
    if found is None:
        raise BadInput(f"head {head.path}: tensor {name}: vLLM's Medusa has no bias in its output layers")
    return f"lm_heads.{found.group(1)}.weight"


def carry_adapter(head: HeadFolder, folder: Path) -> None:
    """Copy the target's adapter into a subfolder, as engines read every safetensors file next to a head's config."""
    if head.has_adapter:
        (folder / ADAPTER_FOLDER).mkdir()
        for name in ("adapter_config.json", ADAPTER_WEIGHTS):
            shutil.copyfile(head.path / name, folder / ADAPTER_FOLDER / name)


def from_blocks(tensors: dict[str, Tensor], *, num_blocks: int) -> dict[str, Tensor]:
    """Rename tensors of either layout to FasterDecoding's names, which are ours; drop a shared output layer."""
    found = {}
    for name, value in tensors.items():
        name = re.sub(r"^medusa_heads?\.", "", name)
        name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
        found[re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{num_blocks}.", name)] = value
    found.pop("lm_head.weight", None)
    return found
