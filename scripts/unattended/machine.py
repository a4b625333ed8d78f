"""The first stages of `headstart auto`: the prompts are split; then what a step of the target takes here, and for each
candidate a round with its drafts and an optimizer step.

Candidates are measured untrained. Their drafts are wrong, but take the same time as those of a trained head. Where the
engine's server has the target's layers, rounds are estimated by its rates.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...base.errors import BadInput
from ...configs.loader import build
from ...data_pipelines.served.reading import ServedTarget
from ...data_pipelines.served.state_server import Gone
from ...engines.export import check_windowed
from ...engines.heads import build_head
from ...engines.servers.setting import OURS
from ...eval.decoding.draft_setting import DraftSetting, chain
from ...eval.decoding.replay import default_steps
from ...eval.drafters.registry import set_window
from ...eval.figures.bandwidth import weight_bytes
from ...eval.figures.metrics import LEAST_TIMED
from ...eval.measurement.disturbance import MOST_OTHERS, ProcessorMeter
from ...eval.measurement.step_times import TimedCell, interpolate, repeated_text
from ...eval.plan.prediction import expected_length
from ...eval.proof.config import MeasureConfig
from ...eval.report.results.drafter_words import drafter_words
from ...eval.suites.prompts import load_suite
from ...heads.base import DraftBatch, DraftHead
from ...heads.start.closed_form import num_fitted
from ...heads.stored.fit import build_skeleton_head
from ...targets.cpu.build import multiplies_bf16
from ...targets.cpu.packing import pack_linears
from ...targets.loading import TargetConfig, load_tokenizer
from ...targets.skeleton import NoSkeleton, load_skeleton
from ...targets.target import Target
from ...train.inputs.config import TrainConfig
from ...train.optim import build_optimizer
from ...train.watching.speed import synchronize
from .candidates import Candidate, find_candidates, is_served
from .held_out import MOST_PROMPTS, split_prompts
from .in_server import server_of
from .running.clock import MACHINE
from .running.journal import Machine, Measured, RoundCost, Split, known
from .running.session import AutoRun, Session, Settings
from .running.steps import start_seconds
from .target_server import TargetServer

MOST_DRAFTED = 5  # tokens; longer chains are not considered
GENEROUS = 0.8  # acceptance rate of every draft assumed for the bound; short trainings seldom reach it
LEAST_GAIN = 1.05  # speedup below which a head is not worth training
# size of a cut vocabulary before there are answers to count: this fraction of the target's, but at least so many tokens
VOCABULARY_FRACTION = 1 / 16
LEAST_VOCABULARY = 1024
TIMED_ROWS = 2  # in the batch of a timed optimizer step


@dataclass(frozen=True)
class TimedWorkload:
    """The served traffic, as far as step times depend on it."""

    context: int  # tokens of a row before the timed rounds
    text: Sequence[int]  # token ids from the traffic, to fill rows with


def split(run: AutoRun) -> Split:
    """Splits the prompts. Raises: BadInput on unusable prompts or targets."""
    settings = run.settings
    is_plain = not load_tokenizer(TargetConfig(path=settings.target)).chat_template
    most = max(MOST_PROMPTS, LEAST_TIMED * settings.batch_size)
    counts = split_prompts(settings.prompts, run.data, most=most, seed=settings.seed, is_plain=is_plain)
    workload(run, without_weights(settings))  # refuses prompts that do not fit
    return Split(*counts)


def without_weights(settings: Settings) -> Target:
    """The target for its tokenizer and its sizes; with weights if it cannot be built without."""
    try:
        return load_skeleton(TargetConfig(path=settings.target))
    except NoSkeleton:
        return Target.load(settings.target, dtype=settings.dtype)


def measure(run: AutoRun, server: TargetServer) -> Machine:
    """Measures the machine, where the server gives states without the target's layers."""
    size, held_out = run.settings.batch_size, known(run.journal.split).held_out
    if server_of(run) is None and held_out < LEAST_TIMED * size:
        few = f"{held_out} prompts are held out, fewer than the {LEAST_TIMED} batches that an interval needs"
        run.say(f"warning: --batch-size {size}: {few}: no gain can be proved")
    run.say("measuring steps of the target, and rounds with each candidate", seconds=MACHINE * run.settings.budget)
    machine = server.reading(partial(measure_machine, run))
    if not machine.able:
        server.close()  # nothing is asked of it
    return machine


