"""Heads for llama.cpp: what it cannot serve, and the conversion to GGUF by the user's own checkout of it.

Its converter reads the Hugging Face layouts that other engines load, so an export writes those; the permutation of q
and k, tokenizers and rotary factors are the converter's job and change often. Source: llama.cpp of November 2026.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configs.errors import BadInput
from ..importing.gguf import gguf_folder
from .serving import HeadFolder

OUTTYPES = ("f32", "f16", "bf16", "q8_0")
OF_DTYPE = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SCRIPT = "convert_hf_to_gguf.py"
ROTATIONS = ("default", "linear", "yarn", "llama3", "longrope")


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
        file = folder / file_name(head)
        made = [python, script, str(folder), "--outfile", str(file), "--outtype", kind, "--model-name", name]
        if is_module(head):
            return [made]
        target = str(target_folder(head))
        if head.serving and head.serving.reads_features:
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
                finished = subprocess.run(command, capture_output=True, text=True, errors="replace")
            except OSError as error:
                raise BadInput(f"{command[0]}: {error.strerror}: LLAMA_CPP_PYTHON names the interpreter") from error
            if finished.returncode:
                said = [line.strip() for line in finished.stderr.splitlines() if line.strip()] or ["no error message"]
                hint = ""
                if "ModuleNotFoundError" in said[-1] or "ImportError" in said[-1]:
                    hint = " (install it, or name an interpreter that has it in LLAMA_CPP_PYTHON)"
                raise BadInput(f"{command[1]}: {said[-1]}{hint}")


def is_module(head: HeadFolder) -> bool:
    return head.serving is not None and head.serving.is_module


def file_name(head: HeadFolder) -> str:
    """Name of the GGUF file in an exported folder; modules are part of the target's file."""
    return "model.gguf" if is_module(head) else "head.gguf"


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
    serving = head.serving
    if serving is None or not serving.spec_types:
        raise BadInput(f"head {head.path}: llama.cpp has no graph for {head.family} heads")
    problems, is_file = serving.refusals(head.config, head.tensors), head.target.endswith(".gguf")
    if head.target_config is None:
        problems.append(f"target {head.target} is not there: name it with --target")
    elif why := serving.refused_target(str(head.target_config.get("model_type"))):
        problems.append(why)
    if serving.is_module and is_file:
        problems.append("modules go into a copy of the target's folder, and it is a GGUF file: name the folder")
    if conversion.target_outtype and (serving.is_module or is_file):
        why = "is in the same file as its modules" if serving.is_module else "is a GGUF file already"
        problems.append(f"--target-outtype: the target {why}")
    if head.has_adapter:
        problems.append("it drafts for its target with an adapter on it: merge that first")
    if problems:
        raise BadInput(f"head {head.path}: llama.cpp cannot serve it: {'; '.join(problems)}")
    target_folder(head)


def parallel_refusals(config: Mapping[str, Any]) -> list[str]:
    """Heads trained to draft in parallel with mask tokens are not supported."""
    return ["pard_token: it drafts token by token"] if config.get("pard_token") is not None else []


def rotation_refusals(config: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Rotary scalings other than the known ones are not supported."""
    kind = (config.get("rope_scaling") or {}).get("rope_type", "default")
    return [] if kind in known else [f"rope_scaling: of type {kind}, expected one of {', '.join(known)}"]


def serve_lines(head: HeadFolder, output: str, conversion: Conversion) -> list[str]:
    """The conversion commands, if they are left to the user, and the command that serves the result."""
    lines = []
    if conversion.llama_cpp is None:
        commands = conversion.commands(head, Path(output), name=Path(output).name)
        lines += [shlex.join(command) for command in commands]
    assert head.serving is not None
    file, num = f"{output}/{file_name(head)}", head.serving.num_drafted(head)
    model = head.target if head.target.endswith(".gguf") else f"{output}/target.gguf"
    if conversion.target_outtype is None and not head.target.endswith(".gguf"):
        model = "TARGET.gguf"
    flags = head.serving.server_flags(head.serving.method(head), num, file=file)
    return [*lines, f"llama-server -m {file if head.serving.is_module else model} {flags}"]
