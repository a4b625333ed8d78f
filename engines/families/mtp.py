"""MTP modules written into a copy of their target's checkpoint, replacing its own modules or added to its layers."""

import json
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...base.errors import BadInput
from ...heads.mtp import MtpConfig
from ...heads.stored.fit import build_skeleton_head
from ...targets.frozen_model import TWO_SETS
from ...targets.loading import TargetConfig, quantization, read_model_config
from ...targets.skeleton import load_skeleton
from ...targets.weights.mtp_checkpoint import (
    LAYOUTS,
    count_key,
    module_layout,
    mtp_layout,
    read_modules,
    stitch,
    unlike_ours,
)
from ...targets.weights.stored import StoredTensor, indexed_tensors
from ...targets.weights.tensor_files import TensorFiles, views_on_disk
from ..layouts.contracts import Contract, sizes_of
from ..layouts.foreign import ForeignFolder, Imported
from ..layouts.gguf_file import GgufFile
from ..layouts.serving import HeadFolder, Serving
from ..layouts.writing import EMBEDDINGS, OUTPUTS, whole_vocabulary_note, write_config, write_ends

BESIDE = "model-mtp.safetensors"
CARD_FILES = ("README.md", ".git*", ".cache")
TABLES = {"embed_tokens": EMBEDDINGS, "shared_head.head": OUTPUTS}  # of the target, which some modules repeat
BEFORE_NORM = ("glm4_moe", "glm4_moe_lite", "glm_ocr_text")  # targets whose module vLLM feeds what its norm reads
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def write_beside(head: HeadFolder, folder: Path, tensors: dict[str, Tensor], where: dict[str, StoredTensor]) -> None:
    """Copy a target that has no MTP modules, and add a file with the head's. Raises BadInput as `write`."""
    whole = read_model_config(TargetConfig(path=head.target))
    if method := quantization(whole) or quantization(whole.get_text_config()):
        why = "engines read its modules so too, and ours are not: take eagle3, or a checkpoint in 16 bits"
        raise BadInput(f"target {head.target}: stored quantised ({method}): {why}")
    own = head.own["layout"]
    kind, layout = str((head.target_config or {}).get("model_type")), LAYOUTS[own]
    if kind not in layout.kinds:
        other = module_layout(head.target, kind)
        instead = f"with head.layout={other}" if other else "eagle3"
        raise BadInput(
            f"target {head.target}: no engine loads MTP modules of layout {own} with a {kind} target, only with "
            f"{', '.join(layout.kinds)}; train {instead} for this one"
        )
    embedding = next(name for name in EMBEDDINGS if name in where)
    if "language_model." in embedding and layout.block.startswith(("model.layers.", "model.mtp_layers.")):
        why = f"its embedding is {embedding}: no engine is known to load MTP modules beside such a text model"
        raise BadInput(f"target {head.target}: {why}")
    new = {name: value.contiguous().clone() for name, value in views_on_disk(tensors, {}).items()}
    if layout.repeats_tables:
        first = int((head.target_config or {})["num_hidden_layers"])
        for name, sources in TABLES.items():
            source = next(one for one in sources if one in where)
            with safe_open(where[source].file, framework="pt") as opened:
                new[f"{layout.block.format(layer=first)}.{name}.weight"] = opened.get_tensor(source)
    shutil.copytree(head.target, folder, dirs_exist_ok=True)
    save_file(new, folder / BESIDE, metadata={"format": "pt"})
    files = {name: tensor.file.name for name, tensor in where.items()} | dict.fromkeys(new, BESIDE)
    size = sum((folder / name).stat().st_size for name in set(files.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model: of a model of several parts its text part."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def is_module_tensor(config: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to an MTP module."""
    num_layers = text_part(config).get("num_hidden_layers", 0)
    match = re.search(r"\.layers\.(\d+)\.", name)
    behind = match is not None and not name.startswith("mtp.") and int(match.group(1)) >= num_layers
    return behind or name.startswith("mtp.") or ".mtp_layers." in name


class MtpServing(Serving):
    layouts = ("hf",)
    is_module = is_whole_model = True
    key_types = dict.fromkeys(COUNT_KEYS, int)
    computes = ("layout",)

    def recognises(self, config: dict[str, Any], stored: TensorFiles) -> bool:
        has_modules = mtp_layout(stored.shapes) or unlike_ours(stored.shapes)
        return bool(has_modules) or any(text_part(config).get(key) for key in COUNT_KEYS)

    def contract(self, folder: Path, config: dict[str, Any], stored: TensorFiles, *, to: str) -> Contract:
        """A module's tensors, which follow from the target's config."""
        inner = text_part(config)
        name = mtp_layout(stored.shapes) or "deepseek_v3"
        layout, contract = LAYOUTS[name], Contract(f"mtp ({name})", is_ours=partial(is_module_tensor, config))
        if why := unlike_ours(stored.shapes):
            contract.problems.append(f"not checked: {why}")
            return contract
        key = count_key(str(config.get("model_type")))
        contract.report(not inner.get(key), f"{key}: expected the number of modules, found {inner.get(key)}")
        sizes = sizes_of(inner, contract, "hidden_size", "vocab_size", "num_hidden_layers")
        if sizes is None or contract.problems:
            return contract
        hidden, vocab, num_layers = sizes.values()
        for i in range(num_layers):
            is_there = any(f".layers.{i}." in key for key in stored.shapes)
            missing = f"layer {i} of the target: no tensor of it: MTP modules are served within the target"
            contract.report(not is_there, missing)
        try:
            target = load_skeleton(TargetConfig(path=str(folder)))
            head = build_skeleton_head(MtpConfig(layout=name, init="random"), target)
        except BadInput as error:
            contract.problems.append(f"not checked: {error}")
            return contract
        own = head.get_submodule("module").state_dict()
        tables = TABLES if layout.repeats_tables else ()
        for k in range(inner[key]):
            served = partial(layout.served_name, num_layers=num_layers, module=k)
            state = {served(f"module.{rest}"): value for rest, value in own.items()}
            contract.shapes |= {one: tuple(value.shape) for one, value in views_on_disk(state, stored.files).items()}
            place = layout.block.format(module=k, layer=num_layers + k)
            contract.shapes |= {f"{place}.{table}.weight": (vocab, hidden) for table in tables}
        is_tied = inner.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
        has_output = any(key.endswith("lm_head.weight") for key in stored.shapes)
        contract.report(not is_tied and not has_output, "lm_head.weight: missing in the target")
        return contract

    def notes(self, head: HeadFolder) -> list[str]:
        lines = whole_vocabulary_note(head, "MTP modules")
        rope = (head.target_config or {}).get("rope_parameters") or {}
        if rope.get("rope_type") == TWO_SETS:
            num = rope["original_max_position_embeddings"]
            why = "engines rotate by the frequencies of long texts, which the modules are not trained on"
            lines.append(f"{why}, if they serve a context of more than {num} tokens")
        if (kind := (head.target_config or {}).get("model_type")) in BEFORE_NORM and head.num_drafted > 1:
            why = f"vLLM (0.32) feeds modules of a {kind} target back before their norm, which ours are trained behind"
            lines.append(f"{why}: of its drafts after the first fewer may be accepted")
        return lines

    def method_of(self, file: GgufFile) -> str | None:
        return "mtp" if file.own("nextn_predict_layers") else None

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        """Write the whole target with the head's modules; its other tensors stay byte for byte the same.

        Raises: BadInput if the target is not a local folder, or no engine loads modules of this layout with it.
        """
        if not Path(head.target).is_dir():
            why = "no local folder; name one with --target: the modules go into a copy of it"
            raise BadInput(f"target {head.target}: {why}")
        tensors = {name: value for name, value in head.tensors.items() if name not in ("d2t", "t2d")}
        where = indexed_tensors(head.target)
        if all(name in where for name in views_on_disk(tensors, where)):
            stitch(tensors, head.target, folder)
        else:
            write_beside(head, folder, tensors, where)
        for name in CARD_FILES:  # the target's model card does not describe the new checkpoint
            for path in folder.glob(name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        config = json.loads((folder / "config.json").read_text())
        inner = config.get("text_config", config)
        inner[count_key(config["model_type"])] = 1
        if head.own["layout"] == "mimo":
            config["architectures"] = ["MiMoForCausalLM"]
        write_config(folder, config)
        write_ends(folder)

    def read(self, folder: ForeignFolder) -> Imported:
        """The MTP modules of a whole checkpoint, whose other tensors are the target's."""
        inner, shapes = folder.config.inner_or_self("text_config"), folder.stored.shapes
        counts = {key: num for key in COUNT_KEYS if (num := inner.read(key, int))}
        layout = mtp_layout(shapes)
        if layout is None:
            raise BadInput(unlike_ours(shapes) or f"{', '.join(counts)}: set, but there is no MTP module")
        if max(counts.values(), default=1) > 1 and "{" in LAYOUTS[layout].eh_proj:
            raise BadInput(f"{next(iter(counts))}: several MTP modules, one each depth; heads here have one for all")
        keys: dict[str, Any] = {"layout": layout, "init": "random"}
        return Imported(keys, read_modules(folder.path, folder.fresh(keys)))