def workload(run: AutoRun, target: Target) -> TimedWorkload:
    """What serving the held-out prompts is like. Raises: BadInput if too few of them fit the target."""
    max_new_tokens = run.settings.max_new_tokens
    suite = load_suite(run.data / "held_out.jsonl", target, max_new_tokens=max_new_tokens)
    if len(suite.prompts) < LEAST_TIMED:
        failed = suite.failed[0]
        usable = f"only {len(suite.prompts)} held-out prompts are usable, at least {LEAST_TIMED} are needed"
        raise BadInput(f"--prompts: {usable}: {failed.row}: {failed.reason}")
    context = round(statistics.median(map(len, suite.prompts))) + max_new_tokens // 2
    return TimedWorkload(context, [token for prompt in suite.prompts for token in prompt])


def measure_machine(run: AutoRun, target: Target) -> Machine:
    """Measures the baseline and the candidates in their order, as many as there is time for, and one that may pay."""
    until, work = run.clock.used + MACHINE * run.settings.budget, workload(run, target)
    try:
        skeleton = load_skeleton(TargetConfig(path=target.name))
    except NoSkeleton:
        skeleton = None
    if isinstance(target, ServedTarget):
        rows = run.settings.concurrency[0]
        step_ms, prefill_ms = 1000 * rows / known(server_of(run)).tokens_per_second[0], 0.0
        costs_of = partial(served_costs, known(skeleton), num_rows=rows, step_seconds=step_ms / 1000)
    else:
        cell = timed_cell(run, target, work)
        for is_warm in (False, True):
            cell.run(reads_again=is_warm)
        step_ms, prefill_ms = cell.baseline.round_ms, cell.plain[-1].prefill_ms
        costs_of = partial(round_costs, run, target, work)
    measured, meter = list[Measured](), ProcessorMeter()
    for candidate in find_candidates(run.settings.engine.name):
        if run.clock.used > until and any(not earlier.out for earlier in measured):
            measured.append(Measured(candidate.name, out="there was no time to measure it"))
            continue
        with meter:
            speed = measure_candidate(run, target, skeleton, candidate, work, costs_of)
        run.say(f"  {drafter_words(speed.name)}: {speed.out or f'speedup up to {speed.bound:.2f}'}")
        measured.append(speed)
    others = 0.0 if isinstance(target, ServedTarget) else meter.others() or 0.0  # beside it the server works
    if others > MOST_OTHERS:
        run.say(f"warning: other processes took {others:.0%} of the processor: a plan from such times may be far off")
    return Machine(
        round(step_ms, 3),
        str(target.dtype).removeprefix("torch."),
        start_seconds=round(start_seconds(run.check_stop), 1),
        start_tokens=num_fitted(target.hidden_size),
        candidates=measured,
        load_seconds=round(run.load_seconds, 1),
        prefill_ms=round(prefill_ms, 3),
    )


def timed_cell(
    run: AutoRun,
    target: Target,
    work: TimedWorkload,
    head: DraftHead | None = None,
    settings: Sequence[DraftSetting] = (),
) -> TimedCell:
    """What times baseline steps, and rounds of a head, for this workload."""
    return TimedCell(
        target,
        head,
        settings,
        MeasureConfig(steps=default_steps(target.device)),
        batch_size=run.settings.batch_size,
        context=work.context,
        text=work.text,
        on_round=run.check_stop,
    )


