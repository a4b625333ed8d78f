"""The heads that `headstart auto` may train: every family of the registry, configured by the files of configs/auto.

Each file of configs/auto is a candidate. A family without such a file takes part with its config of configs/heads.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from ...configs.loader import build, read_config, shipped
from ...engines.export import ENGINES, engines_of
from ...engines.families.table import SERVINGS
from ...engines.heads import HEADS, head_class
from ...engines.servers.setting import OURS
from ...heads.base import HeadConfig
from ...targets.loading import TargetConfig, default_device, read_model_config
from ...targets.weights.mtp_checkpoint import module_layout
from ...train.inputs.config import Share

BATCH_SIZE = 8  # rows of an optimizer step
# the `train` section of all candidates, unless their files override it; the same as in `make bench-heads`
TRAINING = {"batch_size": BATCH_SIZE, "optimizer": "muon", "learning_rate": 3e-3, "matrix_learning_rate": 1e-2}


@dataclass(kw_only=True)
class CandidateFile:
    """The keys of a file in configs/auto."""

    head: dict[str, Any]
    train: dict[str, Any] = field(default_factory=dict)  # overrides of TRAINING
    # whether the draft vocabulary is cut to the tokens that occur in the answers, in engines that draft from a cut one
    cuts_vocabulary: bool = False
    # the acceptance rate of each draft behind accepted ones that heads like it reached; the default where none is
    # known. It decides which candidates are trained first
    usual_acceptance: Share = 0.5


@dataclass(frozen=True)
class Candidate:
    """A head that may be trained, and how."""

    name: str  # of its config file, without suffix
    head: HeadConfig
    train: dict[str, Any]  # the `train` section of its run config
    cuts_vocabulary: bool
    usual_acceptance: float

    def with_vocabulary(self, size: int | None) -> "Candidate":
        """A copy with a draft vocabulary of `size` tokens (None: all); the candidate itself if it does not cut it."""
        return replace(self, head=replace(self.head, draft_vocab_size=size)) if self.cuts_vocabulary else self


def find_candidates(engine: str = OURS) -> list[Candidate]:
    """All candidates, in the order of the registry, as they are drafted with in an engine."""
    paths = {path.stem: f"auto/{path.name}" for path in shipped("auto/*.yaml")}
    candidates = [read_candidate(name, path) for name, path in paths.items()]
    missing = set(HEADS) - {candidate.head.type for candidate in candidates}
    candidates += [read_candidate(name, f"heads/{name}.yaml") for name in missing]
    if engine != OURS:
        keeping = {family for family, serving in SERVINGS.items() if serving.keeps_vocabulary}
        candidates = [replace(c, cuts_vocabulary=c.cuts_vocabulary and c.head.type in keeping) for c in candidates]
        on_cpu = ENGINES[engine].keys_on_cpu if default_device() == "cpu" and engine in ENGINES else {}
        for number, one in enumerate(candidates):
            told = {key: value for key, value in on_cpu.items() if hasattr(one.head, key)}
            candidates[number] = replace(one, head=replace(one.head, **told))
    families = list(HEADS)
    return sorted(candidates, key=lambda candidate: (families.index(candidate.head.type), candidate.name))


def heads_read(engine: str, target: str) -> list[HeadConfig]:
    """Of the candidates that may be trained with an engine, those that read the target's states alone."""
    found = (candidate for candidate in find_candidates(engine) if is_served(candidate, engine, target))
    return [candidate.head for candidate in found if not candidate.head.reads_layers]


def read_candidate(name: str, path: str) -> Candidate:
    """Reads a candidate from a config file. Raises BadInput on invalid keys or values."""
    raw = build(CandidateFile, read_config(path), where=path)
    config = build(head_class(raw.head["type"]).config_class, raw.head, where=f"{path}: head")
    return Candidate(name, config, {**TRAINING, **raw.train}, raw.cuts_vocabulary, raw.usual_acceptance)


def is_served(candidate: Candidate, engine: str, target: str) -> bool:
    """Whether the engine can load heads of the candidate's family, with that target if they are of some alone. Ours
    loads all, of which those are left that some engine does."""
    serving, config = SERVINGS.get(candidate.head.type), read_model_config(TargetConfig(path=target))
    if serving and serving.targets and config.get_text_config().model_type not in serving.targets:
        return False
    if engine == OURS:
        return True
    kind = config.model_type  # of the whole target: beside a text model inside another, engines seldom load modules
    is_module = hasattr(candidate.head, "layout")  # of the target's checkpoint
    is_loaded = not is_module or module_layout(target, kind) is not None
    return engine in engines_of(candidate.head.type) and is_loaded
