"""The drafters, trees and adapters that `headstart eval` is asked to measure."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from ...base.errors import BadInput
from ...eval.decoding.draft_setting import TREE_NAMES, DraftSetting, chain, drafts_tree
from ...eval.drafters.registry import build_drafters, check_window, parse_drafter, training_record
from ...eval.figures.recorded_training import RecordedTraining
from ...eval.proof.config import MeasureConfig
from ...eval.suites.prompts import distinct_names, file_names
from ...heads.drafting.drafter import Drafter
from ...targets.target import Target
from ...targets.weights.served_adapter import CONFIG, ServedAdapter, is_checkpoint

STATE_FILES = (CONFIG, "config.json")


@dataclass(frozen=True)
class NamedDrafter:
    """name: what reports call it. training: a head's record of its training. length: its own K, where one is named."""

    name: str
    drafter: Drafter
    training: RecordedTraining | None
    length: int | None = None

    def setting(self, config: MeasureConfig) -> DraftSetting:
        """Its chain, with K from its own `@K`, else from the option for all drafters, else its default."""
        own = config if self.length is None else replace(config, setting=chain(self.length))
        return own.setting_for(self.drafter)


def own_length(spec: str) -> tuple[str, int | None]:
    """Splits a drafter from its optional K: `suffix@7` -> (`suffix`, 7)."""
    drafter, _, length = spec.rpartition("@")
    return (drafter, int(length)) if drafter and length.isdecimal() and int(length) > 0 else (spec, None)


class WantedDrafts:
    """The drafters and trees that the command line names. lengths: of each drafter its own K, or None."""

    def __init__(
        self,
        drafters: Sequence[str],
        trees: Sequence[str],
        tree_nodes: int,
        *,
        temperature: float,
        verify_cost: str | None = None,
        window: str = "",
    ):
        """Raises BadInput before anything is loaded.

        Args: verify_cost: of chains; `measured`, a number, or nothing: all drafts are verified. window: of heads.
        """
        if not drafters:
            raise BadInput("nothing to measure: give at least one --head or --drafter")
        self.specs, self.lengths = zip(*map(own_length, drafters), strict=True)
        self.trees, self.tree_nodes, self.verify_cost, self.window = trees, tree_nodes, verify_cost, window
        check_window(window, *(parse_drafter(spec)[0] for spec in self.specs))
        for name in trees:
            if name not in TREE_NAMES:
                raise BadInput(f"--tree {name}: expected one of {', '.join(TREE_NAMES)}")
            if name == "sampled-chain" and temperature == 0:
                raise BadInput(f"--tree {name}: needs --temperature above 0")
        if verify_cost and verify_cost != "measured" and not is_positive(verify_cost):
            raise BadInput(f"--verify-cost {verify_cost}: expected measured, or a number above 0")

    def load(self, target: Target) -> list[NamedDrafter]:
        """Raises BadInput if none of them drafts the trees."""
        drafters = [
            NamedDrafter(name, drafter, recorded_training(spec, name), length)
            for (name, drafter), spec, length in zip(
                build_drafters(self.specs, target, window=self.window), self.specs, self.lengths, strict=True
            )
        ]
        names = ", ".join(named.name for named in drafters)
        for tree in self.trees:
            if not any(drafts_tree(target, named.drafter, tree) for named in drafters):
                who = f"not drafted by {names}" if target.decodes_trees else f"target {target.name} decodes chains only"
                raise BadInput(f"--tree {tree}: {who}")
        if self.verify_cost and not any(named.drafter.estimates for named in drafters):
            raise BadInput(f"--verify-cost {self.verify_cost}: none of {names} estimates what is accepted")
        return drafters


def recorded_training(spec: str, name: str) -> RecordedTraining | None:
    """What the head of a drafter recorded of its training; None if there is no head or no record. Args: name: opens
    the message of the BadInput that a record of another form raises."""
    record = training_record(spec)
    return None if record is None else RecordedTraining.from_json(record, where=name)


def named_adapters(folders: Sequence[str]) -> dict[str, str]:
    """The adapters and checkpoints of `--adapter` by names that tell them apart. Raises BadInput, before a target is
    loaded, if one is neither or is given twice."""
    found = [state for folder in folders for state in states_in(folder)]
    for state in found:
        if not is_checkpoint(state):
            ServedAdapter.read(state)
    try:
        names = distinct_names([file_names(state) for state in found])
    except BadInput as error:
        raise BadInput(f"--adapter {error}") from error
    return dict(zip(names, found, strict=True))


def states_in(folder: str) -> list[str]:
    """A folder of `--adapter`; where it holds several adapters or checkpoints, those, by the numbers in their names."""
    folder = str(Path(folder).expanduser())
    inside = {file.parent for name in STATE_FILES for file in Path(folder).glob(f"[!.]*/{name}")}
    if not inside or any(Path(folder, name).is_file() for name in STATE_FILES):
        if inside:
            more = f"{len(inside)} more inside are not measured; give them by name"
            print(f"headstart: --checkpoint {folder}: {more}", file=sys.stderr)
        return [folder]
    return sorted(map(str, inside), key=lambda path: (len(path), path))


def is_positive(text: str) -> bool:
    """Whether it is a finite number above 0."""
    try:
        return 0 < float(text) < inf
    except ValueError:
        return False
