"""The stages of `headstart refit`: logs become rows, the old head is trained on them, and both heads are compared."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from shlex import join
from typing import Any

import torch
from torch import Tensor

from ...base.errors import BadInput
from ...base.files import write_text
from ...data_pipelines.rows.samples import Sample
from ...data_pipelines.rows.traffic import ServedChat, Traffic, as_json_lines, read_traffic
from ...data_pipelines.vocab import count_supervised, coverage, most_frequent, worthwhile_size
from ...engines.heads import head_class, head_record, load_head, start_head
from ...engines.servers.how_to_serve import serving_a_head, under_adapter
from ...eval.plan.budget import SAFETY
from ...eval.report.served_page import read_served
from ...heads.base import DraftHead, HeadConfig
from ...heads.stored.fit import row_share
from ...heads.stored.folder import config_of, read_record
from ...targets.target import Target
from .candidates import TRAINING, find_candidates
from .comparing import as_samples, compare_by_domain, decide_between, draft_rows
from .held_out import NEW, OLD, RowSplits, mixed, split_traffic
from .in_server import ServedPlan, measure_in_server, plan_served, server_of, try_server, without_server
from .machine import measure_step
from .running.clock import EVALUATION, TRAINED
from .running.journal import Compared, Decision, Found, RefitJournal, ServerTrial, TrainingPlan, known
from .running.session import RefitSettings, Session, Stage
from .running.steps import start_seconds
from .target_server import TargetServer
from .training import LEAST_STEPS, WARMUP, Pace, head_in, steps_in, write_run

LEAST_ROWS = 8  # training rows of new traffic, lower limit
ENDING = 1.3  # time kept for what follows the training, relative to the expected time
TIMED = 16  # rows that are read to time it
SOONEST = 5.0  # seconds kept for loading before it, lower limit
SERVED_TOKENS = 128  # of an answer in the engine's server

NUM_VALIDATIONS = 4  # of the training
PATIENCE = 2  # validations without improvement after which it ends
MOST_EPOCHS = 10  # passes over the rows, upper limit
RATE = 0.1  # learning rates, relative to a fresh head's: at those a trained head first loses much of what it knew
MATRIX_RATES = {"eagle3": 0.3}  # Muon's, by family, where it was measured


class RefitRun(Session[RefitSettings, RefitJournal]):
    """A run of `headstart refit`, and its rows."""

    command, journal_type = "headstart refit", RefitJournal

    @cached_property
    def traffic(self) -> Traffic:
        """The new rows."""
        return read_traffic(self.settings.traffic)

    @cached_property
    def old_traffic(self) -> Traffic:
        """The old rows."""
        return read_traffic(self.settings.replay) if self.settings.replay else Traffic([], {}, 0)

    @cached_property
    def sides(self) -> tuple[RowSplits, RowSplits]:
        """The new rows and the old ones, split; the same in every start."""
        return split_traffic(self.traffic.rows, self.old_traffic.rows, seed=self.settings.seed)

    @cached_property
    def rows(self) -> list[ServedChat]:
        """What the head learns from: new rows with old ones among them."""
        new, old = self.sides
        return mixed(new.rest, old.rest, seed=self.settings.seed)

    @property
    def config(self) -> HeadConfig:
        """Of the deployed head."""
        record = read_record(self.settings.head)
        return config_of(record, head_class(record.family).config_class)

    def heads(self) -> list[HeadConfig]:
        """Those that read states of a server. Raises BadInput if the deployed one reads the target's layers."""
        if self.config.reads_layers:
            raise BadInput(f"head {self.config.type} reads the target's layers")
        return [self.config]


# Logs to rows


def find_rows(run: RefitRun) -> Found:
    """Writes the rows of the files into data/: held_out, validation and train; says what they are.

    Raises: BadInput if there are too few, or no head.
    """
    head_record(run.settings.head)  # before a target is loaded
    new, old = run.sides
    if len(new.rest) < LEAST_ROWS:
        raise BadInput(f"--traffic: {len(new.rest)} rows to learn from, {LEAST_ROWS} are the least")
    files = {"held_out": new.held_out, "validation": [*new.validation, *old.validation], "train": run.rows}
    for name, part in files.items():
        write_text(run.data / f"{name}.jsonl", as_json_lines(part))
    traffic, sizes = run.traffic, (len(new.held_out), len(old.held_out))
    found = Found(len(traffic.rows), len(run.old_traffic.rows), *sizes, traffic.repeated, traffic.unread)
    run.say(f"{found.new} answered conversations, {sizes[0]} held out; of {found.old} old ones {sizes[1]}")
    for option, unread in (("--traffic", found.unread), ("--replay", run.old_traffic.unread)):
        for reason, count in list(unread.items())[:3]:
            run.say(f"  {option}: {count} rows are left out: {reason}")
    return found


# The training


