"""What may be trained: every family of the registry, with the options that configs/auto offers for it.

A file of configs/auto is one candidate; a family without one is taken as configs/heads has it. Nothing here knows a
family.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...configs.errors import BadInput
from ...configs.loader import build, read_config, shipped
from ...heads.base import HeadConfig
from ...heads.export.write import WRITERS
from ...heads.registry import HEADS, head_class

# how all of them are trained, where their files do not say otherwise; as `make bench-heads` does
TRAINING = {"batch_size": 8, "optimizer": "muon", "learning_rate": 3e-3, "matrix_learning_rate": 1e-2}
OURS = "headstart"  # the engine that needs no export


@dataclass(kw_only=True)
class CandidateFile:
    """The keys of a file in configs/auto. cuts_vocabulary: it drafts the tokens that occur in the answers alone."""

    head: dict[str, Any]
    train: dict[str, Any] = field(default_factory=dict)
    cuts_vocabulary: bool = False


@dataclass(frozen=True)
class Candidate:
    """A head that may be trained, and how."""

    name: str  # of its file
    head: HeadConfig
    train: dict[str, Any]  # of a run's `train`
    cuts_vocabulary: bool

    def with_vocabulary(self, size: int | None) -> "Candidate":
        """The candidate with a draft vocabulary of that many tokens, if it cuts the vocabulary."""
        return replace(self, head=replace(self.head, draft_vocab_size=size)) if self.cuts_vocabulary else self


def find_candidates() -> list[Candidate]:
    """All that are shipped, in the order of the registry."""
    files = {path.stem: f"auto/{path.name}" for path in shipped("auto/*.yaml")}
    offered = {name: read(name, path) for name, path in files.items()}
    missing = set(HEADS) - {candidate.head.type for candidate in offered.values()}
    offered |= {name: read(name, f"heads/{name}.yaml") for name in missing}
    order = list(HEADS)
    return sorted(offered.values(), key=lambda candidate: (order.index(candidate.head.type), candidate.name))


def read(name: str, path: str) -> Candidate:
    """Raises BadInput on a file that is no candidate."""
    raw = build(CandidateFile, read_config(path), where=path)
    config = build(head_class(raw.head["type"]).config_class, raw.head, where=f"{path}: head")
    return Candidate(name, config, {**TRAINING, **raw.train}, raw.cuts_vocabulary)


def check_engine(engine: str) -> None:
    """Raises BadInput on an engine that nothing is exported for."""
    known = sorted({name for engines in WRITERS.values() for name in engines} - {"hf", "speculators"})
    if engine not in (OURS, *known):
        raise BadInput(f"--engine {engine}: expected one of {', '.join((OURS, *known))}")


def is_served(candidate: Candidate, engine: str) -> bool:
    """Whether an engine loads heads of that family."""
    return engine == OURS or engine in WRITERS.get(candidate.head.type, {})


def by_gain_per_cost(measured: Sequence[tuple[str, float, float]]) -> list[str]:
    """Names, best first, of (name, bound of the speedup, seconds of a training step): by the largest possible saving of
    time per token over the root of the cost, since learning grows more slowly than the number of steps."""
    ranked = sorted(measured, key=lambda one: -(1 - 1 / one[1]) / one[2] ** 0.5)
    return [name for name, _, _ in ranked]
