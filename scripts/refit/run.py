"""The stages of a run, in order: rows, reading, training, comparison, decision.

Each stage writes its findings into refit.json. A stage whose findings are already there is skipped, so that a killed
run resumes.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from ...configs.errors import BadInput
from ...configs.files import write_text
from ...data_pipelines.storage.samples import Sample
from ...data_pipelines.traffic import Served, read_traffic, written
from ..unattended.steps import last_line, start_seconds
from .between import SHARES, best_share, head_between, is_enough, ready, share_of, write_between
from .data import LEAST_HELD_OUT, NEW, OLD, Keyed, by_turns, mixed, split
from .decision import STAYS, coverage_cautions, decide
from .drift import compare, drift_of
from .foreign import is_foreign, served_temperature
from .journal import Decision, Foreign, Found, Journal, Plan
from .learning import grown_vocabulary, head_of, planned_steps, step_seconds, training_of, write_run
from .page import summary, write
from .reading import Forward, Reader, Reading, readings_in
from .session import Session
from .work import Work

READING = 0.3  # share of the budget for reading rows, upper limit
LEAST_ROWS = 8  # training rows of new traffic, lower limit
SAFETY = 1.3  # time kept for the comparison, relative to the expected time
TIMED = 16  # rows that are read to time it
SOONEST = 5.0  # seconds kept for loading before it, lower limit


def run_all(run: Session) -> Journal:
    """Runs all stages that are still to do, writes refit.html and prints the summary; returns the finished journal.

    Raises: BadInput on what the user can correct; SystemExit after a signal to stop.
    """
    journal = run.journal
    if journal.decision is None:
        work = find_rows(run)
        read(work)
        if journal.decision is None:
            learn(work)
            choose(work)
            conclude(work)
    for line in summary(journal, write(run.folder, journal)):
        run.console.print(line, highlight=False, soft_wrap=True)
    return journal


def find_rows(run: Session) -> Work:
    """Reads the files and holds conversations out, the same in every start; writes `found`."""
    settings = run.settings
    new = read_traffic(settings.traffic)
    old = read_traffic(settings.replay).rows if settings.replay else []
    rows = [replace(row, temperature=settings.temperature or row.temperature) for row in new.rows]
    work = Work(run, *split(rows, old, seed=settings.seed))
    if run.journal.found is None:
        sizes = len(work.new.held_out), len(work.old.held_out)
        found = Found(len(rows), len(old), *sizes, new.repeated, new.unread)
        run.say(f"{found.new} answered conversations, {sizes[0]} held out; of {found.old} old ones {sizes[1]}")
        for reason, count in list(found.unread.items())[:3]:
            run.say(f"  {count} rows are left out: {reason}")
        run.journal.found = found
    return work


def read(work: Work) -> None:
    """Target and head read the rows; writes `own`, `foreign` and `drift`, and a decision if there are too few rows."""
    run, journal = work.run, work.run.journal
    if journal.foreign is not None:
        return
    reader = work.reader(run.settings.head, judges=True)
    run.keep()
    if journal.reading_until is None:
        journal.reading_until = run.clock.used + READING * run.settings.budget
        run.write()
    left = max(journal.reading_until - run.clock.used, 0)
    run.say("target and head read the answers; the target writes some itself", seconds=left)
    rows = by_turns(work.new.held_out, work.new.rest, work.old.held_out)
    if not journal.own:
        asked = list(work.new.rest.values())
        journal.own = reader.own_answers(asked, seed=run.settings.seed, check_stop=run.check_stop)
        run.write()
    before, began = len(readings_in(run.folder / "data" / "readings.jsonl")), time.monotonic()
    found = work.read(reader, rows, "readings.jsonl", until=journal.reading_until)
    if len(found) > before:
        journal.row_seconds = round((time.monotonic() - began) / (len(found) - before), 4)
    journal.foreign = foreign_of(work, found)
    own, named = len(work.own({**work.new.held_out, **work.new.rest})), journal.foreign
    about = "" if named.served is None else f", at about temperature {named.served}"
    run.say(f"  {len(named.origins)} answers are not this target's; {own} are{about}")
    for name, part in ((NEW, work.new), (OLD, work.old)):
        journal.drift += drift_of(name, work.own({**part.held_out, **part.rest}), work.readings)
    few = min(len(work.own(work.new.held_out)) - LEAST_HELD_OUT, len(work.own(work.new.rest)) - LEAST_ROWS)
    if few < 0:
        why = f"{own} of {own + len(named.origins)} answers that were read are this target's: too few to learn from."
        more = "Is it the target that served them?" if len(named.origins) > own else "Give it more traffic or time."
        journal.decision = Decision(False, STAYS, [f"{why} {more}"], [])
    run.write()


def foreign_of(work: Work, found: dict[str, Reading]) -> Foreign:
    """The journal's entry on foreign answers. Args: found: readings by key."""
    journal, rows = work.run.journal, {**work.new.held_out, **work.new.rest}
    read = {key: each.typicality for key, each in found.items() if key in rows and not each.problem}
    served = served_temperature([each for each in read.values() if len(each) > 1])
    origins = [rows[key].origin for key, each in read.items() if is_foreign(each, served, journal.own)]
    refused: dict[str, int] = {}
    for each in found.values():
        if each.problem:
            refused[each.problem] = refused.get(each.problem, 0) + 1
    thresholds = {str(answers.temperature): round(answers.threshold, 2) for answers in journal.own}
    late = len(rows) - sum(key in found for key in rows)
    return Foreign(served, thresholds, journal.own, len(read), late, refused, sorted(origins))


