"""The stages of `headstart refit`: rows, reading, training, how far to go from the old head, comparison, decision."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ...configs.errors import BadInput
from ...configs.files import write_text
from ...data_pipelines.storage.samples import Sample
from ...data_pipelines.traffic import ServedChat, as_json_lines
from ...eval.measurement.metrics import LEAST_TIMED
from ...heads.registry import start_head
from .clock import READING
from .comparing import (
    SHARES,
    STAYS,
    best_share,
    compare_by_domain,
    coverage_cautions,
    decide_between,
    drift_of,
    head_between,
    is_enough,
    share_of,
    write_between,
)
from .foreign import OwnAnswers, is_foreign, served_temperature
from .held_out import NEW, OLD, Keyed, by_turns, mixed
from .journal import Compared, Decision, DriftPart, Foreign, Found, Share, TrainingPlan, known
from .machine import measure_step, ready
from .reading import READINGS, RefitRun, RowReader
from .session import Stage
from .steps import start_seconds
from .training import Pace, grown_vocabulary, head_in, planned_steps, training_of, write_refit

LEAST_ROWS = 8  # training rows of new traffic, lower limit
ENDING = 1.3  # time kept for what follows the training, relative to the expected time
TIMED = 16  # rows that are read to time it
SOONEST = 5.0  # seconds kept for loading before it, lower limit


def find_rows(run: RefitRun) -> Found:
    """What is in the files, of which conversations are held out."""
    new, old = run.sides
    traffic, sizes = run.traffic, (len(new.held_out), len(old.held_out))
    rows = Found(len(traffic.rows), len(run.replay), *sizes, traffic.repeated, traffic.unread)
    run.say(f"{rows.new} answered conversations, {sizes[0]} held out; of {rows.old} old ones {sizes[1]}")
    for reason, count in list(rows.unread.items())[:3]:
        run.say(f"  {count} rows are left out: {reason}")
    return rows


def end_of_reading(run: RefitRun) -> float:
    """The second of the budget at which reading ends; from here on the folder is kept.

    Raises: BadInput if target or head cannot be loaded, or the head adapts the target.
    """
    if run.reader.head.adapts_target:
        head = run.settings.head
        raise BadInput(f"--head {head}: it computes with adapters on the target, whose answers would be others")
    run.keep()
    return run.clock.used + READING * run.settings.budget


def answer_itself(run: RefitRun) -> list[OwnAnswers]:
    """The typicality of answers that the target writes itself, for comparison."""
    seconds = run.left_until(run.journal.reading_until)
    run.say("target and head read the answers; the target writes some itself", seconds=seconds)
    asked = list(run.sides[0].rest.values())
    return run.reader.own_answers(asked, seed=run.settings.seed, check_stop=run.check_stop)


def read(run: RefitRun) -> Foreign:
    """Target and head read the rows; which answers are others'."""
    journal, (new, old) = run.journal, run.sides
    rows = by_turns(new.held_out, new.rest, old.held_out)
    readings = run.read(replace(run.reader, judges=True), rows, READINGS, until=journal.reading_until)
    served = {**new.held_out, **new.rest}
    judged = {key: reading.typicality for key, reading in readings.items() if key in served and not reading.problem}
    temperature = served_temperature([typicality for typicality in judged.values() if len(typicality) > 1])
    origins = [
        served[key].origin for key, typicality in judged.items() if is_foreign(typicality, temperature, journal.own)
    ]
    refused = Counter(reading.problem for reading in readings.values() if reading.problem)
    thresholds = {str(answers.temperature): round(answers.threshold, 2) for answers in journal.own}
    late = len(served.keys() - readings.keys())
    about = "" if temperature is None else f", at about temperature {temperature}"
    run.say(f"  {len(origins)} answers are not this target's; {len(judged) - len(origins)} are{about}")
    return Foreign(temperature, thresholds, len(judged), late, dict(refused), sorted(origins))


