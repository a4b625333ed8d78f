"""What an export is made of, `HeadFolder`, and what a family says about the engines that load it and about the folders
that they load: `Serving`."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

from torch import Tensor

from ..adapters import WEIGHTS as ADAPTER_WEIGHTS
from ..importing.imported import ForeignFolder, Imported
from ..loading import TargetConfig
from ..targets.skeleton import load_skeleton
from .contracts import Contract
from .gguf_file import GgufFile
from .record import PROVENANCE, HeadRecord
from .tensor_files import TensorFiles

# kinds of target (model_type) whose graphs output the inputs of their layers; with any other, llama-server aborts
TAPPED = (
    "llama mistral mixtral qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text gpt_oss lfm2 "
    "nemotron_h minimax_m2"
).split()


@dataclass(frozen=True)
class HeadFolder:
    """A trained head as `save_head` wrote it."""

    path: Path
    config: dict[str, Any]  # the serving keys of config.json
    record: HeadRecord
    tensors: dict[str, Tensor]  # by served name, in the dtype that they are exported in
    target: str  # folder or hub id
    target_config: dict[str, Any] | None  # as Hugging Face reads it; None: the target is not available
    serving: "Serving | None"  # of its family

    @property
    def family(self) -> str:
        return self.record.family

    @property
    def own(self) -> dict[str, Any]:
        """The head's own config."""
        return self.record.head

    @property
    def has_adapter(self) -> bool:
        """Whether the head drafts for its target with an adapter (Medusa-2)."""
        return (self.path / ADAPTER_WEIGHTS).is_file()

    @cached_property
    def embedding_scale(self) -> float:
        """The factor by which the target's embedding module multiplies its table: sqrt(hidden size) in Gemma, mostly 1.

        A head reads what the module gives, without the factor by which a model like Granite multiplies that later. 1 if
        the target is not available. Raises: BadInput if the target cannot be built without weights.
        """
        if self.target_config is None:
            return 1.0
        module = load_skeleton(TargetConfig(path=self.target)).input_embedding
        return float(getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", 1.0)))

    @property
    def provenance(self) -> dict[str, Any]:
        """The entry of an exported config.json from which an import restores the same head."""
        return {PROVENANCE: self.record.to_json()}


@dataclass(frozen=True)
class GgufLayout:
    """An architecture of GGUF files that holds heads of a family alone."""

    contract: Callable[[GgufFile], Contract]
    told: Mapping[str, str]  # keys of the file, by those of config.json that they are converted from
    nested: str = ""  # an object of config.json that has some of these


class Serving:
    """How engines load the heads of a family, and how folders that they load, ours or those of others, become heads.

    A family subclasses this in a file of this folder, and names an instance. `method` is the engines' name for a way of
    drafting: the family's, unless the family has several.
    """

    engines: tuple[str, ...]  # of `write.ENGINES`, those that load it, the usual one first
    order: int = 0  # where several families recognise a folder, it belongs to the one of the lowest order
    keeps_vocabulary: bool = False  # whether engines read a cut draft vocabulary; from other heads they draft the whole
    is_module: bool = False  # whether heads become part of the target's checkpoint
    is_whole_model: bool = False  # whether the folder has embedding and output layer of its own, as any model's
    # words in a path by which vLLM takes a head for one of this family, where it is told no such method
    path_words: tuple[str, ...] = ()
    key_types: Mapping[str, Any] = {}  # of keys of config.json that the contract reads
    # further keys of the head's config that change what it computes without showing in tensor shapes: training that
    # starts from a folder must go on with the same. `feature_layers` and `draft_vocab_size` are of every family
    computes: tuple[str, ...] = ()
    vllm_methods: Mapping[str, str] = {}  # vLLM's names of methods, where they are others
    sglang_algorithms: Mapping[str, str] = {}  # `--speculative-algorithm` by method; of others SGLang loads no head
    spec_types: Mapping[str, str] = {}  # llama-server's `--spec-type` by method; empty: it has no graph for the family
    reads_features: bool = False  # whether it drafts from inputs of the target's layers, for llama.cpp
    in_sglang: str = ""  # what SGLang does where a head has a sliding window; empty: the family has none
    gguf: Mapping[str, GgufLayout] = {}  # by general.architecture

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        """Write the folder for an engine. Raises BadInput if the engine cannot draft what the head does."""
        raise NotImplementedError

    def recognises(self, config: dict[str, Any], stored: TensorFiles) -> bool:
        """Whether a folder is one of the family's, by config keys and tensor names, even if others are wrong."""
        raise NotImplementedError

    def contract(self, folder: Path, config: dict[str, Any], stored: TensorFiles, *, to: str) -> Contract:
        """What a folder with this config must hold, and the problems of the config. Args: to: as in `check_export`."""
        raise NotImplementedError

    def read(self, folder: ForeignFolder) -> Imported:
        """Import the head in a folder that `recognises` takes, whoever made it. Raises BadInput on parts that ours do
        not have, or that are missing."""
        raise NotImplementedError

    def method(self, head: HeadFolder) -> str:
        return head.family

    def num_drafted(self, head: HeadFolder) -> int:
        """K that engines are told."""
        return head.own["num_depths"]

    def notes(self, head: HeadFolder) -> list[str]:
        """Remarks for whoever serves the head: what engines do otherwise than ours."""
        window = head.own.get("sliding_window") if self.in_sglang else None
        return [f"sliding_window {window}: serve it with vLLM; {self.in_sglang}"] if window else []

    def commands(self, head: HeadFolder, output: str, *, to: str, target: str) -> dict[str, str]:
        """By engine, the shell command that serves the exported folder."""
        if to == "llama.cpp":
            return {}
        if to == "speculators":
            return {"vllm": f"vllm serve {quote(output)}"}
        method, num, is_parallel = self.method(head), self.num_drafted(head), head.own.get("parallel", False)
        speculation = {"method": self.vllm_methods.get(method, method), "model": output, "num_speculative_tokens": num}
        commands = {"vllm": vllm_command(target, speculation | ({"parallel_drafting": True} if is_parallel else {}))}
        flags = self.sglang_flags(method, num, folder=quote(output))
        if flags is not None and not is_parallel and not head.own.get("sliding_window"):
            commands["sglang"] = sglang_command(target, flags)
        return commands

    def sglang_flags(
        self, method: str, num_draft_tokens: int, *, folder: str, top_k: int = 1, num_nodes: int = 0
    ) -> str | None:
        """SGLang's flags for drafting with a head; None where it loads no such head.

        Args: folder: of the exported head. top_k, num_nodes: of a dynamic tree, the nodes expanded per level and the
            nodes in total.
        """
        if method not in self.sglang_algorithms:
            return None
        where = "" if self.is_module else f"--speculative-draft-model-path {folder} "
        return (
            f"--speculative-algorithm {self.sglang_algorithms[method]} {where}--speculative-num-steps "
            f"{num_draft_tokens} --speculative-eagle-topk {top_k} --speculative-num-draft-tokens "
            f"{(num_nodes or num_draft_tokens) + 1}"
        )

    # llama.cpp

    def server_flags(self, method: str, num_draft_tokens: int, *, file: str) -> str | None:
        """llama-server's flags for drafting with a head in a GGUF file; None if it has no graph for it."""
        if method not in self.spec_types:
            return None
        where = "" if self.is_module else f"-md {file} "
        kind = self.spec_types[method]
        return f"{where}--spec-type {kind} --spec-draft-n-max {num_draft_tokens} --spec-draft-p-min 0"

    def method_of(self, file: GgufFile) -> str | None:
        """The method of a head of this family in a GGUF file; None: it holds none."""
        return None

    def refusals(self, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
        """What llama.cpp does not support in an exported folder. Args: names: of its tensors."""
        return []

    def refused_target(self, kind: str) -> str | None:
        """Why llama.cpp does not draft for a kind of target (model_type); None: it does."""
        is_refused = self.reads_features and kind not in TAPPED
        return f"its graph of a {kind} target outputs no features" if is_refused else None


def vllm_command(model: str, speculation: Mapping[str, Any]) -> str:
    spec = json.dumps(speculation, separators=(",", ":"))
    return f"vllm serve {quote(model)} --speculative-config {quote(spec)}"


def sglang_command(model: str, flags: str) -> str:
    return f"python -m sglang.launch_server --model-path {quote(model)} {flags}"
