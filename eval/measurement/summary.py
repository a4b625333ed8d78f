"""Making results: of our own decoding from the rounds of both sides; those of other engines start from `unmeasured`."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from ...heads.drafting import StaticTree, Tree
from ...heads.target import Target
from ..decoding.draft_setting import DraftSetting
from ..suites.prompts import FailedPrompt, Suite
from .bandwidth import baseline_bandwidth
from .batches import MeasuredBatch, Side, summed_seconds, timed_seconds, timed_units
from .breakdown import (
    acceptance_by,
    asked_as_trained,
    beyond_training,
    by_domain,
    by_turn,
    context_label,
    segment_label,
    teacher_forced_length,
    vocabulary_coverage,
)
from .config import MeasureConfig
from .disturbance import disturbance, step_medians
from .lossless import LosslessReport, compare_texts
from .metrics import (
    Acceptance,
    acceptance,
    calibration,
    conventions,
    ratio_and_interval,
    rounded,
    speedup_of,
)
from .repetition import Repetition, TextRepetition, WithoutLoops, text_repetition
from .result import ENGINE, FixedTreeShape, Observation, Result, Timing, TreeLimits
from .runner import Contender, Runner
from .sampling_check import check_sampling


def unmeasured(
    suite: Suite,
    config: MeasureConfig,
    setting: DraftSetting,
    *,
    engine: str,
    drafter: str,
) -> Result:
    """A result without figures, only with what is measured and how. Args: suite: with the prompts that were decoded."""
    return Result(
        engine=engine,
        drafter=drafter,
        suite=suite.name,
        suite_version=suite.version,
        suite_digest=suite.digest,
        system=suite.chat.system if suite.template_hash else None,
        thinking=thinking if isinstance(thinking := suite.variables.get("enable_thinking"), bool) else None,
        chat_template_kwargs=suite.variables,
        template_hash=suite.template_hash,
        tree=setting.tree_name,
        tree_shape=tree_shape(setting.tree),
        num_drafted=setting.num_drafted,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        accept=config.accept.name,
        **config.accept.changed,
        steps=config.steps,
        batch_size=config.batch_size,
        num_draft_tokens=setting.num_draft_tokens,
        verify_cost=setting.verify_cost,
        num_prompts=len(suite.prompts),
        failed=suite.failed,
        max_new_tokens=config.max_new_tokens,
        num_repeats=config.num_repeats,
    )


def tree_shape(tree: Tree | None) -> FixedTreeShape | TreeLimits | None:
    """As the report has it; None for a chain."""
    if isinstance(tree, StaticTree):
        return FixedTreeShape(list(tree.parents))
    return TreeLimits(tree.num_nodes, tree.depth, tree.top_k) if tree else None


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
    empty = unmeasured(suite, config, setting, engine=ENGINE, drafter=contender.name)
    length, trained_length = setting.num_draft_tokens, training.max_length if training else None
    by_context = acceptance_by(batches, context_label(trained_length), num_draft_tokens=length)
    is_greedy = config.temperature == 0
    drafted = [texts for batch in batches for texts in batch.drafted.texts]  # of all repeats
    plain = [texts for batch in batches for texts in batch.baseline.texts]
    return replace(
        with_figures(empty, target, batches),
        failed=[*suite.failed, *sorted(failed, key=lambda prompt: prompt.prompt)],
        step_medians=step_medians(batches, num_draft_tokens=length),
        disturbance=disturbance(batches),
        draft_vocabulary=vocabulary_coverage(drafter, batches),
        by_segment=acceptance_by(batches, segment_label(suite.in_trace), num_draft_tokens=length),
        by_context=by_context,
        by_domain=by_domain(batches, num_draft_tokens=length),
        by_turn=by_turn(batches, num_draft_tokens=length),
        teacher_forced_acceptance_length=teacher_forced_length(target, drafter, batches, setting),
        lossless=greedy_check(batches, contender.runner(target, suite.prompts, config))
        if is_greedy
        else LosslessReport(),
        sampling_check=None if is_greedy else check_sampling(target, prompts, drafted, plain, config.sampling),
        trained=training,
        beyond_training=beyond_training(training, by_context),
        asked_as_trained=asked_as_trained(training, prompts),
    )


def with_figures(result: Result, target: Target, batches: Sequence[MeasuredBatch]) -> Result:
    """The result with all figures that follow from the rounds."""
    # greedy repeats count the same rounds: acceptance is taken from the first; sampled ones differ: from all
    counted_runs = 1 if result.temperature == 0 else result.num_repeats
    rounds = [round_ for batch in batches for round_ in batch.drafted.rounds_of(counted_runs)]
    counted = acceptance(rounds, num_draft_tokens=result.num_draft_tokens)
    # seconds per token and prompt, weighted by the tokens that speculation emitted: equal tokens on both sides
    num_decoded = sum(batch.drafted.decode_tokens for batch in batches)
    base_seconds = sum(batch.seconds[0] for batch in batches)
    spec_seconds = sum(batch.seconds[1] for batch in batches)
    spec_whole = sum(batch.drafted.prefill_seconds for batch in batches) + spec_seconds
    base_whole = sum(batch.baseline.prefill_seconds for batch in batches) + base_seconds
    length = rounded(counted.length)
    seen = observations(batches, counted_runs, num_draft_tokens=result.num_draft_tokens)
    lengths = [unit.num_committed for unit in seen], [unit.num_rounds for unit in seen]
    low, high = ratio_and_interval(*lengths)[1] if seen else (None, None)
    texts = repetitions(batches, counted_runs)
    return replace(
        with_speedup(result, [(unit.baseline_seconds, unit.seconds) for unit in seen]),
        num_prompts=len({number for batch in batches for number in batch.numbers}),
        num_chats=len({source.first for batch in batches for source in batch.suite.sources}),
        num_tokens=sum(
            len(row) for batch in batches for run in batch.drafted.runs[:counted_runs] for row in run.token_ids
        ),
        num_rounds=counted.num_rounds,
        num_committed=counted.num_committed,
        acceptance_length=length,
        acceptance_length_ci95=(rounded(low), rounded(high)),
        acceptance_rate=[rounded(rate) for rate in counted.rate],
        drafts_verified=rounded(counted.num_offered / counted.num_rounds if counted.num_rounds else None),
        calibration=calibration(rounds),
        tokens_per_second=rounded(num_decoded / spec_seconds if spec_seconds else None, 2),
        baseline_tokens_per_second=rounded(num_decoded / base_seconds if base_seconds else None, 2),
        observations=seen,
        repetition=Repetition.of(list({text.prompt: text for rows in texts for text in rows}.values())),
        without_loops=without_loops(batches, texts, counted_runs, num_draft_tokens=result.num_draft_tokens),
        conventions=conventions(counted, num_tokens=num_decoded // result.num_repeats * counted_runs),
        end_to_end_speedup=rounded(base_whole / spec_whole if batches else None),
        ttft_ms=first_token_ms(batch.drafted for batch in batches),
        baseline_ttft_ms=first_token_ms(batch.baseline for batch in batches),
        time_per_output_token_ms=rounded(1000 * spec_seconds / max(1, num_decoded), 3),
        baseline_time_per_output_token_ms=rounded(1000 * base_seconds / max(1, num_decoded), 3),
        baseline_bandwidth=baseline_bandwidth(
            target, [(batch.suite.prompts, batch.baseline.runs) for batch in batches]
        ),
        timing=timing(batches, length),
    )


def greedy_check(batches: Sequence[MeasuredBatch], runner: Runner) -> LosslessReport:
    """Compare every text that was timed with the baseline's, and prove those that differ; a prompt's repeats count once
    where they are the same text."""
    whole, seen = LosslessReport(), set[tuple[int, ...]]()
    for batch in batches:
        plain, numbers = batch.baseline.runs[0].token_ids, [source.number for source in batch.suite.sources]
        for run in batch.drafted.runs:
            prove = partial(runner.first_unproved, batch.suite.prompts, run, plain)
            whole += compare_texts(plain, run.token_ids, prove, numbers=numbers, seen=seen)
    return whole


def repetitions(batches: Iterable[MeasuredBatch], counted_runs: int) -> list[list[TextRepetition]]:
    """For each batch and row, how much its texts repeat themselves."""
    return [
        [
            text_repetition(source.number, texts[:counted_runs])
            for source, texts in zip(batch.suite.sources, batch.drafted.texts, strict=True)
        ]
        for batch in batches
    ]


def without_loops(
    batches: Sequence[MeasuredBatch],
    texts: Sequence[Sequence[TextRepetition]],
    counted_runs: int,
    *,
    num_draft_tokens: int,
) -> WithoutLoops | None:
    """The figures without texts that loop; None if no text loops. The speedup is over batches without any such text, as
    rows are not timed separately."""
    not_looping = [[not text.is_looping for text in rows] for rows in texts]
    if all(map(all, not_looping)):
        return None
    counted = Acceptance.nothing(num_draft_tokens)
    for batch, rows in zip(batches, not_looping, strict=True):
        counted += acceptance(batch.drafted.rounds_of(counted_runs), num_draft_tokens=num_draft_tokens, rows=rows)
    seconds = timed_seconds(batch for batch, rows in zip(batches, not_looping, strict=True) if all(rows))
    speedup, interval = speedup_of(seconds)
    prompts = {text.prompt for rows in texts for text in rows if not text.is_looping}
    return WithoutLoops(len(prompts), len(seconds), rounded(counted.length), speedup, interval)


def observations(batches: Iterable[MeasuredBatch], counted_runs: int, *, num_draft_tokens: int) -> list[Observation]:
    """Of each of `timed_units` what the intervals are computed from."""
    seen = []
    for unit in timed_units(batches):
        rounds = (round_ for batch in unit for round_ in batch.drafted.rounds_of(counted_runs))
        counted = acceptance(rounds, num_draft_tokens=num_draft_tokens)
        numbers = sorted(number for batch in unit for number in batch.numbers)
        seen.append(Observation(numbers, counted.num_rounds, counted.num_committed, *summed_seconds(unit)))
    return seen


def with_speedup(result: Result, seconds: Sequence[tuple[float, float]]) -> Result:
    """The result with its speedups. Args: seconds: baseline and speculative, for equal tokens, per prompt or batch.

    The percentiles are over prompts (batches), interpolated linearly.
    """
    speedup, interval = speedup_of(seconds)
    ratios = torch.tensor([base / spec for base, spec in seconds], dtype=torch.float64)
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    p10, median, p90 = map(rounded, ratios.quantile(shares).tolist() if seconds else [None] * 3)
    return replace(
        result,
        num_timed=len(seconds),
        speedup=speedup,
        speedup_ci95=interval,
        speedup_p10=p10,
        speedup_median=median,
        speedup_p90=p90,
    )


def first_token_ms(sides: Iterable[Side]) -> float | None:
    """The median over batches of the mean over repeats."""
    seconds = [side.prefill_seconds / len(side.runs) for side in sides]
    return rounded(1000 * statistics.median(seconds), 3) if seconds else None


def timing(batches: Sequence[MeasuredBatch], acceptance_length: float | None) -> Timing:
    """The mean milliseconds of a round's parts, and the speedup that follows from them.

    formula_speedup = acceptance_length * baseline_ms / (draft_ms + verify_ms + overhead_ms), as if every round had
    committed the mean. It differs from the measured speedup because max_new_tokens cuts last rounds.
    """
    rounds = [round_ for batch in batches for round_ in batch.drafted.rounds]
    steps = [round_ for batch in batches for round_ in batch.baseline.rounds]
    if not rounds or not steps or acceptance_length is None:
        return Timing()
    whole = 1000 * statistics.fmean(round_.seconds for round_ in rounds)
    draft = 1000 * statistics.fmean(round_.draft_seconds for round_ in rounds)
    verify = 1000 * statistics.fmean(round_.verify_seconds for round_ in rounds)
    baseline = 1000 * statistics.fmean(round_.seconds for round_ in steps)
    return Timing(
        draft_ms=rounded(draft),
        verify_ms=rounded(verify),
        overhead_ms=rounded(whole - draft - verify),
        baseline_ms=rounded(baseline),
        formula_speedup=rounded(acceptance_length * baseline / whole),
    )
