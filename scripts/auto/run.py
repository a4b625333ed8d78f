"""The stages of a run, in order: prompts and machine, answers, choosing, learning, evaluation, plan, decision.

Each stage writes its findings into auto.json. A stage whose findings are already there is skipped, so that a killed run
resumes.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from ...configs.errors import BadInput
from ...eval.measurement.metrics import LEAST_TIMED
from ...eval.report.one_result import counted_words
from ...heads.loading import release_memory
from ...heads.target import Target
from ..unattended.steps import last_line, start_seconds
from . import data
from .answering import answer
from .budget import ANSWERS, MACHINE
from .candidates import OURS, find_candidates
from .choosing import choose, learn
from .evaluation import EXPORTING, ending_seconds, eval_arguments, prompts_within
from .evaluation import decide as decide_by_report
from .halving import LEAST_STEPS
from .journal import Decision, Evaluation, Journal, Measured, SizePlan
from .learning import FITTING
from .machine import MOST_ROWS, Workload, baseline_ms, busy_rows, measure_machine
from .page import summary, write
from .session import Session
from .sizes import plan_arguments, planning_seconds

NO_CANDIDATE = (
    "No head was trained: even with four in five of its drafts accepted, none would be worth it on this machine, with "
    "this target and batch size."
)
LOOKUP_SECONDS = 60.0  # for measuring look-ups if no head can pay, upper limit
DEFAULT_DRAFT_TOKENS = 3  # K in the evaluation of a head without a score


def run_all(run: Session) -> Journal:
    """Runs all stages that are still to do, writes auto.html and prints the summary; returns the finished journal.

    Raises: BadInput on what the user can correct; SystemExit after a signal to stop.
    """
    journal = run.journal
    if journal.decision is None:
        prepare(run)
        if run.machine.able:
            answer(run)
            choose(run)
            learn(run)
        if run.machine.able or run.settings.engine == OURS:
            evaluate(run)
        plan_sizes(run)
        decide(run)
    for line in summary(journal, write(run.folder, journal)):
        run.console.print(line, highlight=False, soft_wrap=True)
    return journal


def prepare(run: Session) -> None:
    """Splits the prompts and measures the machine; writes `split` and `machine` into the journal.

    Raises: BadInput on unusable prompts or targets, and on a budget that is too short.
    """
    journal, settings = run.journal, run.settings
    if journal.machine is not None:
        return
    seconds = MACHINE * settings.budget
    run.say("measuring steps of the target, and rounds with each candidate", seconds=seconds)
    target = Target.load(settings.target, dtype=settings.dtype, device=settings.device)
    if not target.tokenizer.chat_template:
        raise BadInput(f"--target {settings.target}: its tokenizer has no chat template")
    rows = MOST_ROWS if settings.load else settings.batch_size
    counts = data.split_prompts(
        settings.prompts,
        settings.chats,
        run.held_out.parent,
        most_held_out=max(data.MOST_HELD_OUT, LEAST_TIMED * rows),
        seed=settings.seed,
    )
    max_new_tokens = settings.max_new_tokens
    split = data.describe_split(counts, run.held_out, target, max_new_tokens=max_new_tokens)
    text = data.timing_text(run.held_out, target, max_new_tokens=max_new_tokens)
    work = Workload(settings.batch_size, split.context, text, max_new_tokens)
    if settings.load:
        rows, is_served = busy_rows(settings.load, work, partial(baseline_ms, target, work))
        batch = counted_words(rows, "row")
        effect = f"keep {batch} busy" if is_served else f"are more than {batch} can serve without drafts"
        run.say(f"  {settings.load:g} requests per second {effect}")
        work = replace(work, batch_size=rows)
    found: list[Measured] = []

    def report(measured: Measured | None) -> bool:
        """Prints a measured candidate; returns whether to measure the next: there is time, or none may pay so far."""
        run.check_stop()
        if measured is not None:
            found.append(measured)
            run.say(f"  {measured.name}: {measured.out or f'speedup up to {measured.bound:.2f}'}")
        return run.clock.used <= seconds or all(each.out for each in found)

    journal.machine = measure_machine(
        target,
        find_candidates(settings.engine, settings.target),
        work,
        engine=settings.engine,
        start_seconds=start_seconds(),
        report=report,
    )
    del target
    release_memory()
    check_budget(run)
    journal.split = split
    run.keep()
    run.write()


def check_budget(run: Session) -> None:
    """Raises BadInput, naming the smallest sensible budget, if the given one is too short for all stages."""
    if not run.machine.able:
        return
    start, max_new_tokens = run.machine.start_seconds, run.settings.max_new_tokens
    answering = start + data.LEAST_ANSWERS * max_new_tokens * run.machine.baseline_ms / 1000
    fitted = FITTING * min(run.machine.start_tokens, data.LEAST_ANSWERS * max_new_tokens)
    training = [fitted * each.token_seconds + 3 * LEAST_STEPS * each.step_seconds for each in run.machine.able]
    learning = 2 * start + min(training)
    ending = ending_seconds(1, run.machine, engine=run.settings.engine, max_new_tokens=max_new_tokens)
    needed = max(answering / ANSWERS, (answering + learning + ending) / (1 - MACHINE))
    if needed > run.settings.budget:
        minutes = f"{-(-needed // 60):.0f}m"
        raise BadInput(f"--budget: too short for this target here; the least that makes sense is {minutes}")


def evaluate(run: Session) -> None:
    """Measures head and look-ups on as many held-out prompts as there is time for; writes `evaluation` and `sizes`.

    Raises: BadInput if that fails; SystemExit after a signal to stop.
    """
    journal, settings = run.journal, run.settings
    assert journal.split is not None
    if journal.evaluation is not None and journal.evaluation.report:
        return
    chosen, max_new_tokens = journal.chosen, settings.max_new_tokens
    left = max(run.clock.left, 0)
    if chosen is None:
        left = min(LOOKUP_SECONDS, left)
    planning = planning_seconds(settings.budget, engine=settings.engine) if chosen else 0.0
    num_starts = (0 if settings.engine == OURS else EXPORTING) + bool(planning)  # commands after the evaluation
    seconds = left - planning - num_starts * run.machine.start_seconds
    if journal.evaluation is None:
        journal.sizes = SizePlan(planning) if planning else None
        limit = prompts_within(seconds, run.machine, max_new_tokens=max_new_tokens, num_prompts=journal.split.held_out)
        scored = chosen.score.num_draft_tokens if chosen and chosen.score else 0
        journal.evaluation = Evaluation(limit, scored or DEFAULT_DRAFT_TOKENS)
        run.write()
    output, limit = run.folder / "eval", journal.evaluation.num_prompts
    arguments = eval_arguments(
        settings.target,
        chosen.head if chosen else "",
        answers_file(run),
        run.held_out,
        output,
        run.machine,
        limit=limit,
        max_new_tokens=max_new_tokens,
        num_draft_tokens=journal.evaluation.num_draft_tokens,
    )
    measured = "the head and look-ups" if chosen else "look-ups, since no head can pay,"
    what = f"measuring {measured} on {limit} held-out prompts"
    record = run.step(what, arguments, name="eval", seconds=seconds)
    if not (output / "report.json").exists():
        raise BadInput(f"the evaluation failed: {last_line(Path(record.log))}")
    journal.evaluation.report = str(output / "report.json")
    run.write()


def plan_sizes(run: Session) -> None:
    """Plans the chosen head by batch size, if there is time for it. A failure is noted in `sizes`, not raised.

    The plan gets what earlier stages left of the budget, at least the time that was kept for it.
    """
    journal, settings, wanted = run.journal, run.settings, run.journal.sizes
    if wanted is None or wanted.plan or wanted.problem or journal.chosen is None:
        return
    output, num_starts = run.folder / "plan", 1 + (0 if settings.engine == OURS else EXPORTING)
    seconds = max(wanted.seconds, run.clock.left - num_starts * run.machine.start_seconds)
    arguments = plan_arguments(
        settings.target,
        journal.chosen.head,
        run.held_out,
        output,
        run.machine,
        seconds=seconds,
        max_new_tokens=settings.max_new_tokens,
    )
    try:
        record = run.step("K and trees by batch size", arguments, name="plan", seconds=seconds)
        if record.exit_code:
            raise BadInput(last_line(Path(record.log)))
        wanted.plan = str(output / "plan.json")
    except BadInput as error:
        wanted.problem = str(error)
        run.say(f"no plan by batch size: {error}")
    run.write()


def answers_file(run: Session) -> str:
    """The file of the target's answers for look-ups; empty if there is none, or it contains given chats as well."""
    path = run.folder / "data" / "train.jsonl"
    answers = run.journal.answers
    return str(path) if answers is not None and not answers.given and path.is_file() else ""