def plan_training(run: RefitRun, target: Target) -> TrainingPlan:
    """Times a step and the reading of rows, and plans as many steps as there is time for.

    Raises: BadInput if there is too little time, or the head's answers would be others.
    """
    settings, (new, old) = run.settings, run.sides
    head = load_head(settings.head, target)
    if head.adapts_target:
        raise BadInput(
            f"--head {settings.head}: it computes with adapters on the target, whose answers would be others"
        )
    run.keep()
    held_out = as_samples([*new.held_out, *old.held_out], target, settings.max_length)
    began = time.monotonic()
    timed = len(draft_rows(target, [head, head], held_out[:TIMED], check_stop=run.check_stop))
    row_seconds = (time.monotonic() - began) / max(timed, 1)
    samples = [sample for _, sample in as_samples(run.rows, target, settings.max_length)]
    if len(samples) < LEAST_ROWS:
        raise BadInput(f"--traffic: {len(samples)} rows can be learnt from, {LEAST_ROWS} are the least")
    ids = grown_vocabulary(head, samples)
    size = None if ids is None else len(ids)
    if size is not None and size > head.num_drafted:
        run.say(f"  the head learns to draft {size - head.num_drafted} more tokens")
    config = replace(head.config, draft_vocab_size=size)
    row, section = typical_row(samples), training_of(config)
    fresh = start_head(config, target, settings.head, draft_token_ids=ids)
    step, _ = measure_step(run, target, fresh, section, row, row_length=len(row))
    start = start_seconds(run.check_stop)
    load = run.load_seconds
    until = settings.budget - ENDING * (start + load + len(held_out) * row_seconds) - max(start, SOONEST)
    if serving := server_of(run):
        until -= served_plan(run, serving, seconds=EVALUATION * settings.budget).seconds / SAFETY
    steps = planned_steps(
        until - run.clock.used,
        Pace(step, start + load),
        validation_seconds=(len(new.validation) + len(old.validation)) * row_seconds,
        num_rows=len(run.rows),
        batch_size=section["batch_size"],
    )
    num_new, dtype = len(new.rest), str(target.dtype).removeprefix("torch.")
    return TrainingPlan(steps, step, num_new, len(run.rows) - num_new, round(until, 1), size, row_seconds, dtype)


