"""Heads for llama.cpp: what it cannot serve, and the conversion to GGUF by the user's own checkout of it.

Its converter reads the Hugging Face layouts that other engines load, so an export writes those; the permutation of q
and k, tokenizers and rotary factors are the converter's job and change often. Source: llama.cpp of November 2026.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configs.errors import BadInput
from ..importing.gguf import gguf_folder
from .folder import DFLASH, DFLASH2, HeadFolder
from .stitched import num_modules

# --spec-type of each family, or kind of block drafter
SPEC_TYPES = {"eagle3": "draft-eagle3", "draft_lm": "draft-simple", "mtp": "draft-mtp"}
SPEC_TYPES |= {"dflash": "draft-dflash", "dspark": "draft-dspark"}
OUTTYPES = ("f32", "f16", "bf16", "q8_0")
OF_DTYPE = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SCRIPT = "convert_hf_to_gguf.py"
NUM_TAPS = 3
ROTATIONS = ("default", "linear", "yarn", "llama3", "longrope")
ROTATIONS_OF_BLOCKS = ("default", "linear", "yarn")
# kinds of target (model_type) whose graphs output the inputs of their layers; with any other, llama-server aborts
TAPPED = (
    "llama mistral mixtral qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text gpt_oss lfm2 "
    "nemotron_h minimax_m2"
).split()
READS_FEATURES = ("eagle3", "block")  # families that read these states, and share the target's embedding tables
# kinds of target whose MTP modules llama.cpp has a graph for
WITH_MODULES = "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text deepseek_v32 glm4_moe".split()


@dataclass(frozen=True)
class Conversion:
    """How to make GGUF files. llama_cpp: a checkout; None: the command is only printed, for the user to run. outtype:
    of the head's weights; None: as exported. target_outtype: also convert the target, to this type.

    Raises: BadInput on an unknown type or a folder that is not a checkout."""

    llama_cpp: Path | None = None
    outtype: str | None = None
    target_outtype: str | None = None

    def __post_init__(self) -> None:
        for option, kind in (("--outtype", self.outtype), ("--target-outtype", self.target_outtype)):
            if kind is not None and kind not in OUTTYPES:
                raise BadInput(f"{option} {kind}: expected one of {', '.join(OUTTYPES)}")
        if self.llama_cpp is not None and not (self.llama_cpp / SCRIPT).is_file():
            raise BadInput(f"--llama-cpp {self.llama_cpp}: no {SCRIPT} in it, so it is no checkout of llama.cpp")

    def commands(self, head: HeadFolder, folder: Path, *, name: str) -> list[list[str]]:
        """The commands that make the files of an exported folder; each starts with a Python interpreter.

        Args: name: the model name to write into the files.
        """
        script = str((self.llama_cpp or Path("llama.cpp")) / SCRIPT)
        python = os.environ.get("LLAMA_CPP_PYTHON") or (sys.executable if self.llama_cpp else "python")
        kind = self.outtype or OF_DTYPE[head.config["dtype"]]
        file = folder / file_name(head.family)
        made = [python, script, str(folder), "--outfile", str(file), "--outtype", kind, "--model-name", name]
        if head.family == "mtp":
            return [made]
        target = str(target_folder(head))
        if head.family in READS_FEATURES:
            made += ["--target-model-dir", target]
        if self.target_outtype is None:
            return [made]
        whole = ["--outfile", str(folder / "target.gguf"), "--outtype", self.target_outtype]
        return [made, [python, script, target, *whole]]

    def run(self, head: HeadFolder, folder: Path, *, name: str) -> None:
        """Run the conversion, if there is a checkout. Raises BadInput with the converter's last line if it fails."""
        if self.llama_cpp is None:
            return
        for command in self.commands(head, folder, name=name):
            try:
                done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            except OSError as error:
                raise BadInput(f"{command[0]}: {error.strerror}: LLAMA_CPP_PYTHON names the interpreter") from error
            if done.returncode:
                said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no error message"]
                hint = ""
                if "ModuleNotFoundError" in said[-1] or "ImportError" in said[-1]:
                    hint = " (install it, or name an interpreter that has it in LLAMA_CPP_PYTHON)"
                raise BadInput(f"{command[1]}: {said[-1]}{hint}")


def file_name(family: str) -> str:
    """Name of the GGUF file in an exported folder; MTP modules are part of the target's file."""
    return "model.gguf" if family == "mtp" else "head.gguf"


def target_folder(head: HeadFolder) -> Path:
    """The folder with the target's config and tokenizer; for a GGUF file, its dequantised folder.

    Raises: BadInput if the target is not a local folder."""
    if head.target.endswith(".gguf"):
        return gguf_folder(head.target)
    if not Path(head.target).is_dir():
        raise BadInput(f"target {head.target}: no local folder; name one with --target: its tokenizer is copied")
    return Path(head.target)


