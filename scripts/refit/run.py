"""The stages of a run, in order: rows, reading, training, comparison, decision.

Each stage writes its findings into refit.json. A stage whose findings are already there is skipped, so that a killed
run resumes.
"""

import time
from dataclasses import dataclass, replace
from functools import cached_property

from ...configs.errors import BadInput
from ...configs.files import write_text
from ...data_pipelines.traffic import Served, read_traffic, written
from ...heads.loading import release_memory
from ...heads.nn.cpu_kernels import pack_linears
from ...heads.registry import load_head
from ...heads.target import Target
from ..unattended.steps import last_line, start_seconds
from .data import LEAST_HELD_OUT, NEW, OLD, Keyed, Parts, by_turns, mixed, split, validation_of
from .decision import STAYS, decide
from .drift import compare, drift_of
from .foreign import is_foreign, served_temperature
from .journal import Decision, Foreign, Found, Journal, Plan
from .learning import head_of, planned_steps, step_seconds, training_of, write_run
from .page import summary, write
from .reading import Reader, Reading, keep, readings_in
from .session import Session

READING = 0.3  # share of the budget for reading rows, upper limit
LEAST_ROWS = 8  # training rows of new traffic, lower limit
SAFETY = 1.3  # time kept for the comparison, relative to the expected time
SOONEST = 5.0  # seconds kept for loading before it, lower limit


@dataclass
class Work:
    """The rows of a run, and the target that reads them."""

    run: Session
    new: Parts
    old: Parts

    @cached_property
    def target(self) -> Target:
        settings = self.run.settings
        target = Target.load(settings.target, dtype=settings.dtype, device=settings.device)
        pack_linears(target.base)
        return target

    def reader(self, head: str, *, judges: bool = False) -> Reader:
        """What reads rows with a head. Args: judges: as in Reader. Raises BadInput if the head adapts the target."""
        loaded = load_head(head, self.target)
        if loaded.adapts_target:
            raise BadInput(f"--head {head}: it computes with adapters on the target, whose answers would be others")
        return Reader(self.target, loaded, self.run.settings.max_length, judges)

    def release(self) -> None:
        """Frees the target's memory, since training loads its own."""
        self.__dict__.pop("target", None)
        release_memory()

    def read(self, reader: Reader, rows: Keyed, name: str, *, until: float | None = None) -> dict[str, Reading]:
        """The readings of rows, by key. Each is appended to data/NAME, and those that are there are not read again.

        Args: until: second of the budget after which reading stops; None: all rows are read.
        """
        path = self.run.folder / "data" / name
        left = [(key, row) for key, row in rows.items() if key not in readings_in(path)]
        for readings in reader.read(left):
            self.run.check_stop()
            keep(path, readings)
            if until is not None and self.run.clock.used > until:
                break
        return {key: reading for key, reading in readings_in(path).items() if key in rows}

    @property
    def readings(self) -> dict[str, Reading]:
        """The readings with the old head, without rows that could not be read."""
        found = readings_in(self.run.folder / "data" / "readings.jsonl")
        return {key: reading for key, reading in found.items() if not reading.problem}

    def own(self, rows: Keyed) -> Keyed:
        """The rows that were read and whose answers the target wrote; old rows are not tested."""
        found, foreign = self.readings, self.run.journal.foreign
        assert foreign is not None
        own = self.run.journal.own
        return {
            key: row
            for key, row in rows.items()
            if key in found and (key.startswith(OLD) or not is_foreign(found[key].typicality, foreign.served, own))
        }


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
    """Trains the new head, starting from the old one; writes `plan` and `head`.

    Raises: BadInput if there is too little time, or no head at the end; SystemExit after a signal to stop.
    """
    run, journal = work.run, work.run.journal
    if journal.head:
        return
    new, old = work.own(work.new.rest), work.old.rest
    kept = validation_of(new) | validation_of(old)
    validation = [row for key, row in {**new, **old}.items() if key in kept]
    left = [[row for key, row in rows.items() if key not in kept] for rows in (new, old)]
    train = mixed(*left, replay_share=run.settings.replay_share, seed=run.settings.seed)
    if journal.plan is None:
        plan_training(work, train, num_validation=len(validation), num_new=len(left[0]))
    plan = journal.plan
    assert plan is not None
    config = run.folder / "refit.yaml"
    if not config.exists():
        head = work.reader(run.settings.head).head.config
        write_run(run.folder, run.settings, head, plan, train=train, validation=validation)
    work.release()
    words, seconds = ["train", str(config)], max(plan.until - run.clock.used, 0)
    what = f"the head learns on for {plan.max_steps} steps, from {plan.new} new rows and {plan.old} old ones"
    record = run.step(what, words, name="training", seconds=seconds, until=plan.until)
    journal.head = head_of(run.folder / "training")
    if not journal.head:
        raise BadInput(f"the head was not trained in time: {last_line(run.folder / 'logs' / 'training.log')}")
    if record.exit_code and not record.stopped:
        run.say(f"warning: training failed, its best head so far is taken: see {record.log}")
    run.write()


def plan_training(work: Work, train: list[Served], *, num_validation: int, num_new: int) -> None:
    """Writes `plan`: as many steps as there is time for. Raises BadInput if there is too little time."""
    run, journal = work.run, work.run.journal
    reader, row_seconds = work.reader(run.settings.head), journal.row_seconds
    config, row = reader.head.config, typical_row(reader, train)
    step = max(round(step_seconds(work.target, config, run.settings.head, row), 4), 1e-4)
    began = time.monotonic()
    start = start_seconds()
    num_held_out = len(work.own(work.new.held_out)) + len(work.own(work.old.held_out))
    ending = SAFETY * (start + num_held_out * row_seconds) + max(time.monotonic() - began, SOONEST)
    until = run.settings.budget - ending
    steps = planned_steps(
        until - run.clock.used,
        step=step,
        start=start,
        validation_seconds=num_validation * row_seconds,
        num_rows=len(train),
        batch_size=int(str(training_of(config).get("batch_size", 8))),
    )
    journal.plan = Plan(steps, step, num_new, len(train) - num_new, round(until, 1))
    run.write()


def typical_row(reader: Reader, rows: list[Served]) -> list[int]:
    """The token ids of the row of median length among the first LEAST_ROWS rows."""
    samples = sorted((reader.sample(row) for row in rows[:LEAST_ROWS]), key=len)
    return samples[len(samples) // 2].input_ids.tolist()


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
    decision = decide(journal.compared, journal.drift, head=run.settings.head, new_head=journal.head)
    if journal.foreign.origins:
        read, others = journal.foreign.read, len(journal.foreign.origins)
        decision.cautions.append(f"{others} of {read} answers were not this target's, and were left out.")
    if journal.foreign.served is not None and journal.foreign.served >= 1:
        decision.cautions.append("Served at about temperature 1: there, others' answers are hard to tell from its own.")
    journal.decision = decision
    run.write()