def drift(run: RefitRun) -> list[DriftPart]:
    """How well the old head drafts both sides, by domain and week."""
    sides = zip((NEW, OLD), run.sides, strict=True)
    return [
        part for side, rows in sides for part in drift_of(side, run.own({**rows.held_out, **rows.rest}), run.readings)
    ]


def refuse_few(run: RefitRun) -> Decision | None:
    """The decision that the old head stays, if too few of the answers are the target's; None: there are enough."""
    new, others = run.sides[0], len(known(run.journal.foreign).origins)
    held_out, rest = len(run.own(new.held_out)), len(run.own(new.rest))
    if held_out >= LEAST_TIMED and rest >= LEAST_ROWS:
        return None
    own = held_out + rest
    why = f"{own} of {own + others} answers that were read are this target's: too few to learn from."
    more = "Is it the target that served them?" if others > own else "Give it more traffic or time."
    return Decision(False, STAYS, [f"{why} {more}"], [])


def training_rows(run: RefitRun) -> tuple[list[ServedChat], int]:
    """The rows of the training, shuffled, and how many of them are new ones."""
    new, old = run.sides
    learnt = [[row for key, row in rows.items() if key not in run.validation] for rows in (run.own(new.rest), old.rest)]
    rows = mixed(*learnt, replay_share=run.settings.replay_share, seed=run.settings.seed)
    return rows, len(learnt[0])


def plan_training(run: RefitRun) -> TrainingPlan:
    """As many steps as there is time for; writes `row_seconds` and `head_seconds` into the journal.

    Raises: BadInput if there is too little time.
    """
    journal, reader, (new, old) = run.journal, run.reader, run.sides
    held_out = run.own(new.held_out)
    rows, num_new = training_rows(run)
    journal.row_seconds, journal.head_seconds = paces(reader, dict(list(held_out.items())[:TIMED]))
    samples = [sample for *_, sample in reader.sampled((row.origin, row) for row in rows)[0]]
    ids = grown_vocabulary(reader.head, samples)
    size = None if ids is None else len(ids)
    config = replace(reader.head.config, draft_vocab_size=size)
    row, section = typical_row(samples), training_of(config)
    fresh = start_head(config, run.target, run.settings.head, draft_token_ids=ids)
    step, _ = measure_step(run.target, fresh, section, row, row_length=len(row))
    start = start_seconds()
    num_validation, num_held_out = len(run.validation), len(held_out) + len(run.own(old.held_out))
    expected = start + choosing_seconds(run) + num_held_out * journal.row_seconds
    until = run.settings.budget - ENDING * expected - max(start, SOONEST)
    steps = planned_steps(
        until - run.clock.used,
        Pace(step, start),
        validation_seconds=num_validation * journal.row_seconds,
        num_rows=len(rows),
        batch_size=section["batch_size"],
    )
    more = 0 if size is None else size - reader.head.num_drafted
    if more:
        run.say(f"  the head learns to draft {more} more tokens")
    return TrainingPlan(steps, step, num_new, len(rows) - num_new, round(until, 1), size, more)


def paces(reader: RowReader, rows: Keyed) -> tuple[float, float]:
    """Seconds in which target and head read a row, and those of the head alone. Args: rows: some, to time it."""
    began = time.monotonic()
    forwards = reader.forwards(rows)
    half = time.monotonic()
    count = len(reader.drafted(forwards))
    return round((time.monotonic() - began) / count, 4), round((time.monotonic() - half) / count, 4)


