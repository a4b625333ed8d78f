"""A training run, from what it begins with to the head that it leaves."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..data_pipelines.loader import BatchPlan
from .config import RunConfig
from .loop import Loop
from .start import Start, find_inputs, set_up
from .stopping import Stopping
from .tracking import Tracker
from .validation import Validation


def train(run: RunConfig, *, console: Console | None = None) -> Path:
    """Train a head as the config says, from its last checkpoint if the run folder has one; returns the head's folder.

    Raises: BadInput on anything the user can mend, before the run folder is touched; SystemExit with a signal's exit
    code after SIGTERM or SIGINT, with a checkpoint of the step that was under way.
    """
    console = console or Console(stderr=True)
    folder = Path(run.train.output_dir)
    start = find_inputs(run, folder, console)
    run = start.run
    if (folder / "final").is_dir():
        console.print(f"{folder} holds this run, finished; nothing to do (another train.output_dir starts anew)")
        return folder / "final"
    backend = set_up(run, start, folder)
    is_main = start.accelerator.is_main_process
    say = console.print if is_main else lambda *_: None
    ranks = {"num_ranks": start.accelerator.num_processes, "rank": start.accelerator.process_index}
    plan = start.data.plan(batch_size=run.train.batch_size, seed=run.train.seed, **ranks)
    say(
        f"{run.head.type}: {start.num_parameters:,} parameters on {start.target.name}; {len(start.data.samples)} rows, "
        f"{run.data.layout}, {plan.padding():.0%} padding; steps from {start.first_step}"
    )
    steps = {"num_steps": run.train.max_steps, "first_step": start.first_step}
    with Stopping() as stopping, Tracker(folder, **steps, is_main=is_main, console=console) as tracker:
        tracker.start(run)
        loop = Loop(run.train, backend, start.target, stopping)
        count, is_over, measured = take_steps(run, start, loop, plan, tracker, folder, say)
    if not is_over:
        why = f"{stopping.received.name}: " if stopping.received else ""
        say(f"{why}stopped at step {count} of {run.train.max_steps}; the same command goes on from there")
        if loop.should_stop:
            raise SystemExit(stopping.exit_code)
        return folder
    loop.write_head(folder / "final", {**start.record, "steps": count, "validation": measured})
    best = start.best
    if best.step:
        early = f"no better validation in {best.waited}: ended at step {count}; " if count < run.train.max_steps else ""
        say(f"{early}best acceptance length {best.acceptance_length} at step {best.step}, in {folder / 'best'}")
    say(f"head written to {folder / 'final'}")
    return folder / "final"


def take_steps(
    run: RunConfig,
    start: Start,
    loop: Loop,
    plan: BatchPlan,
    tracker: Tracker,
    folder: Path,
    say: Callable[[str], object],
) -> tuple[int, bool, dict[str, Any] | None]:
    """The loop, with its validations and checkpoints.

    Returns: steps taken in all, whether the run is over (not stopped before its end), and the last validation.
    """
    config, first_step, best, measured = run.train, start.first_step, start.best, None
    last_step = min(config.max_steps, config.stop_at_step or config.max_steps)
    rows = start.data.validation
    validation = Validation(config, loop.backend, start.target, rows) if rows else None
    per_step = config.accumulation
    batches = start.data.batches(plan, range(first_step * per_step, last_step * per_step))
    count, is_over = first_step, False
    for step in range(first_step, last_step):
        row = loop.step(step, batches)
        count = step + 1
        is_last = count == last_step or loop.should_stop
        if count % config.log_every == 0 or is_last:
            row["epoch"] = round(plan.epoch(count * per_step), 4)
            tracker.log(row, figures=f"loss {row['loss']:.4f}")
        if validation and (is_due(count, config.validate_every) or count == config.max_steps):
            measured = validation.measure()
            tracker.log({"step": count, "validation": measured})
            say(f"step {count}: loss {row['loss']:.4f}, {in_words(measured)}")
            if best.take(count, measured["acceptance_length"]):
                loop.write_head(folder / "best", {**start.record, "steps": count, "validation": measured})
            is_over = 0 < config.patience <= best.waited
        is_over = is_over or count == config.max_steps
        if is_due(count, config.checkpoint_every) or (is_last and not is_over):
            loop.save(folder / "checkpoints", step=count, best=best)
        if is_last or is_over:
            break
    return count, is_over, measured


def in_words(measured: Mapping[str, Any]) -> str:
    """A validation in a line."""
    said = f"acceptance length {measured['acceptance_length']} taught"
    return f"{said}, {measured['decoded']['acceptance_length']} decoded" if "decoded" in measured else said


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
