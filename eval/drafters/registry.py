"""Drafters by the names that the command line takes: `ngram`, `suffix:ANSWERS`, `head:PATH`."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...base.errors import BadInput, naming
from ...engines.heads import head_record, load_head
from ...heads.base import DraftHead
from ...heads.drafting.drafter import Drafter
from ...heads.drafting.windowed import Windowed
from ...targets.caches.ring_cache import DraftWindow
from ...targets.loading import TargetConfig, read_model_config
from ...targets.target import Target
from .answers import Answers, load_answers
from .draft_model import load_draft_model
from .hybrid import HybridDrafter
from .lookup import NgramDrafter, SuffixDrafter

MOST_NGRAM = 64  # tokens; every text keeps all of its n-grams up to that length


def answers_for(target: Target, path: str) -> Answers | None:
    return load_answers(path, target.tokenizer, vocab_size=target.vocab_size) if path else None


def finite_head(path: str, target: Target) -> DraftHead:
    """A head whose weights are numbers. Raises BadInput naming a tensor that holds others, as then no draft is accepted
    and no figure would say why."""
    head = load_head(path, target)
    for name, value in head.state_dict().items():
        if value.is_floating_point() and (count := int((~torch.isfinite(value)).sum())):
            raise BadInput(f"head {path}: tensor {name}: {count} values are NaN or infinite")
    return head


def hybrid(target: Target, argument: str) -> Drafter:
    path, _, answers = argument.partition(":")
    return HybridDrafter(finite_head(path, target), answers=answers_for(target, answers))


class DrafterEntry(NamedTuple):
    """forms: in which `--drafter` takes it; MAX is a count, ANSWERS a file, PATH a folder or a hub id. build: makes the
    drafter from the target and the text after the colon."""

    forms: list[str]
    build: Callable[[Target, str], Drafter]


DRAFTERS = {
    "ngram": DrafterEntry(["ngram", "ngram:MAX"], lambda _, most: NgramDrafter(int(most)) if most else NgramDrafter()),
    "suffix": DrafterEntry(
        ["suffix", "suffix:ANSWERS"], lambda target, path: SuffixDrafter(answers=answers_for(target, path))
    ),
    "draft-model": DrafterEntry(["draft-model:PATH"], lambda target, path: load_draft_model(path, target)),
    "hybrid": DrafterEntry(["hybrid:PATH[:ANSWERS]"], hybrid),
    "head": DrafterEntry(["head:PATH"], lambda target, path: finite_head(path, target)),
}
HEADS_BEHIND = ("head", "hybrid")  # drafters whose argument begins with a head's folder


def parse_drafter(spec: str) -> tuple[str, str]:
    """`ngram:4` -> (`ngram`, `4`). Raises BadInput on what cannot be built, before a model is loaded."""
    name, _, argument = spec.partition(":")
    if name not in DRAFTERS:
        near = [DRAFTERS[known].forms[-1] for known in get_close_matches(name, DRAFTERS, n=1)]
        near = [f"head:{spec}"] if Path(spec, "config.json").is_file() else near
        hint = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(form for drafter in DRAFTERS.values() for form in drafter.forms)
        raise BadInput(f"drafter {spec!r}: expected one of {known}{hint}")
    forms = DRAFTERS[name].forms
    if (argument and ":" not in forms[-1]) or (not argument and name not in forms):
        raise BadInput(f"drafter {spec!r}: expected {forms[-1]}")
    if argument and name == "ngram" and not (argument.isdecimal() and 1 <= int(argument) <= MOST_NGRAM):
        raise BadInput(f"drafter {spec!r}: MAX should be a whole number from 1 to {MOST_NGRAM}")
    if name in HEADS_BEHIND:
        head_record(argument.partition(":")[0])
    if name == "draft-model":
        with naming(f"drafter draft-model:{argument}: "):
            read_model_config(TargetConfig(path=argument))
    answers = answers_of(name, argument)
    if answers and not Path(answers).is_file():
        raise BadInput(f"drafter {spec!r}: {answers}: no such file of answers")
    return name, argument


def answers_of(name: str, argument: str) -> str:
    """The file of answers that a drafter with this argument looks up; empty if there is none."""
    return {"suffix": argument, "hybrid": argument.partition(":")[2]}.get(name, "")


def build_drafter(spec: str, target: Target, *, window: str = "") -> tuple[str, Drafter]:
    """A drafter for a target from one of the forms in DRAFTERS.

    Args: window: as `--draft-window` takes it, for its head.
    Returns: its name in reports (that in DRAFTERS, a hybrid's with its head's family, with `+answers` if it looks these
    up; or a head's family), and the drafter. Raises: BadInput.
    """
    name, argument = parse_drafter(spec)
    drafter = DRAFTERS[name].build(target, argument)
    window = window if name in HEADS_BEHIND else ""
    if window:
        set_window(drafter.head if isinstance(drafter, HybridDrafter) else drafter, window)
    answers = answers_of(name, argument)
    if isinstance(drafter, HybridDrafter):
        name += f"+{drafter.head.config.type}"
    if answers:
        name += "+answers"
    name = drafter.config.type if isinstance(drafter, DraftHead) else name
    return f"{name}:window {window}" if window else name, drafter


def check_window(window: str, *kinds: str) -> None:
    """Raises BadInput on what is no draft window, and on one for drafters of these kinds where none has a head."""
    if window and DraftWindow.parse(window) and not set(kinds).intersection(HEADS_BEHIND):
        raise BadInput(f"--draft-window {window}: goes with a head")


def set_window(head: Drafter, window: str) -> None:
    """Let a head draft with a window. Raises BadInput if it has one of its own, or no cache that could be cut."""
    wanted, kind = DraftWindow.parse(window), type(head).__name__
    if not isinstance(head, Windowed):
        raise BadInput(f"--draft-window {window}: {kind} has no keys and values of its own to leave out")
    if head.window is not None:
        raise BadInput(f"--draft-window {window}: {kind} has a window of its own, of {head.window}")
    head.draft_window = wanted


def build_drafters(specs: Sequence[str], target: Target, *, window: str = "") -> list[tuple[str, Drafter]]:
    """Several drafters with distinct names: those of the same kind get their argument or a number appended.

    Args: window: as in `build_drafter`, for all heads. Raises: BadInput if one of several adapts the target, since the
    others would then draft for another model.
    """
    built = [build_drafter(spec, target, window=window) for spec in specs]
    if target.is_adapted and len(specs) > 1:
        adapting = next(name for name, drafter in built if drafter.adapts_target)
        raise BadInput(f"drafter {adapting}: computes with adapters on the target; measure it by itself")
    kinds, names = [name for name, _ in built], []
    for spec, (name, _) in zip(specs, built, strict=True):
        argument = spec.partition(":")[2]
        joint = "," if ":" in name else ":"  # behind a window
        names.append(f"{name}{joint}{argument}" if argument and kinds.count(name) > 1 else name)
    return [
        (f"{name}#{names[:i].count(name) + 1}" if name in names[:i] else name, drafter)
        for i, (name, (_, drafter)) in enumerate(zip(names, built, strict=True))
    ]


def training_record(spec: str) -> dict[str, Any] | None:
    """A head's record of its training (reference/run_folder.md); None if there is none or the drafter has no head."""
    name, argument = parse_drafter(spec)
    return head_record(argument.partition(":")[0]).training if name in HEADS_BEHIND else None
