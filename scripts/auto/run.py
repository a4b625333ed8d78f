"""The stages of a run, in order: prompts and machine, answers, choosing, learning, evaluation, decision.

Each stage writes what it found into auto.json; a stage that is there is not run again.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from ...configs.errors import BadInput
from ...eval.measurement.metrics import LEAST_TIMED
from ...eval.report.one_result import counted_words
from ...heads.fit import NoSkeleton, load_skeleton
from ...heads.loading import TargetConfig, release_memory
from ...heads.target import Target
from ..unattended.steps import last_line, start_seconds
from . import data
from .budget import ANSWERS, MACHINE
from .candidates import OURS, find_candidates
from .choosing import choose, learn
from .evaluation import EXPORTING, ending_seconds, evaluate_words, prompts_within
from .evaluation import decide as decision_of
from .halving import LEAST_STEPS
from .journal import Decision, Evaluation, Journal, Measured, SizePlan
from .machine import MOST_ROWS, Workload, baseline_ms, busy_rows, measure_machine
from .page import summary, write
from .session import Session
from .sizes import plan_words, planning_seconds

NO_CANDIDATE = (
    "No head was trained: even with four in five of its drafts accepted, none would be worth it on this machine, with "
    "this target and batch size."
)
FREE_SECONDS = 60.0  # at most, for measuring look-ups where no head can pay


def run_all(run: Session) -> Journal:
    """All stages that are still to do. Raises BadInput on what the user can mend; SystemExit after a signal."""
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
    """Hold prompts out, measure the machine."""
    journal, settings = run.journal, run.settings
    if journal.machine is not None:
        return
    most = MACHINE * settings.budget
    run.say("measuring steps of the target, and rounds with each candidate", seconds=most)
    target = Target.load(settings.target, dtype=settings.dtype, device=settings.device)
    if not target.tokenizer.chat_template:
        raise BadInput(f"--target {settings.target}: its tokenizer has no chat template to ask with")
    rows = MOST_ROWS if settings.load else settings.batch_size
    folder, most_held_out = run.held_out.parent, max(data.MOST_HELD_OUT, LEAST_TIMED * rows)
    counts = data.split_prompts(
        settings.prompts, settings.chats, folder, most_held_out=most_held_out, seed=settings.seed
    )
    new = settings.max_new_tokens
    split = data.describe_split(counts, run.held_out, target, max_new_tokens=new)
    text = data.timing_text(run.held_out, target, max_new_tokens=new)
    work = Workload(settings.batch_size, split.context, text, new)
    if settings.load:
        rows, is_served = busy_rows(settings.load, work, partial(baseline_ms, target, work))
        many = counted_words(rows, "row")
        words = f"keep {many} busy" if is_served else f"are more than {many} can serve without drafts"
        run.say(f"  {settings.load:g} requests per second {words}")
        work = replace(work, batch_size=rows)
    found: list[Measured] = []

    def go_on(measured: Measured | None) -> bool:
        run.go_on()
        if measured is not None:
            found.append(measured)
            verdict = measured.out or f"up to {measured.bound:.2f} times the speed"
            run.say(f"  {measured.name}: {verdict}")
        return run.clock.used <= most or all(each.out for each in found)

    journal.machine = measure_machine(
        target,
        find_candidates(),
        work,
        engine=settings.engine,
        start_seconds=start_seconds(),
        go_on=go_on,
    )
    del target
    release_memory()
    check_budget(run)
    journal.split = split
    run.keep()
    run.write()


def check_budget(run: Session) -> None:
    """Raises BadInput if the rest of the budget is too short for the least of every stage."""
    if not run.machine.able:
        return
    least, new = run.machine.start_seconds, run.settings.max_new_tokens
    answering = least + data.LEAST_ANSWERS * new * run.machine.baseline_ms / 1000
    quickest = min(each.step_seconds for each in run.machine.able)
    learning = 2 * least + 3 * LEAST_STEPS * quickest
    ending = ending_seconds(1, run.machine, engine=run.settings.engine, max_new_tokens=new)
    needed = max(answering / ANSWERS, (answering + learning + ending) / (1 - MACHINE))
    if needed > run.settings.budget:
        minutes = f"{-(-needed // 60):.0f}m"
        raise BadInput(f"--budget: too short for this target here; the least that makes sense is {minutes}")


def answer(run: Session) -> None:
    """The target answers prompts, for its share of the time."""
    journal, settings = run.journal, run.settings
    if journal.answers is not None:
        return
    if journal.answers_until is None:
        journal.answers_until = run.clock.used + ANSWERS * settings.budget
        run.write()
    machine, until = run.machine, journal.answers_until
    words = [
        *("data", "regenerate", "data/regenerate_local.yaml"),
        *(f"sources={run.folder / 'data' / 'prompts.jsonl'}", f"output={run.folder / 'answers'}"),
        *(f"target={settings.target}", f"engine.dtype={machine.dtype}", f"engine.device={machine.device}"),
        *("sampling.temperature=0", f"sampling.max_tokens={settings.max_new_tokens}"),
    ]
    left = max(until - run.clock.used, 0)
    what = "the target answers, at most for its share of the time"
    record = run.step(what, words, name="answers", seconds=left, until=until)
    if not (run.folder / "answers" / "manifest.json").exists():
        raise BadInput(f"the target could not answer: {last_line(Path(record.log))}")
    try:
        model = load_skeleton(TargetConfig(path=settings.target))
    except NoSkeleton:
        model = Target.load(settings.target, dtype=settings.dtype)
    size, ends = model.vocab_size, set(model.eos_token_ids)
    folder, answers = run.folder / "data", run.folder / "answers"
    journal.answers = data.gather(folder, answers, model.tokenizer, vocab_size=size, eos_token_ids=ends)
    for warning in journal.answers.warnings:
        run.say(f"warning: {warning}")
    run.write()


def evaluate(run: Session) -> None:
    """Held-out prompts, as many as the rest of the time allows."""
    journal, settings = run.journal, run.settings
    assert journal.split is not None
    if journal.evaluation is not None and journal.evaluation.report:
        return
    chosen, new = journal.chosen, settings.max_new_tokens
    left = max(run.clock.left, 0) if chosen else min(FREE_SECONDS, max(run.clock.left, 0))
    planning = planning_seconds(settings.budget, engine=settings.engine) if chosen else 0.0
    starts = EXPORTING * (settings.engine != OURS) + bool(planning)
    spare = left - planning - starts * run.machine.start_seconds
    if journal.evaluation is None:
        journal.sizes = SizePlan(planning) if planning else None
        limit = prompts_within(spare, run.machine, max_new_tokens=new, most=journal.split.held_out)
        length = (chosen.score.num_draft_tokens if chosen and chosen.score else 0) or 3
        journal.evaluation = Evaluation(limit, length)
        run.write()
    output, limit = run.folder / "eval", journal.evaluation.num_prompts
    words = evaluate_words(
        *(settings.target, chosen.head if chosen else "", answers_of(run), run.held_out, output, run.machine),
        limit=limit,
        max_new_tokens=new,
        length=journal.evaluation.num_draft_tokens,
    )
    who = "the head" if chosen else "nothing can pay for its training; look-ups"
    record = run.step(f"{who} on {limit} held-out prompts", words, name="eval", seconds=spare)
    if not (output / "report.json").exists():
        raise BadInput(f"the evaluation failed: {last_line(Path(record.log))}")
    journal.evaluation.report = str(output / "report.json")
    run.write()


def plan_sizes(run: Session) -> None:
    """K or tree of the chosen head at several batch sizes. Where that fails, the run has no plan, and says so."""
    journal, settings, wanted = run.journal, run.settings, run.journal.sizes
    if wanted is None or wanted.plan or wanted.problem or journal.chosen is None:
        return
    output, new = run.folder / "plan", settings.max_new_tokens
    words = plan_words(
        *(settings.target, journal.chosen.head, run.held_out, output, run.machine),
        seconds=wanted.seconds,
        max_new_tokens=new,
    )
    try:
        record = run.step("K and trees by batch size", words, name="plan", seconds=wanted.seconds)
        if record.exit_code:
            raise BadInput(last_line(Path(record.log)))
        wanted.plan = str(output / "plan.json")
    except BadInput as error:
        wanted.problem = str(error)
        run.say(f"no plan by batch size: {error}")
    run.write()


def answers_of(run: Session) -> str:
    """The file of answers to prompts that are not held out; empty where there are none, or given chats among them."""
    path = run.folder / "data" / "train.jsonl"
    found = run.journal.answers
    return str(path) if found is not None and not found.given and path.is_file() else ""


def decide(run: Session) -> None:
    """What to do; where a head is to be deployed in another engine, it is exported and checked."""
    journal, settings = run.journal, run.settings
    head = journal.chosen.head if journal.chosen else ""
    served, engine = run.folder / "served", settings.engine
    decision = Decision(False, "Do not deploy a head: none can pay here", [], [])
    if journal.evaluation is not None:
        report = Path(journal.evaluation.report)
        decision = decision_of(
            report,
            head=head,
            answers=answers_of(run),
            engine=engine,
            exported=str(served),
            target=settings.target,
        )
    if decision.deploy and engine != OURS:
        try:
            export(run, head, served)
        except BadInput as error:
            decision.cautions.append(f"It is not exported: {error}")
            decision.commands.clear()
    if not run.machine.able:
        decision.reasons.insert(0, NO_CANDIDATE)
    journal.decision = decision
    run.write()


def export(run: Session, head: str, served: Path) -> None:
    """For the engine named. Raises BadInput if that refuses the head, or the check finds something."""
    engine, starts = run.settings.engine, run.machine.start_seconds
    if not served.is_dir():
        words = ["export", head, str(served), "--to", engine, "--target", run.settings.target]
        run.step(f"export for {engine}", words, name="export", seconds=starts)
    record = run.step("check of the export", ["check", str(served)], name="check", seconds=starts)
    if record.exit_code:
        raise BadInput(f"the check found problems: {last_line(Path(record.log))}")
    run.journal.exported = str(served)