def learn(work: Work) -> None:
    """Trains a head, starting from the old one; writes `plan` and `trained`.

    Raises: BadInput if there is too little time, or no head at the end; SystemExit after a signal to stop.
    """
    run, journal = work.run, work.run.journal
    if journal.trained:
        return
    kept = work.validation
    left = [[row for key, row in rows.items() if key not in kept] for rows in (work.own(work.new.rest), work.old.rest)]
    train = mixed(*left, replay_share=run.settings.replay_share, seed=run.settings.seed)
    if journal.plan is None:
        plan_training(work, train, num_validation=len(kept), num_new=len(left[0]))
    plan = journal.plan
    assert plan is not None
    config = run.folder / "refit.yaml"
    if not config.exists():
        head = work.reader(run.settings.head).head.config
        write_run(run.folder, run.settings, head, plan, train=train, validation=list(kept.values()))
    work.release()
    words, seconds = ["train", str(config)], max(plan.until - run.clock.used, 0)
    what = f"the head learns on for {plan.max_steps} steps, from {plan.new} new rows and {plan.old} old ones"
    record = run.step(what, words, name="training", seconds=seconds, until=plan.until)
    journal.trained = head_of(run.folder / "training")
    if not journal.trained:
        raise BadInput(f"the head was not trained in time: {last_line(run.folder / 'logs' / 'training.log')}")
    if record.exit_code and not record.stopped:
        run.say(f"warning: training failed, its best head so far is taken: see {record.log}")
    run.write()


def plan_training(work: Work, train: list[Served], *, num_validation: int, num_new: int) -> None:
    """Writes `plan`: as many steps as there is time for. Raises BadInput if there is too little time."""
    run, journal = work.run, work.run.journal
    reader = work.reader(run.settings.head)
    some = dict(list(work.own(work.new.held_out).items())[:TIMED])
    journal.row_seconds, journal.head_seconds = paces(reader, some)
    samples = reader.samples(train)
    ids = grown_vocabulary(reader.head, samples)
    config = replace(reader.head.config, draft_vocab_size=None if ids is None else len(ids))
    row = typical_row(samples)
    step = max(round(step_seconds(work.target, config, run.settings.head, row, ids), 4), 1e-4)
    began = time.monotonic()
    start = start_seconds()
    num_held_out = len(work.own(work.new.held_out)) + len(work.own(work.old.held_out))
    choosing = num_validation * (journal.row_seconds + len(SHARES) * journal.head_seconds)
    ending = SAFETY * (start + choosing + num_held_out * journal.row_seconds) + max(time.monotonic() - began, SOONEST)
    until = run.settings.budget - ending
    steps = planned_steps(
        until - run.clock.used,
        step=step,
        start=start,
        validation_seconds=num_validation * journal.row_seconds,
        num_rows=len(train),
        batch_size=int(str(training_of(config).get("batch_size", 8))),
    )
    size = config.draft_vocab_size
    more = 0 if size is None else size - reader.head.num_drafted
    journal.plan = Plan(steps, step, num_new, len(train) - num_new, round(until, 1), size, more)
    if more:
        run.say(f"  the head learns to draft {more} more tokens")
    run.write()


