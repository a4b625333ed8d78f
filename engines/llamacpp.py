"""llama.cpp: how llama-server calls the ways of drafting and what it is told, what it cannot serve, and the conversion
to GGUF by the user's own checkout.

Its converter reads the Hugging Face layouts that other engines load, so an export writes those; the permutation of q
and k, tokenizers and rotary factors are the converter's job and change often. Source: llama.cpp of November 2026.
"""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import BadInput
from .layouts.serving import EngineSupport, HeadFolder
from .layouts.writing import target_folder

SPEC_TYPES = {
    "eagle3": "draft-eagle3",
    "mtp": "draft-mtp",
    "assistant": "draft-mtp",
    "draft_lm": "draft-simple",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}
LLAMACPP = EngineSupport(SPEC_TYPES, layouts=("llama.cpp",))
# ways of drafting that read inputs of the target's layers, and the kinds of target (model_type) whose graphs output
# these; with any other, llama-server aborts
READS_FEATURES = ("eagle3", "dflash", "dspark")
TAPPED = (
    "llama mistral mixtral qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text gpt_oss lfm2 "
    "nemotron_h minimax_m2"
).split()
# kinds of target whose MTP modules it has a graph for
WITH_MODULES = "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text glm4_moe".split()
OUTTYPES = ("f32", "f16", "bf16", "q8_0")
OF_DTYPE = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SCRIPT = "convert_hf_to_gguf.py"


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
        if head.is_module:
            return [made]
        target = str(target_folder(head))
        if head.method in READS_FEATURES:
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


def file_name(head: HeadFolder) -> str:
    """Name of the GGUF file in an exported folder; modules are part of the target's file."""
    return "model.gguf" if head.is_module else "head.gguf"


def check_servable(head: HeadFolder, conversion: Conversion) -> None:
    """Raises BadInput that lists every reason why llama.cpp cannot serve a head of a family that it knows."""
    assert head.serving is not None
    problems, is_file = head.serving.not_in_llamacpp(head.config, head.tensors), head.target.endswith(".gguf")
    if head.target_config is None:
        problems.append(f"target {head.target} is not there: name it with --target")
    elif why := target_problem(head.method, str(head.target_config.get("model_type"))):
        problems.append(why)
    if head.is_module and is_file:
        problems.append("modules go into a copy of the target's folder, and it is a GGUF file: name the folder")
    if conversion.target_outtype and (head.is_module or is_file):
        why = "is in the same file as its modules" if head.is_module else "is a GGUF file already"
        problems.append(f"--target-outtype: the target {why}")
    if head.has_adapter:
        problems.append("it drafts for its target with an adapter on it: merge that first")
    if problems:
        raise BadInput(f"head {head.path}: llama.cpp cannot serve it: {'; '.join(problems)}")
    target_folder(head)


def target_problem(method: str, kind: str) -> str | None:
    """Why llama.cpp does not draft so for a kind of target (model_type); None: it does."""
    if method in READS_FEATURES and kind not in TAPPED:
        return f"its graph of a {kind} target outputs no features"
    if method == "mtp" and kind not in WITH_MODULES:
        return f"it has no graph for MTP modules of a {kind} target, only of {', '.join(WITH_MODULES)}"
    return None


def flags(method: str, num_draft_tokens: int, *, file: str) -> str | None:
    """llama-server's flags for drafting with a head in a GGUF file; None if it has no graph for it. MTP modules are in
    the target's file, which `-m` names."""
    if method not in SPEC_TYPES:
        return None
    where = "" if method == "mtp" else f"-md {file} "
    return f"{where}--spec-type {SPEC_TYPES[method]} --spec-draft-n-max {num_draft_tokens} --spec-draft-p-min 0"


def serve_lines(head: HeadFolder, output: str, conversion: Conversion) -> list[str]:
    """The conversion commands, if they are left to the user, and the command that serves the result."""
    lines = []
    if conversion.llama_cpp is None:
        commands = conversion.commands(head, Path(output), name=Path(output).name)
        lines += [shlex.join(command) for command in commands]
    file = f"{output}/{file_name(head)}"
    model = head.target if head.target.endswith(".gguf") else f"{output}/target.gguf"
    if conversion.target_outtype is None and not head.target.endswith(".gguf"):
        model = "TARGET.gguf"
    told = flags(head.method, head.num_drafted, file=shlex.quote(file))
    return [*lines, f"llama-server -m {shlex.quote(file if head.is_module else model)} {told}"]