def typical_row(samples: Sequence[Sample]) -> list[int]:
    """The token ids of the row of median length among the first LEAST_ROWS rows."""
    first = sorted(samples[:LEAST_ROWS], key=len)
    return first[len(first) // 2].input_ids.tolist()


def grown_vocabulary(head: DraftHead, samples: Sequence[Sample]) -> Tensor | None:
    """[Vd] the draft vocabulary with which a head learns on: its own and, if the rows need them, more tokens.

    The size is that of `worthwhile_size`, where that is not more than half of the target's vocabulary.

    Args: samples: the training rows.
    Returns None if the head's own vocabulary is whole.
    """
    if head.vocabulary is None:
        return None
    target, own = head.target, head.vocabulary.to_target.tolist()
    counts = count_supervised(samples, vocab_size=target.vocab_size)
    size, covered = worthwhile_size(counts, own, row_share=row_share(target))
    needs_more = covered is not None and round(coverage(counts, torch.tensor(own)), 4) < covered
    wider = max(size or 0, len(own)) if needs_more else len(own)
    return most_frequent(counts, size=wider, always=own)


def planned_steps(seconds: float, pace: Pace, *, validation_seconds: float, num_rows: int, batch_size: int) -> int:
    """Optimizer steps of a training in that many seconds; `num_rows` rows are read MOST_EPOCHS times at most.

    Args: validation_seconds: seconds of a validation. batch_size: rows per step.
    Raises: BadInput if there is no time for LEAST_STEPS steps.
    """
    validating = NUM_VALIDATIONS * validation_seconds
    steps = steps_in(seconds, pace, validating=validating)
    if steps < LEAST_STEPS:
        missing = (LEAST_STEPS * pace.step + pace.overhead) / TRAINED + validating - seconds
        raise BadInput(f"--budget: too short for this target here; {-(-missing // 60):.0f}m more are the least")
    return min(steps, max(MOST_EPOCHS * num_rows // batch_size, LEAST_STEPS))


def training_of(config: HeadConfig) -> dict[str, Any]:
    """The `train` section with which `headstart auto` trains heads of that family, with lower learning rates."""
    alike = (candidate.train for candidate in find_candidates() if candidate.head.type == config.type)
    section = next(alike, TRAINING)
    rates = {key: RATE * float(value) for key, value in section.items() if key.endswith("learning_rate")}
    rates["matrix_learning_rate"] = MATRIX_RATES.get(config.type, RATE) * float(section["matrix_learning_rate"])
    return {**section, **rates}


def write_config(run: RefitRun) -> Path:
    """Writes refit.yaml, the config of the training, unless it is there; returns its path."""
    path, settings, plan, config = run.folder / "refit.yaml", run.settings, known(run.journal.plan), run.config
    if not path.exists():
        train = {
            **training_of(config),
            "output_dir": str(run.folder / "training"),
            "start_from": settings.head,
            "max_steps": plan.max_steps,
            "warmup_steps": min(WARMUP, plan.max_steps - 1),
            "validate_every": max(plan.max_steps // NUM_VALIDATIONS, 1),
            "patience": PATIENCE,
            "decode_prompts": 0,
        }
        head = {**config.as_dict(), "draft_vocab_size": plan.draft_vocab_size}
        length, seconds = settings.max_length, plan.step_seconds
        write_run(path, run, head=head, train=train, max_length=length, dtype=plan.dtype, step_seconds=seconds)
    return path


def train(run: RefitRun, server: TargetServer) -> str:
    """Trains a head, starting from the old one; returns its folder.

    Raises: BadInput if there is no head at the end.
    """
    plan, config = known(run.journal.plan), write_config(run)
    what = f"the head learns on for {plan.max_steps} steps, from {plan.new} new rows and {plan.old} old ones"
    seconds = run.left_until(plan.until)
    record = server.train(what, ["train", str(config)], name="training", seconds=seconds, until=plan.until)
    trained = head_in(run.folder / "training", "best", "final")
    if not trained:
        raise BadInput(f"the head was not trained in time: {record.last_line}")
    if record.exit_code and not record.stopped:
        run.say(f"warning: training failed, its best head so far is taken: see {record.log}")
    return trained


# The comparison


def compare_heads(run: RefitRun, target: Target) -> list[Compared]:
    """Compares both heads on held-out rows."""
    sides = {NEW: run.sides[0].held_out, OLD: run.sides[1].held_out}
    count = sum(map(len, sides.values()))
    run.say(f"both heads draft {count} held-out answers", seconds=count * known(run.journal.plan).row_seconds)
    heads = [load_head(folder, target) for folder in (run.settings.head, run.journal.trained)]
    compared = []
    for side, rows in sides.items():
        if rows:
            read = as_samples(rows, target, run.settings.max_length)
            compared += compare_by_domain(side, draft_rows(target, heads, read, check_stop=run.check_stop))
    return compared


def served_plan(run: RefitRun, serving: ServerTrial, *, seconds: float) -> ServedPlan:
    """The measurement of both heads in the server that there is time for."""
    held_out = known(run.journal.found).held_out_new
    return plan_served(run, serving, num_drafters=1, most=SERVED_TOKENS, held_out=held_out, seconds=seconds)


def serve_both(run: RefitRun, server: TargetServer) -> str:
    """The new head beside the old one in servers of their own; returns the path of report.json, empty if that fails."""
    server.close()
    serving, left = known(server_of(run)), run.clock.left
    plan = served_plan(run, serving, seconds=left)
    asked = ["--baseline-drafter", f"head:{run.settings.head}", "--limit", str(plan.num_prompts)]
    asked += ["--max-new-tokens", str(SERVED_TOKENS)]
    return measure_in_server(run, serving, [f"head:{run.journal.trained}"], asked, seconds=left)


def decide(run: RefitRun) -> Decision:
    """Decides between the old head and the new one, by what the engine's server did with both where that is known."""
    engine, journal = run.settings.engine, run.journal
    served = read_served(Path(journal.report)).results if journal.report else []
    if not engine.is_ours and not served and known(journal.serving).tokens_per_second:  # its trial went well
        why = known(journal.serving).problem
        return Decision(False, "Do not deploy: the new head could not be measured in the server", [why], [])
    decision = decide_between(journal.compared, served)
    if decision.deploy:
        decision.commands.extend(deploying(run.settings, journal.trained, folder=run.folder))
    if engine.is_ours or served:
        return decision
    return without_server(decision, journal.serving, engine.name)


def deploying(settings: RefitSettings, new_head: str, *, folder: Path) -> list[str]:
    """The command lines that export and serve the new head, and that time both. Args: folder: of the run."""
    engine, adapter = settings.engine, ["--adapter", settings.adapter] if settings.adapter else []
    engines = {} if engine.is_ours else {"engines": [engine.name]}
    serving = serving_a_head(new_head, settings.target, None, "", **engines)
    if serving and engine.args:  # as it was measured
        serving[-1] += f" {engine.args}"
    heads = ["--drafter", f"head:{settings.head}", "--drafter", f"head:{new_head}"]
    files = ["--prompts", str(folder / "data" / "held_out.jsonl"), "--output", str(folder / "eval")]
    timing = join(["headstart", "eval", "--target", settings.target, *adapter, *heads, *files])
    return [*under_adapter(serving, settings.adapter), "# to time both heads in our engine:", timing]


def stages(server: TargetServer) -> list[Stage[RefitRun]]:
    """In their order. Args: server: of the run's target."""
    return [
        Stage("found", find_rows),
        Stage("serving", lambda run: try_server(run, most=SERVED_TOKENS), lambda run: not run.settings.engine.is_ours),
        Stage("plan", lambda run: server.reading(partial(plan_training, run))),
        Stage("trained", lambda run: train(run, server)),
        Stage("compared", lambda run: server.reading(partial(compare_heads, run))),
        Stage("report", lambda run: serve_both(run, server), lambda run: server_of(run) is not None),
        Stage("decision", decide),
    ]
