"""A training run, from its inputs to the trained head."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..base.ending import finishing
from ..base.errors import BadInput, writing_into
from ..base.terminal import PlainConsole
from ..data_pipelines.loader import BatchPlan, TrainingBatch
from .inputs.config import RunConfig
from .loop import Loop, NoBatch
from .start import Start, find_inputs, set_up
from .validation import Validation, ValidationResult
from .watching.speed import limit_of
from .watching.stopping import Stopping, Watchdog
from .watching.tracking import Tracker
from .watching.trend import ADVICE


@dataclass(frozen=True)
class Outcome:
    """Where the steps ended."""

    num_steps: int  # in all
    is_over: bool  # at the run's end, not stopped before
    validation: ValidationResult | None  # the last


def train_head(run: RunConfig, *, console: Console | None = None) -> Path:
    """Train a head as the config says, resuming from the run folder's last checkpoint; returns the head's folder.

    Raises: BadInput on anything the user can fix, before the run folder is touched; SystemExit with a signal's exit
    code after SIGTERM or SIGINT, with a checkpoint of the current step.
    """
    with ExitStack() as holding, writing_into(run.train.output_dir):
        return train_in(Path(run.train.output_dir), run, console or PlainConsole(stderr=True), holding)


def train_in(folder: Path, run: RunConfig, console: Console, holding: ExitStack) -> Path:
    """`train_head`, with the folder held until `holding` ends."""
    deadline = time.monotonic() + (run.train.stop_after or math.inf)
    start = find_inputs(run, folder, console, holding)
    run, config, data, place = start.run, start.run.train, start.data, start.place
    if (folder / "final").is_dir():
        console.print(f"{folder} holds this run, finished; nothing to do (another train.output_dir starts anew)")
        return folder / "final"
    num_parameters = sum(p.numel() for p in start.head.parameters() if p.requires_grad)  # before they are sharded
    backend = set_up(start, folder)
    accelerator, first_step = start.accelerator, start.progress.step
    plan = data.plan(batch_size=config.batch_size, seed=config.seed, num_ranks=place.num_groups, rank=place.group)
    console.print(
        f"{run.head.type}: {num_parameters:,} parameters on {start.target.name}; {len(data.samples)} rows, "
        f"{run.data.layout}, {plan.padding():.0%} padding; steps from {first_step}"
    )
    is_main, num_ranks = accelerator.is_main_process, accelerator.num_processes
    tracker = Tracker(folder, num_steps=config.max_steps, first_step=first_step, is_main=is_main, console=console)
    watchdog = Watchdog(minutes=config.watchdog_minutes, rank=accelerator.process_index, num_ranks=num_ranks)
    with finishing("the step and its checkpoint"), watchdog, Stopping() as stopping, tracker:
        tracker.start(run)
        if data.reader is not None:  # a signal ends the wait for a server that is away
            data.reader.server.is_gone = lambda: stopping.received.name if stopping.received else None
        loop = Loop(
            backend,
            place=place,
            progress=start.progress,
            stopping=stopping,
            watchdog=watchdog,
            deadline=deadline,
            may_lack_batches=data.reader is not None,
        )
        outcome = take_steps(start, loop, plan, tracker, folder, console)
        if data.reader is not None and outcome.num_steps > first_step:
            console.print(limit_of(loop.share_waited()))
    if not outcome.is_over:
        late = "train.stop_after: " if loop.is_late else ""
        why = f"{stopping.received.name}: " if stopping.received else late
        stopped = f"stopped at step {outcome.num_steps} of {config.max_steps}"
        console.print(f"{why}{stopped}; the same command goes on from there")
        if loop.should_stop:
            raise SystemExit(stopping.exit_code)
        return folder
    with watchdog:
        loop.write_head(folder / "final", replace(start.record, steps=outcome.num_steps, validation=outcome.validation))
    best = start.progress.best
    if best.step:
        is_early = outcome.num_steps < config.max_steps
        early = f"no better validation in {best.waited}: ended at step {outcome.num_steps}; " if is_early else ""
        length = f"{best.acceptance_length:.2f} tokens per forward of the target (1 saves nothing, K + 1 is the most)"
        console.print(f"{early}best: {length}, at step {best.step}, in {folder / 'best'}")
    console.print(f"head written to {folder / 'final'}")
    return folder / "final"


def take_steps(start: Start, loop: Loop, plan: BatchPlan, tracker: Tracker, folder: Path, console: Console) -> Outcome:
    """The steps of a run, with its validations and checkpoints."""
    config, best, first_step = start.run.train, start.progress.best, start.progress.step
    count, last_step = first_step, min(config.max_steps, config.stop_at_step or config.max_steps)
    rows = start.data.validation
    validation = Validation(loop.backend, rows, loop.watchdog) if rows else None
    result: ValidationResult | None = None
    loss = math.nan
    is_over = count >= config.max_steps or 0 < config.patience <= best.waited  # then only the head has to be written
    if is_over and validation:
        result = validation.measure()
    steps = learning_steps(start, loop, plan, range(count, last_step), console)
    while not is_over:
        try:
            row = next(steps, None)
        except NoBatch:
            if count > first_step:
                loop.save(folder / "checkpoints", step=count, best=best)
            if not loop.should_stop:
                raise
            return Outcome(count, False, result)
        if row is None:
            break
        count = row["step"]
        if loop.trend.take(count, loss := row["loss"]):
            console.print(f"step {count}: the loss diverges ({loop.trend}): {ADVICE}")
        is_last = count == last_step or loop.should_stop or loop.is_late
        if count % config.log_every == 0 or is_last:
            tracker.log(row, figures=f"loss {loss:.4f}")
        is_planned = is_due(count, config.validate_every) or count == config.max_steps
        if validation and (is_planned or loop.is_late):
            loop.check_finite(count)
            result = validation.measure()
            tracker.log({"step": count, "validation": result.to_json()})
            console.print(f"step {count}: loss {loss:.4f}, {result}")
            if best.take(count, result.taught.acceptance_length, is_due=is_planned):
                loop.write_head(folder / "best", replace(start.record, steps=count, validation=result))
            is_over = 0 < config.patience <= best.waited
        is_over = is_over or count == config.max_steps
        if is_due(count, config.checkpoint_every) or (is_last and not is_over):
            loop.save(folder / "checkpoints", step=count, best=best)
        if is_last or is_over:
            break
    return Outcome(count, is_over, result)


def learning_steps(
    start: Start, loop: Loop, plan: BatchPlan, steps: range, console: Console
) -> Iterator[dict[str, Any]]:
    """Takes the steps, yielding each one's row of metrics.jsonl. Batches without a position to learn are no step: the
    next ones are taken.

    Raises: as `Loop.step`, and BadInput if a whole pass over the data has no position to learn.
    """

    def first_batch(step: int) -> int:
        return (step + loop.num_empty) * loop.config.accumulation

    def batches_from(step: int) -> Iterator[TrainingBatch]:
        return start.data.batches(plan, range(first_batch(step), first_batch(steps.stop)))

    batches = batches_from(steps.start)
    for step in steps:
        begun = plan.epoch(first_batch(step))
        while (row := loop.step(step, batches)) is None:
            if plan.epoch(first_batch(step)) - begun > 1:
                raise BadInput(f"step {step + 1}: no row has a position to learn in a whole pass over the data")
            console.print(f"step {step + 1}: its rows have no position to learn, so the next ones are taken")
            batches = batches_from(step)
        yield {**row, "epoch": round(plan.epoch(first_batch(step + 1)), 4)}


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
