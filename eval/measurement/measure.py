"""Measuring drafters on one suite: their speculation interleaved with one common baseline over the same prompts."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from ...heads.base import DraftBatch, DraftHead
from ...heads.drafter import Drafter
from ...heads.target import Target
from ..decoding.draft_setting import DraftSetting
from ..suites.prompts import FailedPrompt, Suite
from .bandwidth import cache_bytes
from .batches import MeasuredBatch
from .breakdown import (
    acceptance_by,
    asked_as_trained,
    beyond_training,
    by_domain,
    by_turn,
    context_label,
    draft_vocabulary,
    segment_label,
)
from .config import MeasureConfig
from .disturbance import disturbance, step_medians
from .lossless import LosslessReport, compare_texts
from .metrics import expected_acceptance
from .passes import measure_batches
from .result import ENGINE, Result, TrainingRecord
from .resume import BatchStore
from .runner import Contender, Runner
from .sampling_check import SamplingCheck, check_sampling
from .summary import rounded, unmeasured, with_figures

Row = dict[str, Any]


def measure(
    target: Target,
    drafter: Drafter,
    suite: Suite,
    config: MeasureConfig,
    *,
    name: str,
    training: TrainingRecord | None = None,
    on_batch: Callable[[], object] = lambda: None,
    store: BatchStore | None = None,
) -> tuple[Result, list[Row]]:
    """`measure_all` for one drafter, in the config's setting.

    Args:
        name: of the drafter in the report. training: the head's record of its training.
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


def result_of(
    target: Target,
    contender: Contender,
    suite: Suite,
    config: MeasureConfig,
    batches: Sequence[MeasuredBatch],
    *,
    failed: Sequence[FailedPrompt],
) -> Result:
    """The result of a contender's batches, with its texts checked."""
    drafter, setting, training = contender.drafter, contender.setting, contender.training
    prompts = [prompt for batch in batches for prompt in batch.suite.prompts]
    empty = unmeasured(
        suite,
        config,
        setting,
        engine=ENGINE,
        drafter=contender.name,
        num_prompts=len(prompts),
        failed=[*suite.failed, *sorted(failed, key=lambda prompt: prompt.prompt)],
    )
    length, trained_length = setting.num_draft_tokens, training.max_length if training else None
    by_context = acceptance_by(batches, context_label(trained_length), num_draft_tokens=length)
    is_greedy = config.temperature == 0
    return replace(
        with_figures(empty, target, batches),
        step_medians=step_medians(batches, num_draft_tokens=length),
        disturbance=disturbance(batches),
        draft_vocabulary=draft_vocabulary(drafter, batches),
        by_segment=acceptance_by(batches, segment_label(suite.in_trace), num_draft_tokens=length),
        by_context=by_context,
        by_domain=by_domain(batches, num_draft_tokens=length),
        by_turn=by_turn(batches, num_draft_tokens=length),
        teacher_forced_acceptance_length=teacher_forced_length(target, drafter, batches, setting),
        lossless=greedy_check(batches, contender.runner(target, suite.prompts, config))
        if is_greedy
        else LosslessReport(),
        sampling_check=None if is_greedy else sampled_check(target, prompts, batches, config),
        trained=training,
        beyond_training=beyond_training(training, by_context),
        asked_as_trained=asked_as_trained(training, prompts),
    )


def greedy_check(batches: Sequence[MeasuredBatch], runner: Runner) -> LosslessReport:
    """Compare the first repeat's texts with the baseline's, and prove those that differ."""
    whole, seen = LosslessReport(), set[int]()
    for batch in batches:
        run, numbers = batch.drafted.runs[0], [source.number for source in batch.suite.sources]
        plain = batch.baseline.runs[0].token_ids
        prove = partial(runner.first_unproved, batch.suite.prompts, run, plain)
        whole += compare_texts(plain, run.token_ids, prove, numbers=numbers, seen=seen)
    return whole


def sampled_check(
    target: Target, prompts: list[list[int]], batches: Sequence[MeasuredBatch], config: MeasureConfig
) -> SamplingCheck:
    """Test the texts of all repeats against the target's distribution."""
    drafted = [texts for batch in batches for texts in batch.drafted.texts]
    plain = [texts for batch in batches for texts in batch.baseline.texts]
    return check_sampling(target, prompts, drafted, plain, config.sampling)


@torch.no_grad()
def teacher_forced_length(
    target: Target, drafter: Drafter, batches: Sequence[MeasuredBatch], setting: DraftSetting
) -> float | None:
    """acceptance_length that teacher-forced drafts, as in training, give on the text that decoding wrote.

    It must equal the measured one up to rounds cut by max_new_tokens; a gap means that training and decoding disagree.
    None for trees, for drafters that are not heads, if not all drafts are verified, and if more tokens are drafted than
    `loss_by_depth` has mixes.
    """
    num_draft = setting.num_draft_tokens
    if setting.tree is not None or setting.verify_cost is not None or not isinstance(drafter, DraftHead):
        return None
    if drafter.config.loss_by_depth is not None and num_draft > drafter.num_depths:
        return None
    num_rounds = num_committed = 0
    for batch in batches:
        for prompt, new in zip(batch.suite.prompts, batch.drafted.runs[0].token_ids, strict=True):
            ids = torch.tensor([[*prompt, *new]], device=target.device)
            mask = torch.arange(ids.shape[1], device=target.device)[None] >= len(prompt)
            output = target.read_texts(ids, feature_layers=drafter.feature_layers)
            out = drafter.loss(DraftBatch(ids, mask, output), num_depths=num_draft)
            counted = expected_acceptance(out.starts, out.hits, num_draft_tokens=num_draft)
            num_rounds += counted.num_rounds
            num_committed += counted.num_committed
    return rounded(num_committed / num_rounds) if num_rounds else None


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
