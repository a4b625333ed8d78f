"""The first stage of `headstart auto`: what a step of the target takes here, and for each candidate a round with its
drafts and an optimizer step.

Candidates are measured untrained. Their drafts are wrong, but take the same time as those of a trained head.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...configs.errors import BadInput
from ...configs.loader import build
from ...eval.decoding.draft_setting import DraftSetting, chain
from ...eval.decoding.replay import default_steps
from ...eval.drafters.synthetic import expected_length
from ...eval.measurement.config import MeasureConfig
from ...eval.measurement.metrics import LEAST_TIMED
from ...eval.measurement.step_times import StepTable, StepTime, TimedCell, repeated_text
from ...eval.plan.prediction import steady_speedup
from ...eval.report.one_result import counted_words
from ...eval.suites.prompts import load_suite
from ...heads.base import DraftBatch, DraftHead
from ...heads.decoders.cpu.build import multiplies_bf16
from ...heads.decoders.cpu.products import pack_linears
from ...heads.loading import TargetConfig, release_memory
from ...heads.registry import build_head
from ...heads.start.closed_form import num_fitted
from ...heads.target import Target
from ...heads.targets.fit import build_skeleton_head
from ...heads.targets.skeleton import NoSkeleton, load_skeleton
from ...train.config import TrainConfig
from ...train.optim import build_optimizer
from ...train.speed import synchronize
from .candidates import Candidate, find_candidates, is_served
from .clock import MACHINE
from .held_out import MOST_PROMPTS, split_prompts
from .journal import Machine, Measured, RoundCost, Split
from .session import AutoRun
from .steps import start_seconds

MOST_DRAFTED = 5  # tokens; longer chains are not considered
GENEROUS = 0.8  # acceptance rate of every draft assumed for the bound; short trainings seldom reach it
LEAST_GAIN = 1.05  # speedup below which a head is not worth training
# size of a cut vocabulary before there are answers to count: this fraction of the target's, but at least so many tokens
VOCABULARY_FRACTION = 1 / 16
LEAST_VOCABULARY = 1024
MOST_ROWS = 64  # the largest batch that is considered for a load
TIMED_ROWS = 2  # in the batch of a timed optimizer step


@dataclass(frozen=True)
class TimedWorkload:
    """What is served, as far as step times depend on it."""

    batch_size: int
    context: int  # tokens of a row before the timed rounds
    text: Sequence[int]  # token ids from the traffic, to fill rows with
    max_new_tokens: int


def split_and_measure(run: AutoRun) -> Machine:
    """Splits the prompts, writing `split` into the journal, and measures the machine.

    Raises: BadInput on unusable prompts or targets.
    """
    settings = run.settings
    run.say("measuring steps of the target, and rounds with each candidate", seconds=MACHINE * settings.budget)
    target = Target.load(settings.target, dtype=settings.dtype, device=settings.device)
    if not target.tokenizer.chat_template:
        raise BadInput(f"--target {settings.target}: its tokenizer has no chat template")
    machine = measure_machine(run, target, split_workload(run, target))
    del target
    release_memory()
    return machine


def split_workload(run: AutoRun, target: Target) -> TimedWorkload:
    """Splits the prompts, writing `split` into the journal; returns what serving the held-out ones is like.

    Raises: BadInput if there are too few prompts, or too few that fit the target.
    """
    settings, max_new_tokens = run.settings, run.settings.max_new_tokens
    most = max(MOST_PROMPTS, LEAST_TIMED * (MOST_ROWS if settings.load else settings.batch_size))
    counts = split_prompts(settings.prompts, settings.chats, run.data, most=most, seed=settings.seed)
    suite = load_suite(run.data / "held_out.jsonl", target, max_new_tokens=max_new_tokens)
    if len(suite.prompts) < LEAST_TIMED:
        failed = suite.failed[0]
        usable = f"only {len(suite.prompts)} held-out prompts are usable, at least {LEAST_TIMED} are needed"
        raise BadInput(f"--prompts: {usable}: {failed.row}: {failed.reason}")
    context = round(statistics.median(map(len, suite.prompts))) + max_new_tokens // 2
    run.journal.split = Split(*counts, context=context)
    text = [token for prompt in suite.prompts for token in prompt]
    work = TimedWorkload(settings.batch_size, context, text, max_new_tokens)
    if not settings.load:
        return work

    def step_ms(rows: int) -> float:
        cell = timed_cell(target, replace(work, batch_size=rows))
        cell.run()
        return cell.baseline.round_ms

    rows, is_enough = busy_rows(settings.load, max_new_tokens, step_ms)
    batch = counted_words(rows, "row")
    effect = f"keep {batch} busy" if is_enough else f"are more than {batch} can serve without drafts"
    run.say(f"  {settings.load:g} requests per second {effect}")
    return replace(work, batch_size=rows)


def measure_machine(run: AutoRun, target: Target, work: TimedWorkload) -> Machine:
    """Measures the baseline and the candidates in their order, as many as there is time for, and one that may pay."""
    cell = timed_cell(target, work)
    for _ in range(2):
        cell.run()
    try:
        skeleton = load_skeleton(TargetConfig(path=target.name))
    except NoSkeleton:
        skeleton = None
    measured: list[Measured] = []
    for candidate in find_candidates(run.settings.engine):
        run.check_stop()
        is_late = run.clock.used > MACHINE * run.settings.budget
        if is_late and any(not earlier.out for earlier in measured):
            measured.append(Measured(candidate.name, out="there was no time to measure it"))
            continue
        speed = measure_candidate(target, skeleton, candidate, work, engine=run.settings.engine)
        run.say(f"  {speed.name}: {speed.out or f'speedup up to {speed.bound:.2f}'}")
        measured.append(speed)
    return Machine(
        round(cell.baseline.round_ms, 3),
        work.batch_size,
        str(target.dtype).removeprefix("torch."),
        str(target.device),
        start_seconds=round(start_seconds(), 1),
        start_tokens=num_fitted(target.hidden_size),
        candidates=measured,
    )


def timed_cell(
    target: Target, work: TimedWorkload, head: DraftHead | None = None, settings: Sequence[DraftSetting] = ()
) -> TimedCell:
    """What times baseline steps, and rounds of a head, for this workload."""
    how = {"batch_size": work.batch_size, "context": work.context, "text": work.text}
    return TimedCell(target, head, list(settings), MeasureConfig(steps=default_steps(target.device)), **how)


def busy_rows(load: float, num_tokens: int, step_ms: Callable[[int], float]) -> tuple[int, bool]:
    """The batch size that a load leads to without drafts.

    By Little's law, the rows in service are the arrival rate times the seconds in service, and these grow with the
    number of rows.

    Args:
        load: requests per second.
        num_tokens: of each answer.
        step_ms: milliseconds of a step of the target, by number of rows.

    Returns the number of rows, and whether MOST_ROWS rows are enough for the load.
    """
    rows = 1
    while True:
        busy = load * num_tokens * step_ms(rows) / 1000
        if busy <= rows:
            return max(1, round(busy)), True
        if rows == MOST_ROWS:
            return MOST_ROWS, False
        rows *= 2


def measure_candidate(
    target: Target, skeleton: Target | None, candidate: Candidate, work: TimedWorkload, *, engine: str
) -> Measured:
    """Measures one candidate. `out` says why it is excluded: it does not fit the target or the engine, or cannot pay.

    Args: skeleton: the target without weights; None if there is none.
    """
    name = candidate.name
    if not is_served(candidate, engine, target.name):
        return Measured(name, out=f"{engine} does not load heads of this family with this target")
    try:
        if skeleton is not None and build_skeleton_head(candidate.head, skeleton).adapts_target:
            raise BadInput("it changes the target's weights, and with them the text")
        config = candidate.with_vocabulary(assumed_vocabulary(target)).head
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        head = build_head(config, target, draft_token_ids=ids)
        parameters = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
        row_length = work.context + work.max_new_tokens // 2
        step, token = measure_step(target, head, candidate.train, work.text, row_length=row_length)
        costs = round_costs(target, head, work)
    except BadInput as error:
        return Measured(name, out=str(error))
    num_draft_tokens, bound = predict_length([GENEROUS], costs)
    return Measured(
        name,
        parameters=parameters,
        costs=costs,
        bound=bound,
        bound_num_draft_tokens=num_draft_tokens,
        usual_speedup=predict_length([candidate.usual_acceptance], costs)[1],
        step_seconds=step,
        token_seconds=token,
        out=f"even with most of its drafts accepted, the speedup would be {bound:.2f}" if bound < LEAST_GAIN else "",
    )


def assumed_vocabulary(target: Target) -> int | None:
    """Size of a cut draft vocabulary before there are answers to count; None if the target's is hardly larger."""
    size = max(int(target.vocab_size * VOCABULARY_FRACTION), LEAST_VOCABULARY)
    return size if size < target.vocab_size else None