def decide(run: Session) -> None:
    """Decides what to deploy, and writes `decision`. A head for another engine is exported and checked first."""
    journal, settings = run.journal, run.settings
    head = journal.chosen.head if journal.chosen else ""
    exported, engine = run.folder / "served", settings.engine
    decision = Decision(False, "Do not deploy a head: none can pay here", [], [])
    if journal.evaluation is not None:
        decision = decide_by_report(
            Path(journal.evaluation.report),
            head=head,
            answers=answers_file(run),
            engine=engine,
            exported=str(exported),
            target=settings.target,
        )
    if decision.deploy and engine != OURS:
        try:
            export(run, head, exported)
        except BadInput as error:
            decision.cautions.append(f"It is not exported: {error}")
            decision.commands.clear()
    if not run.machine.able:
        decision.reasons.insert(0, NO_CANDIDATE)
    journal.decision = decision
    run.write()


def export(run: Session, head: str, output: Path) -> None:
    """Exports the head for the engine of the run and checks the export; writes `exported`.

    Raises: BadInput if the head cannot be exported, or the check finds a problem.
    """
    engine, seconds = run.settings.engine, run.machine.start_seconds
    if not output.is_dir():
        arguments = ["export", head, str(output), "--to", engine, "--target", run.settings.target]
        run.step(f"export for {engine}", arguments, name="export", seconds=seconds)
    record = run.step("check of the export", ["check", str(output)], name="check", seconds=seconds)
    if record.exit_code:
        raise BadInput(f"the check found problems: {last_line(Path(record.log))}")
    run.journal.exported = str(output)