def typical_row(samples: Sequence[Sample]) -> list[int]:
    """The token ids of the row of median length among the first LEAST_ROWS rows."""
    first = sorted(samples[:LEAST_ROWS], key=len)
    return first[len(first) // 2].input_ids.tolist()


def choosing_seconds(run: RefitRun) -> float:
    """Expected seconds in which the heads of `try_shares` read the validation rows."""
    return len(run.validation) * (run.journal.row_seconds + len(SHARES) * run.journal.head_seconds)


def train(run: RefitRun) -> str:
    """Trains a head, starting from the old one; returns its folder.

    Raises: BadInput if there is no head at the end; SystemExit after a signal to stop.
    """
    plan, config = known(run.journal.plan), run.folder / "refit.yaml"
    if not config.exists():
        write_text(run.data / "train.jsonl", as_json_lines(training_rows(run)[0]))
        write_text(run.data / "validation.jsonl", as_json_lines(run.validation.values()))
        write_refit(run.folder, run.settings, run.reader.head.config, plan, validates=bool(run.validation))
    run.release()
    what = f"the head learns on for {plan.max_steps} steps, from {plan.new} new rows and {plan.old} old ones"
    arguments, seconds = ["train", str(config)], run.left_until(plan.until)
    record = run.step(what, arguments, name="training", seconds=seconds, until=plan.until)
    trained = head_in(run.folder / "training", "best", "final")
    if not trained:
        raise BadInput(f"the head was not trained in time: {record.last_line}")
    if record.exit_code and not record.stopped:
        run.say(f"warning: training failed, its best head so far is taken: see {record.log}")
    return trained


def try_shares(run: RefitRun) -> list[Share]:
    """Validation of the old head and of heads between it and the trained one; none if there are too few rows for it.

    Raises: SystemExit after a signal to stop.
    """
    rows = run.validation
    if not is_enough(rows, has_old=bool(run.sides[1].rest)):
        return []
    run.say(f"heads between the old one and the trained one read {len(rows)} rows", seconds=choosing_seconds(run))
    reader, old, trained = run.reader, run.settings.head, run.journal.trained
    forwards = reader.forwards(rows)
    shares = [share_of(0.0, reader.drafted(forwards))]
    for share in SHARES:
        run.check_stop()
        between = replace(reader, head=ready(head_between(old, trained, run.target, share), run.target))
        shares.append(share_of(share, between.drafted(forwards)))
    return shares


def choose_share(run: RefitRun) -> str:
    """The folder of the new head: the best one on validation rows, or the trained one if there was no choice."""
    old, trained = run.settings.head, run.journal.trained
    if not run.journal.shares:
        return trained
    share = best_share(run.journal.shares)
    run.say(f"  the new head is {share:.0%} of the way")
    return str(write_between(old, trained, run.target, share, run.folder / "head"))


def compare_heads(run: RefitRun) -> list[Compared]:
    """Compares both heads on held-out rows, and writes those of the new traffic into data/held_out.jsonl."""
    new, old = (run.own(side.held_out) for side in run.sides)
    seconds = (len(new) + len(old)) * run.journal.row_seconds
    run.say(f"the new head reads {len(new)} held-out answers, and {len(old)} old ones", seconds=seconds)
    after = run.read(run.reader_of(run.journal.head), {**new, **old}, "compared.jsonl")
    write_text(run.data / "held_out.jsonl", as_json_lines(new.values()))
    sides = ((NEW, new), (OLD, old))
    return [part for side, rows in sides if rows for part in compare_by_domain(side, rows, run.readings, after)]


def decide(run: RefitRun) -> Decision:
    """Decides between the old head and the new one."""
    journal, settings, foreign = run.journal, run.settings, known(run.journal.foreign)
    decision = decide_between(journal.compared, head=settings.head, new_head=journal.head, adapter=settings.adapter)
    if not known(journal.plan).more_tokens:
        decision.cautions.extend(coverage_cautions(journal.drift))
    if foreign.origins:
        others = len(foreign.origins)
        decision.cautions.append(f"{others} of {foreign.read} answers were not this target's, and were left out.")
    if foreign.served is not None and foreign.served >= 1:
        decision.cautions.append("Served at about temperature 1: there, others' answers are hard to tell from its own.")
    return decision


REFIT: Sequence[Stage[RefitRun]] = (
    Stage("found", find_rows),
    Stage("reading_until", end_of_reading),
    Stage("own", answer_itself),
    Stage("foreign", read),
    Stage("drift", drift),
    Stage("decision", refuse_few),
    Stage("plan", plan_training),
    Stage("trained", train),
    Stage("shares", try_shares),
    Stage("head", choose_share),
    Stage("compared", compare_heads),
    Stage("decision", decide),
)