def check_servable(head: HeadFolder, conversion: Conversion) -> None:
    """Raises BadInput that lists every reason why llama.cpp cannot serve a head."""
    if head.family not in REFUSALS:
        raise BadInput(f"head {head.path}: llama.cpp has no graph for {head.family} heads")
    problems = REFUSALS[head.family](head.config, head.tensors)
    kind = str((head.target_config or {}).get("model_type"))
    if head.target_config is None:
        problems.append(f"target {head.target} is not there: name it with --target")
    elif head.family in READS_FEATURES and kind not in TAPPED:
        problems.append(f"its graph of a {kind} target outputs no features")
    elif head.family == "mtp" and kind not in WITH_MODULES:
        problems.append(f"it has no graph for MTP modules of a {kind} target, only of {', '.join(WITH_MODULES)}")
    if head.family == "mtp" and head.target.endswith(".gguf"):
        problems.append("modules go into a copy of the target's folder, and it is a GGUF file: name the folder")
    if conversion.target_outtype and (head.family == "mtp" or head.target.endswith(".gguf")):
        why = "is in the same file as its modules" if head.family == "mtp" else "is a GGUF file already"
        problems.append(f"--target-outtype: the target {why}")
    if head.has_adapter:
        problems.append("it drafts for its target with an adapter on it: merge that first")
    if problems:
        raise BadInput(f"head {head.path}: llama.cpp cannot serve it: {'; '.join(problems)}")
    target_folder(head)


def eagle3_refusals(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """What llama.cpp's EAGLE-3 graph does not support in an exported folder."""
    problems = [f"{key}: it has no such norm" for key in ("fc_norm", "norm_output") if config.get(key)]
    problems += parallel_refusals(config, names)
    if "sliding_attention" in (config.get("layer_types") or ()):
        problems.append(f"sliding_window: {config.get('sliding_window')}, its heads see all positions")
    num_layers, num_taps = config.get("num_hidden_layers"), config.get("num_aux_hidden_states")
    if num_layers != 1:
        problems.append(f"num_hidden_layers: {num_layers}, its heads have one layer")
    if num_taps != NUM_TAPS:
        problems.append(f"num_aux_hidden_states: {num_taps}, its heads read {NUM_TAPS} features")
    return problems + rotation_refusals(config, ROTATIONS)


def parallel_refusals(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Heads trained to draft in parallel with mask tokens are not supported."""
    return ["pard_token: it drafts token by token"] if config.get("pard_token") is not None else []


def rotation_refusals(config: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Rotary scalings other than the known ones are not supported."""
    kind = (config.get("rope_scaling") or {}).get("rope_type", "default")
    return [] if kind in known else [f"rope_scaling: of type {kind}, expected one of {', '.join(known)}"]


def block_refusals(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """What llama.cpp's converter does not support in a DFlash or DSpark folder."""
    layer, names = config.get("transformer_layer_config"), set(names)
    whole = {**config, **(layer or {})}
    is_cut = config.get("draft_vocab_size") not in (None, whole.get("vocab_size"))
    problems = rotation_refusals(whole, ROTATIONS_OF_BLOCKS)
    if config.get("architectures") not in ([DFLASH], [DFLASH2]):
        if "lm_head.weight" in names and not is_cut:
            why = "drops an output layer over the whole vocabulary: train with output: shared, or draft_vocab_size"
            problems.append(f"lm_head.weight: its converter {why}")
        return problems
    if is_cut:
        problems.append(f"draft_vocab_size: {config['draft_vocab_size']}, its DFlash drafts the whole vocabulary")
    if any(name.startswith("confidence_head.") for name in names):
        problems.append("confidence_head: its graph has one beside a Markov head only")
    if layer is not None:
        problems.append("transformer_layer_config: it reads DFlash in the plain layout only")
    top_k, hidden = (config.get("dflash_config") or {}).get("selector_top_k") or 0, whole.get("hidden_size") or 0
    if hidden < (least := top_k * (top_k + 1)):
        problems.append(f"selector_top_k: {top_k} of DFlash2 takes a hidden_size of {least} at least, this is {hidden}")
    return problems


def mtp_refusals(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """What llama.cpp's graphs of MTP modules do not support: several modules in Qwen's layout, which has one `fc`."""
    count = config.get("num_nextn_predict_layers", config.get("mtp_num_hidden_layers", 1))
    is_shared = config.get("model_type") in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    return [f"num_nextn_predict_layers: {count}, it reads one module of this layout"] if is_shared and count > 1 else []


# to support another family: a line here, in SPEC_TYPES and in write.py's WRITERS
REFUSALS: dict[str, Callable[[Mapping[str, Any], Iterable[str]], list[str]]] = {
    "eagle3": eagle3_refusals,
    "draft_lm": parallel_refusals,
    "mtp": mtp_refusals,
    "block": block_refusals,
}


def server_flags(family: str, num_draft_tokens: int, *, file: str = "") -> str | None:
    """llama-server's flags for drafting with a head; None for families that it has no graph for.

    Args: family: for block drafters dflash or dspark. file: the head's, unless it is part of the target's."""
    kind = SPEC_TYPES.get(family)
    where = "" if family == "mtp" or not file else f"-md {file} "
    return kind and f"{where}--spec-type {kind} --spec-draft-n-max {num_draft_tokens} --spec-draft-p-min 0"


def serve_lines(head: HeadFolder, output: str, conversion: Conversion) -> list[str]:
    """The conversion commands, if they are left to the user, and the command that serves the result."""
    lines = []
    if conversion.llama_cpp is None:
        commands = conversion.commands(head, Path(output), name=Path(output).name)
        lines += [shlex.join(command) for command in commands]
    file, num = f"{output}/{file_name(head.family)}", head.own["num_depths"]
    model = head.target if head.target.endswith(".gguf") else f"{output}/target.gguf"
    if conversion.target_outtype is None and not head.target.endswith(".gguf"):
        model = "TARGET.gguf"
    if head.family == "mtp":
        model, num = file, num_modules(head)
    return [*lines, f"llama-server -m {model} {server_flags(head.method, num, file=file)}"]