def measure_candidate(
    run: AutoRun,
    target: Target,
    skeleton: Target | None,
    candidate: Candidate,
    work: TimedWorkload,
    costs_of: Callable[[DraftHead, float], list[RoundCost]],
) -> Measured:
    """Measures one candidate. `out` says why it is excluded: it does not fit the target or the engine, or cannot pay.

    Args: skeleton: the target without weights; None if there is none. costs_of: of a head's rounds, told the seconds in
        which the target reads a token.
    """
    run.check_stop()
    name, engine, window = candidate.name, run.settings.engine.name, run.settings.draft_window
    if not is_served(candidate, engine, target.name):
        loading = "no engine loads" if engine == OURS else f"{engine} does not load"
        return Measured(name, out=f"{loading} heads of this family with this target")
    if isinstance(target, ServedTarget) and candidate.head.reads_layers:
        return Measured(name, out="it reads the target's layers, which are in the server")
    try:
        if skeleton is not None and build_skeleton_head(candidate.head, skeleton).adapts_target:
            raise BadInput("it changes the target's weights, and with them the text")
        config = candidate.with_vocabulary(assumed_vocabulary(target)).head
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        head = build_head(config, target, draft_token_ids=ids)
        if window:
            set_window(head, window)
            if engine != OURS:
                check_windowed(head.method, head.config.as_dict(), window, to=engine)
        parameters = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
        row_length = work.context + run.settings.max_new_tokens // 2
        step, token = measure_step(run, target, head, candidate.train, work.text, row_length=row_length)
        costs = costs_of(head, token)
    except Gone:
        raise
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


def round_costs(
    run: AutoRun, target: Target, work: TimedWorkload, head: DraftHead, token_seconds: float
) -> list[RoundCost]:
    """Costs of rounds as measured here, relative to the baseline. Args: token_seconds: as of `served_costs`."""
    # in the target's dtype and by the kernels of the machine, as `load_head` returns heads
    head = head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    head.pack()
    cell = timed_cell(run, target, work, head, [chain(length) for length in lengths(head)])
    cell.run()
    base = cell.baseline.round_ms
    return [RoundCost(time.num_draft_tokens, round(time.round_ms / base, 4)) for time in cell.rounds]


def served_costs(
    skeleton: Target, head: DraftHead, token_seconds: float, *, num_rows: int, step_seconds: float
) -> list[RoundCost]:
    """Estimated costs of rounds in a server, which is limited by reading weights: a pass of the head takes as much of a
    step as its weights are of those that the step reads, and a token that is verified as long as one of a prompt. Of a
    mixture of experts, the tokens that are verified wake more of them than a step does, whose weights are read too.

    Args: token_seconds: of a prompt, in the server. num_rows, step_seconds: of a step without drafts."""
    num_weights = sum(parameter.numel() for parameter in head.parameters())
    if not any(len(parameter) == head.num_drafted for parameter in head.parameters() if parameter.ndim):
        num_weights += skeleton.output_layer.weight.numel()  # it has no output layer of its own
    read = weight_bytes(skeleton, num_tokens=num_rows)  # by a step without drafts
    drafting = num_weights * skeleton.dtype.itemsize / read
    verifying = num_rows * token_seconds / step_seconds
    passes = {length: 1 if head.max_draft_tokens else length for length in lengths(head)}
    reading = {k: weight_bytes(skeleton, num_tokens=num_rows * (k + 1)) / read for k in passes}
    return [RoundCost(k, round(reading[k] + num * drafting + k * verifying, 4)) for k, num in passes.items()]


def lengths(head: DraftHead) -> list[int]:
    """The shortest chain, the longest one and one in between."""
    longest = min(head.max_draft_tokens or max(head.num_depths, head.default_draft_tokens), MOST_DRAFTED)
    return sorted({1, (longest + 1) // 2, longest})


def predict_length(rates: Sequence[float | None], costs: Sequence[RoundCost]) -> tuple[int, float]:
    """The chain length with the highest predicted speedup, the shortest of equal ones, and that speedup.

    Lengths go up to the longest measured one; between measured ones, costs are interpolated. The speedup of rows that
    are all busy is that of `steady_speedup`.

    Args: rates: acceptance rate by draft position, the last one for all further positions; None (never reached) is 0.
    """
    reached, steps = [rate or 0.0 for rate in rates], [(cost.num_draft_tokens, cost.steps) for cost in costs]
    longest = max(num_draft_tokens for num_draft_tokens, _ in steps)
    speedups = {k: round(expected_length(reached, k) / interpolate(steps, k), 4) for k in range(1, longest + 1)}
    best = max(speedups, key=lambda k: (speedups[k], -k))
    return best, speedups[best]


def measure_step(
    run: Session[Any, Any],
    target: Target,
    head: DraftHead,
    train: dict[str, Any],
    text: Sequence[int],
    *,
    row_length: int,
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
    run.check_stop()
    started = time.perf_counter()
    reading = forward_backward(target, head, rows)
    batch_seconds = time.perf_counter() - started
    run.check_stop()
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