def round_costs(target: Target, head: DraftHead, work: TimedWorkload) -> list[RoundCost]:
    """Costs of rounds with the shortest chain, the longest one and one in between, relative to the baseline."""
    head = ready(head, target)
    longest = min(head.max_draft_tokens or max(head.num_depths, head.default_draft_tokens), MOST_DRAFTED)
    cell = timed_cell(target, work, head, [chain(length) for length in sorted({1, (longest + 1) // 2, longest})])
    cell.run()
    base = cell.baseline.round_ms
    return [RoundCost(time.num_draft_tokens, round(time.round_ms / base, 4)) for time in cell.rounds]


def ready(head: DraftHead, target: Target) -> DraftHead:
    """The head as `load_head` returns heads: in the target's dtype and on its device, by the kernels of the machine."""
    head = head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    head.pack()
    return head


def predict_length(rates: Sequence[float | None], costs: Sequence[RoundCost]) -> tuple[int, float]:
    """The chain length with the highest predicted speedup, the shortest of equal ones, and that speedup.

    Lengths go up to the longest measured one; between measured ones, costs are interpolated (eval/plan).

    Args: rates: acceptance rate by draft position, the last one for all further positions; None (never reached) is 0.
    """

    def time_of(setting: DraftSetting | None, steps: float) -> StepTime:  # a baseline step takes 1 ms
        return StepTime.of(setting, batch_size=1, context=0, verify_ms=steps)

    drafted = [time_of(chain(cost.num_draft_tokens), cost.steps) for cost in costs]
    times, known = StepTable((time_of(None, 1.0), *drafted)), [rate or 0.0 for rate in rates]
    speedups = {
        k: round(steady_speedup(chain(k), expected_length(known, k), times, batch_size=1, context=0), 4)
        for k in range(1, max(cost.num_draft_tokens for cost in costs) + 1)
    }
    best = max(speedups, key=lambda k: (speedups[k], -k))
    return best, speedups[best]


def measure_step(
    target: Target, head: DraftHead, train: dict[str, Any], text: Sequence[int], *, row_length: int
) -> tuple[float, float]:
    """Seconds of an optimizer step (the target's forward, the head's forward and backward, the update), and of the
    target's forward per token.

    A batch of TIMED_ROWS rows is timed and scaled to the configured batch size. The head's weights are changed.

    Args:
        train: the `train` section of a run config.
        text: token ids to fill the rows with, repeated as often as needed.
        row_length: tokens per row.
    """
    pack_linears(target.base)  # as training does
    config = build(TrainConfig, {**train, "output_dir": "", "max_steps": 100})
    optimizer = build_optimizer(head, config)
    tokens = repeated_text(text, 0, TIMED_ROWS * row_length)
    rows = torch.tensor(tokens, device=target.device).view(TIMED_ROWS, row_length)  # [B, T]
    forward_backward(target, head, rows[:1, : min(row_length, 16)])  # warm-up
    started = time.perf_counter()
    reading = forward_backward(target, head, rows)
    batch_seconds = time.perf_counter() - started
    optimizer.step()  # the first one also allocates the optimizer's state
    started = time.perf_counter()
    optimizer.step()
    synchronize(target.device)
    step = batch_seconds * config.batch_size / TIMED_ROWS + time.perf_counter() - started
    return max(round(step, 4), 1e-4), reading / rows.numel()


def forward_backward(target: Target, head: DraftHead, rows: torch.Tensor) -> float:
    """Runs target and head on rows of token ids [B, T], in which all but the first few tokens are supervised.

    Returns the seconds of the target's forward.
    """
    mask = torch.ones_like(rows, dtype=torch.bool)
    mask[:, : min(8, rows.shape[1] // 2)] = False
    head.train()
    started = time.perf_counter()
    batch = DraftBatch(rows, mask, head.read_target(rows))
    synchronize(target.device)
    seconds = time.perf_counter() - started
    in_bf16 = target.dtype == torch.bfloat16 and (target.device.type != "cpu" or multiplies_bf16())
    with torch.autocast(target.device.type, torch.bfloat16) if in_bf16 else nullcontext():
        loss = head.loss(replace(batch, starts=head.training_starts(mask))).loss
    loss.backward()
    synchronize(target.device)
    return seconds
