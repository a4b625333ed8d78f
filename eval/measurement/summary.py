"""Making results: from the rounds of both sides."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from ...heads.drafting.trees import SampledChain
from ...targets.target import Target
from ..decoding.draft_setting import DraftSetting
from ..figures.bandwidth import baseline_bandwidth
from ..figures.metrics import (
    Acceptance,
    Observation,
    acceptance,
    calibration,
    rounded,
    speedup_of,
)
from ..figures.repetition import Repetition, TextRepetition, WithoutLoops, text_repetition
from ..proof.config import MeasureConfig
from ..proof.lossless import LosslessReport, compare_texts
from ..proof.runner import Contender, Runner
from ..proof.sampling_check import check_sampling
from ..suites.prompts import FailedPrompt, Suite
from .batches import MeasuredBatch, Side, summed_seconds, timed_seconds, timed_units
from .breakdown import (
    acceptance_by,
    asked_as_trained,
    by_domain,
    by_turn,
    context_label,
    learnt_share,
    segment_label,
    teacher_forced_length,
    vocabulary_coverage,
)
from .disturbance import disturbance, step_medians
from .passes import pass_seed
from .result import LikeTraining, RenderedChats, Result, Timing


def unmeasured(
    suite: Suite,
    config: MeasureConfig,
    setting: DraftSetting,
    *,
    drafter: str,
) -> Result:
    """A result without figures, only with what is measured and how. Args: suite: with the prompts that were decoded."""
    return Result(
        drafter=drafter,
        suite=suite.name,
        suite_digest=suite.digest,
        rendering=RenderedChats(
            suite.chat.system if suite.template_hash else None, suite.variables, suite.template_hash
        ),
        tree=setting.tree_name,
        num_drafted=setting.num_drafted,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        accept=config.accept.name,
        steps=config.steps,
        batch_size=config.batch_size,
        num_draft_tokens=setting.num_draft_tokens,
        verify_cost=setting.verify_cost,
        num_prompts=len(suite.prompts),
        failed=suite.failed,
        max_new_tokens=config.max_new_tokens,
    )


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
    empty = unmeasured(suite, config, setting, drafter=contender.name)
    length, trained_length = setting.num_draft_tokens, training.max_length if training else None
    # where drafts are drawn at random, sampled texts are not the baseline's, though distributed alike
    draws = config.temperature > 0 and isinstance(setting.tree, SampledChain)
    drafted = [texts for batch in batches for texts in batch.drafted.texts]  # of all repeats
    return replace(
        with_figures(empty, target, batches, num_repeats=config.num_repeats),
        failed=[*suite.failed, *sorted(failed, key=lambda prompt: prompt.prompt)],
        step_medians=step_medians(batches),
        disturbance=disturbance(batches),
        draft_vocabulary=vocabulary_coverage(drafter, batches),
        by_segment=acceptance_by(batches, segment_label(suite.in_trace), num_draft_tokens=length),
        by_context=acceptance_by(batches, context_label(trained_length), num_draft_tokens=length),
        by_domain=by_domain(batches, num_draft_tokens=length),
        by_turn=by_turn(batches, num_draft_tokens=length),
        teacher_forced_acceptance_length=teacher_forced_length(target, drafter, batches, setting),
        lossless=LosslessReport() if draws else check_texts(batches, contender.runner(target, suite.prompts, config)),
        sampling_check=check_sampling(target, prompts, drafted, config.sampling) if draws else None,
        trained=training,
        like_training=LikeTraining(learnt_share(training, suite, target), asked_as_trained(training, prompts)),
    )


def with_figures(result: Result, target: Target, batches: Sequence[MeasuredBatch], *, num_repeats: int) -> Result:
    """The result with all figures that follow from the rounds."""
    # greedy repeats count the same rounds: acceptance is taken from the first; sampled ones differ: from all
    counted_runs = 1 if result.temperature == 0 else num_repeats
    rounds = [round_ for batch in batches for round_ in batch.drafted.rounds_of(counted_runs)]
    counted = acceptance(rounds, num_draft_tokens=result.num_draft_tokens)
    # seconds per token and prompt, weighted by the tokens that speculation emitted: equal tokens on both sides
    num_decoded = sum(batch.drafted.decode_tokens for batch in batches)
    base_seconds = sum(batch.seconds[0] for batch in batches)
    spec_seconds = sum(batch.seconds[1] for batch in batches)
    spec_whole = sum(batch.drafted.prefill_seconds for batch in batches) + spec_seconds
    base_whole = sum(batch.baseline.prefill_seconds for batch in batches) + base_seconds
    length = rounded(counted.length)
    speedup, interval = speedup_of(timed_seconds(batches))
    seen = observations(batches, counted_runs, num_draft_tokens=result.num_draft_tokens)
    texts = repetitions(batches, counted_runs)
    return replace(
        result,
        num_prompts=len({number for batch in batches for number in batch.numbers}),
        num_chats=len({chat for batch in batches for chat in batch.chats}),
        num_tokens=sum(
            len(row) for batch in batches for run in batch.drafted.runs[:counted_runs] for row in run.token_ids
        ),
        num_timed=len(seen),
        num_rounds=counted.num_rounds,
        acceptance_length=length,
        acceptance_rate=[rounded(rate) for rate in counted.rate],
        calibration=calibration(rounds, verified=rounded(counted.num_offered / max(1, counted.num_rounds))),
        tokens_per_second=rounded(num_decoded / spec_seconds if spec_seconds else None, 2),
        baseline_tokens_per_second=rounded(num_decoded / base_seconds if base_seconds else None, 2),
        speedup=speedup,
        speedup_ci95=interval,
        observations=seen,
        repetition=Repetition(
            list({text.prompt: text for rows in texts for text in rows}.values()),
            without_loops(batches, texts, counted_runs, num_draft_tokens=result.num_draft_tokens),
        ),
        baseline_bandwidth=baseline_bandwidth(
            target, [(batch.suite.prompts, batch.baseline.runs) for batch in batches]
        ),
        timing=replace(
            timing(batches, length),
            ttft_ms=first_token_ms(batch.drafted for batch in batches),
            baseline_ttft_ms=first_token_ms(batch.baseline for batch in batches),
            end_to_end_speedup=rounded(base_whole / spec_whole if batches else None),
        ),
    )


def check_texts(batches: Sequence[MeasuredBatch], runner: Runner) -> LosslessReport:
    """Compare every text that was timed with the baseline's of that repeat, and prove those that differ; of greedy
    repeats, a prompt's same text counts once."""
    whole, seen = LosslessReport(), set[tuple[int, ...]]()
    for batch in batches:
        prompts, numbers = batch.suite.prompts, [source.number for source in batch.suite.sources]
        for repeat, (run, plain) in enumerate(zip(batch.drafted.runs, batch.baseline.runs, strict=True)):
            seed = pass_seed(runner.config.seed, batch.number, repeat)
            prove = partial(runner.first_unproved, prompts, run, plain.token_ids, seed)
            if runner.config.temperature > 0:
                seen = set()
            whole += compare_texts(plain.token_ids, run.token_ids, prove, numbers=numbers, seen=seen)
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
    others = [batch for batch, rows in zip(batches, not_looping, strict=True) if all(rows)]
    seen = observations(others, counted_runs, num_draft_tokens=num_draft_tokens)
    speedup, interval = speedup_of(timed_seconds(others))
    return WithoutLoops(len(seen), rounded(counted.length), speedup, interval, seen)


def observations(batches: Iterable[MeasuredBatch], counted_runs: int, *, num_draft_tokens: int) -> list[Observation]:
    """What the intervals are computed from, for each of `timed_units`."""
    seen = []
    for unit in timed_units(batches):
        rounds = (round_ for batch in unit for round_ in batch.drafted.rounds_of(counted_runs))
        counted = acceptance(rounds, num_draft_tokens=num_draft_tokens)
        numbers = sorted(number for batch in unit for number in batch.numbers)
        seen.append(Observation(numbers, counted.num_rounds, counted.num_committed, *summed_seconds(unit)))
    return seen


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