def paces(reader: Reader, rows: Keyed) -> tuple[float, float]:
    """Seconds in which target and head read a row, and those of the head alone. Args: rows: some, to time it."""
    began = time.monotonic()
    forwards = reader.forwards(rows)
    half = time.monotonic()
    count = sum(len(reader.drafted(forward)) for forward in forwards)
    return round((time.monotonic() - began) / count, 4), round((time.monotonic() - half) / count, 4)


def typical_row(samples: Sequence[Sample]) -> list[int]:
    """The token ids of the row of median length among the first LEAST_ROWS rows."""
    first = sorted(samples[:LEAST_ROWS], key=len)
    return first[len(first) // 2].input_ids.tolist()


def choose(work: Work) -> None:
    """Chooses between the old weights and the trained ones on validation rows; writes `shares` and `head`.

    Raises: SystemExit after a signal to stop.
    """
    run, journal = work.run, work.run.journal
    if journal.head:
        return
    old, trained, rows = run.settings.head, journal.trained, work.validation
    if not is_enough(rows, has_old=bool(work.old.rest)):
        journal.head = trained
        run.write()
        return
    seconds = len(rows) * (journal.row_seconds + len(SHARES) * journal.head_seconds)
    run.say(f"heads between the old one and the trained one read {len(rows)} rows", seconds=seconds)
    reader = work.reader(old)
    forwards = reader.forwards(rows)
    journal.shares = [share_of(0.0, rows, each_drafted(reader, forwards))]
    for share in SHARES:
        run.check_stop()
        between = replace(reader, head=ready(head_between(old, trained, work.target, share), work.target))
        journal.shares.append(share_of(share, rows, each_drafted(between, forwards)))
    share = best_share(journal.shares)
    run.say(f"  the new head is {share:.0%} of the way")
    journal.head = str(write_between(old, trained, work.target, share, run.folder / "head"))
    run.write()


def each_drafted(reader: Reader, forwards: Sequence[Forward]) -> list[Reading]:
    """The readings of all rows of some forwards."""
    return [reading for forward in forwards for reading in reader.drafted(forward)]


def conclude(work: Work) -> None:
    """Compares both heads on held-out rows and decides; writes `compared` and `decision`."""
    run, journal = work.run, work.run.journal
    assert journal.foreign is not None
    new, old = work.own(work.new.held_out), work.own(work.old.held_out)
    if not journal.compared:
        seconds = (len(new) + len(old)) * journal.row_seconds
        run.say(f"the new head reads {len(new)} held-out answers, and {len(old)} old ones", seconds=seconds)
        after = work.read(work.reader(journal.head), {**new, **old}, "compared.jsonl")
        for name, rows in ((NEW, new), (OLD, old)):
            journal.compared += compare(name, rows, work.readings, after) if rows else []
        write_text(run.folder / "data" / "held_out.jsonl", written(new.values()))
        run.write()
    decision = decide(journal.compared, head=run.settings.head, new_head=journal.head)
    if journal.plan is not None and not journal.plan.more_tokens:
        decision.cautions.extend(coverage_cautions(journal.drift))
    if journal.foreign.origins:
        read, others = journal.foreign.read, len(journal.foreign.origins)
        decision.cautions.append(f"{others} of {read} answers were not this target's, and were left out.")
    if journal.foreign.served is not None and journal.foreign.served >= 1:
        decision.cautions.append("Served at about temperature 1: there, others' answers are hard to tell from its own.")
    journal.decision = decision
    run.write()
