"""Measuring drafters on one suite: their speculation interleaved with one common baseline over the same prompts."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ...heads.drafting.drafter import Drafter
from ...targets.target import Target
from ..figures.bandwidth import cache_bytes
from ..figures.recorded_training import RecordedTraining
from ..proof.config import MeasureConfig
from ..proof.runner import Contender
from ..suites.prompts import Suite
from .batches import MeasuredBatch
from .passes import measure_batches
from .result import Result
from .resume import BatchStore
from .summary import result_of

Row = dict[str, Any]


def measure(
    target: Target,
    drafter: Drafter,
    suite: Suite,
    config: MeasureConfig,
    *,
    name: str,
    training: RecordedTraining | None = None,
    on_batch: Callable[[], object] = lambda: None,
    store: BatchStore | None = None,
) -> tuple[Result, list[Row]]:
    """Measure one drafter, in the config's setting, on a suite of prompts against decoding without drafts.

    Args:
        name: of the drafter in the report. training: the head's record of its training.
        on_batch, store: as in `measure_all`.
    Returns: the figures, and the rows of rounds.jsonl, one per batch, side and repeat.
    """
    contender = Contender(name, drafter, config.setting_for(drafter), training)
    return measure_all(target, [contender], suite, config, on_batch=on_batch, store=store)[0]


def measure_all(
    target: Target,
    contenders: Sequence[Contender],
    suite: Suite,
    config: MeasureConfig,
    *,
    on_batch: Callable[[], object] = lambda: None,
    store: BatchStore | None = None,
) -> list[tuple[Result, list[Row]]]:
    """Measure drafters on a suite against one baseline.

    Within every batch of prompts all sides take turns, a few tokens each, so that drifts of the machine's speed affect
    all of them, and each further drafter costs only its own time. All sides emit the same number of tokens at
    temperature 0. A batch in which a drafter raised an exception is excluded from its figures and listed in `failed`.

    Args:
        config: its `setting` is ignored, as each contender has one.
        on_batch: called after each batch, for a progress bar.
        store: batches found there are not measured again, and new ones are added.

    Returns: for each contender the result, and the rows of rounds.jsonl, one per batch, side and repeat.
    """
    config = replace(config, setting=None)
    for contender in contenders:
        contender.drafter.leave_out(suite.prompts, suite.questions)
    results = []
    size = most_at_once(target, contenders, suite, config)
    for first in range(0, len(contenders), size):
        group = contenders[first : first + size]
        measured = measure_batches(
            target, group, suite, config, on_batch=on_batch if first == 0 else lambda: None, store=store
        )
        for contender, (batches, failed) in zip(group, measured, strict=True):
            result = result_of(target, contender, suite, config, batches, failed=failed)
            results.append((result, raw_rounds(result, batches)))
    return results


def most_at_once(target: Target, contenders: Sequence[Contender], suite: Suite, config: MeasureConfig) -> int:
    """How many drafters to measure together, at least one: each side has its own cache, and on a GPU all caches should
    fit into half of the free memory."""
    if target.device.type != "cuda" or not suite.prompts:
        return sys.maxsize
    longest = max(map(len, suite.prompts)) + config.max_new_tokens
    most_drafted = max(contender.setting.num_drafted for contender in contenders)
    per_side = config.batch_size * (cache_bytes(target, longest) + most_drafted * target.state_bytes)
    return max(1, int(torch.cuda.mem_get_info(target.device)[0] / 2 / per_side) - 1)


def raw_rounds(result: Result, batches: Sequence[MeasuredBatch]) -> list[Row]:
    """A result's rows of rounds.jsonl."""
    keys = ("drafter", "suite", "tree", "temperature", "batch_size", "num_draft_tokens")
    setting = {key: getattr(result, key) for key in keys}
    return [
        {**setting, "batch": batch.number, "side": name, "repeat": repeat, "rounds": list(map(asdict, run.rounds))}
        for batch in batches
        for name, side in (("speculative", batch.drafted), ("baseline", batch.baseline))
        for repeat, run in enumerate(side.runs)
    ]
