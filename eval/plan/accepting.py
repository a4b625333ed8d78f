"""Measuring the acceptance of chains and trees by decoding the texts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ...base.errors import BadInput
from ...heads.drafting.drafter import Drafter
from ...targets.target import Target
from ..decoding.draft_setting import MOST_NODES, DraftSetting, named_tree
from ..figures.metrics import acceptance
from ..measurement.passes import pass_seed
from ..proof.config import MeasureConfig
from ..proof.runner import Runner
from .prediction import Accepted


def named_trees(specs: Sequence[str], target: Target, drafter: Drafter) -> list[DraftSetting]:
    """Trees by name and number of nodes, `dynamic:16`.

    Raises: BadInput on an unknown name or number, and on a drafter that drafts chains only.
    """
    settings = []
    for spec in specs:
        tree = named_tree("dynamic", target, drafter, num_nodes=parse_tree(spec))
        assert tree is not None
        settings.append(DraftSetting(spec, tree.depth, tree))
    return settings


def parse_tree(spec: str) -> int:
    """The number of nodes of `dynamic:16`. Raises BadInput on another name or number."""
    name, _, number = spec.partition(":")
    if name != "dynamic" or not number.isdecimal() or not 1 <= int(number) <= MOST_NODES:
        raise BadInput(f"--tree {spec}: expected dynamic:NODES, of 1 to {MOST_NODES}")
    return int(number)


@torch.no_grad()
def accepted_by(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    settings: Sequence[DraftSetting],
    config: MeasureConfig,
    *,
    on_setting: Callable[[], object] = lambda: None,
) -> list[Accepted]:
    """Decode the prompts once per setting, config.batch_size at a time.

    Acceptance does not depend on that size, except of a hybrid, which asks its head when that pays for all rows."""
    size, accepted = config.batch_size, []
    for setting in settings:
        run = Runner(target, drafter, prompts, replace(config, setting=setting))
        parts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        texts = [run(part, pass_seed(config.seed, number, 0)) for number, part in enumerate(parts)]
        rounds = (round_ for text in texts for round_ in text.rounds)
        counted = acceptance(rounds, num_draft_tokens=setting.num_draft_tokens)
        emitted = [
            [round_.num_emitted[row] for round_ in text.rounds[1:] if round_.num_committed[row]]  # the prefill left out
            for text in texts
            for row in range(len(text.token_ids))
        ]
        accepted.append(Accepted(setting, counted, list(map(len, emitted)), [1 + sum(row) for row in emitted]))
        on_setting()
    return accepted


def evenly(count: int, number: int) -> list[int]:
    """`number` indices (at most `count`) spread evenly over range(count)."""
    number = min(count, number)
    return [i * count // number for i in range(number)]
