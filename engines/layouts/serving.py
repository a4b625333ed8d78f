"""What an export is made of, `HeadFolder`; what a family says of the folders that engines load, `Serving`; and what an
engine is told of a head, `EngineSupport`."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ...base.errors import BadInput
from ...heads.stored.record import PROVENANCE, HeadRecord
from ...targets.adapters import WEIGHTS as ADAPTER_WEIGHTS
from ...targets.caches.ring_cache import DraftWindow
from ...targets.loading import TargetConfig
from ...targets.skeleton import load_skeleton
from ...targets.weights.tensor_files import TensorFiles
from .contracts import Contract
from .foreign import ForeignFolder, Imported
from .gguf_file import GgufFile

ROTATIONS = ("default", "linear", "yarn", "llama3", "longrope")  # that llama.cpp has


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
    window: DraftWindow | None = None  # that the engine is told of

    @property
    def family(self) -> str:
        return self.record.family

    @property
    def own(self) -> dict[str, Any]:
        """The head's own config."""
        return self.record.head

    @property
    def method(self) -> str:
        """How it drafts: the family, or one of the family's several ways (`Serving.methods`)."""
        return self.family if self.serving is None else self.serving.method(self) or self.family

    @property
    def num_drafted(self) -> int:
        """K that engines are told."""
        return self.own["num_depths"]

    @property
    def is_module(self) -> bool:
        """Whether it becomes part of the target's checkpoint."""
        return self.serving is not None and self.serving.is_module

    @property
    def is_parallel(self) -> bool:
        """Whether it drafts all tokens at once behind mask tokens (P-EAGLE, PARD)."""
        return bool(self.own.get("parallel"))

    @property
    def has_adapter(self) -> bool:
        """Whether the head drafts for its target with an adapter (Medusa-2)."""
        return (self.path / ADAPTER_WEIGHTS).is_file()

    @cached_property
    def embedding_scale(self) -> float:
        """The target's. Raises BadInput if it is not available, or cannot be built without weights."""
        if self.target_config is None:
            why = "not there, and what is written depends on how it scales its embeddings: name it with --target"
            raise BadInput(f"target {self.target}: {why}")
        return load_skeleton(TargetConfig(path=self.target)).embedding_scale

    @property
    def provenance(self) -> dict[str, Any]:
        """The entry of an exported config.json from which an import restores the same head."""
        return {PROVENANCE: self.record.to_json()}


@dataclass(frozen=True)
class EngineSupport:
    """A serving engine. Each has a file in engines/, and a line in `export.ENGINES`."""

    names: Mapping[str, str]  # the engine's own name for each way of drafting (`HeadFolder.method`) that it has
    # the shell command that serves a head, of (head, folder, target=, to=); None: the engine's file makes its own lines
    command: Callable[..., str] | None = None
    layouts: tuple[str, ...] = ("plain",)  # which layouts it loads, see `Serving.layout`
    reads: str = ""  # the engine whose folders it loads; empty: folders are written for itself
    # of heads' configs: the values that it drafts with on a CPU
    keys_on_cpu: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GgufLayout:
    """An architecture of GGUF files that holds heads of a family alone."""

    told: Mapping[str, str]  # keys of the file, by those of config.json that they are converted from
    nested: str = ""  # an object of config.json that has some of these
    has_mask: bool = False  # whether drafts stand behind a mask token
    problems: Callable[[GgufFile], list[str]] = lambda file: []  # of keys that only this architecture has


class Serving:
    """What the folders of a family hold that engines load, how they are written, and how they become heads again.

    A family subclasses this in a file of engines/families/ and names an instance in `SERVINGS`. Which engines load it,
    and what they are told, is in the engines' files.
    """

    methods: tuple[str, ...] = ()  # its ways of drafting, where they are several; empty: one, named as the family
    layouts: tuple[str, ...] = ()  # what is written besides folders for an engine: "speculators", "hf"
    keeps_vocabulary: bool = False  # whether engines read a cut draft vocabulary; from other heads they draft the whole
    targets: tuple[str, ...] = ()  # kinds of text model (model_type) that engines load it with; empty: any
    is_module: bool = False  # whether heads become part of the target's checkpoint
    is_whole_model: bool = False  # whether the folder has embedding and output layer of its own, as any model's
    key_types: Mapping[str, Any] = {}  # of keys of config.json that the contract reads
    # further keys of the head's config that change what it computes without showing in tensor shapes: training that
    # starts from a folder must go on with the same. `feature_layers` and `draft_vocab_size` are of every family
    computes: tuple[str, ...] = ()
    in_sglang: str = ""  # what SGLang does where a head has a sliding window; empty: the family has none
    in_fp8: str = ""  # the class of an exported head that vLLM reads in FP8 too; empty: the family has none
    gguf: Mapping[str, GgufLayout] = {}  # by general.architecture

    def refusals(self, head: HeadFolder, *, to: str) -> list[str]:
        """Why an engine, or a layout, cannot have this head, though it has others of the family; empty: it can."""
        return []

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        """Write the folder of a head without `refusals`. Raises BadInput if it needs what the target lacks."""
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

    def layout(self, to: str) -> str:
        """The name of the layout that is written for an engine. Engines that load one layout share a folder."""
        return to if to in ("speculators", "llama.cpp") else "plain"

    def method(self, head: HeadFolder) -> str:
        """Which of `methods` a head is; empty: there is one."""
        return ""

    def notes(self, head: HeadFolder) -> list[str]:
        """Remarks for whoever serves the head: what engines do otherwise than ours."""
        window = head.own.get("sliding_window") if self.in_sglang else None
        return [f"sliding_window {window}: serve it with vLLM; {self.in_sglang}"] if window else []

    def not_in_llamacpp(self, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
        """What llama.cpp does not support in an exported folder. Args: names: of its tensors."""
        return []

    def method_of(self, file: GgufFile) -> str | None:
        """The method of a head of this family in a GGUF file; None: the file holds none."""
        return None


def not_in_llamacpp(config: Mapping[str, Any], rotations: Collection[str] | None = ROTATIONS) -> list[str]:
    """What llama.cpp supports in no head: parallel drafting, and other rotary scalings than these (None: any)."""
    problems = ["pard_token: it drafts token by token"] if config.get("pard_token") is not None else []
    kind = (config.get("rope_scaling") or {}).get("rope_type", "default")
    if rotations is not None and kind not in rotations:
        problems.append(f"rope_scaling: of type {kind}, expected one of {', '.join(rotations)}")
    return problems
