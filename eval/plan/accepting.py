"""Measuring the acceptance of chains and trees by decoding the texts, or as many of them as there is time for."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ...configs.errors import BadInput
from ...heads.drafter import Drafter
from ...heads.target import Target
from ..decoding import generate
from ..decoding.draft_setting import DraftSetting
from ..measurement.config import MeasureConfig
from ..measurement.metrics import acceptance
from ..measurement.passes import pass_seed
from ..measurement.runner import Runner
from ..measurement.tree_search import NUM_CALIBRATION, SHAPED_TREES, TREE_NAMES, drafts_tree, named_tree
from .prediction import Accepted


def named_trees(
    specs: Sequence[str], target: Target, drafter: Drafter, prompts: Sequence[list[int]], *, max_new_tokens: int
) -> list[DraftSetting]:
    """Trees by name and number of nodes, `static:16`; shaped by what the target writes behind the first prompts.

    Raises: BadInput on an unknown name or number, and on a drafter that drafts chains only.
    """
    names, settings, texts = [name for name in TREE_NAMES if "chain" not in name], [], None
    for spec in specs:
        name, _, number = spec.partition(":")
        if name not in names or not number.isdecimal() or int(number) < 1:
            raise BadInput(f"--tree {spec}: expected NAME:NODES, NAME one of {', '.join(names)}")
        if texts is None and name in SHAPED_TREES and drafts_tree(target, drafter, name):
            first = list(prompts[:NUM_CALIBRATION])
            texts = generate(target, None, first, max_new_tokens=max_new_tokens).token_ids
        how = {"max_new_tokens": max_new_tokens, "num_nodes": int(number), "texts": texts}
        tree = named_tree(name, target, drafter, prompts, **how)
        assert tree is not None
        settings.append(DraftSetting(spec, tree.depth, tree))
    return settings


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
        accepted.append(Accepted(setting, counted, emitted))
        on_setting()
    return accepted


def evenly(count: int, number: int) -> list[int]:
    """`number` indices (at most `count`) spread evenly over range(count)."""
    number = min(count, number)
    return [i * count // number for i in range(number)]


def accepted_within(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    settings: Sequence[DraftSetting],
    config: MeasureConfig,
    *,
    seconds: float,
    batch_seconds: float,
    on_setting: Callable[[], object] = lambda: None,
) -> tuple[list[int], list[Accepted]]:
    """`accepted_by` for as many prompts, spread evenly, as there is time for, at least one batch; returns their indices
    and the acceptance. Args: batch_seconds: estimated time of a batch in all settings."""
    num_batches = -(-len(prompts) // config.batch_size)
    if num_batches * batch_seconds <= seconds:
        chosen = list(range(len(prompts)))
        return chosen, accepted_by(target, drafter, prompts, settings, config, on_setting=on_setting)
    chosen, began = evenly(len(prompts), config.batch_size), time.perf_counter()
    accepted = accepted_by(target, drafter, [prompts[i] for i in chosen], settings, config, on_setting=on_setting)
    used = time.perf_counter() - began
    rest = [i for i in range(len(prompts)) if i not in chosen]
    more = [rest[i] for i in evenly(len(rest), int((seconds - used) / used) * config.batch_size)] if used else rest
    if more:
        further = accepted_by(target, drafter, [prompts[i] for i in more], settings, config)
        accepted = [one + other for one, other in zip(accepted, further, strict=True)]
    return [*chosen, *more], accepted
