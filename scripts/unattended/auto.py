"""The stages of `headstart auto`, what they need of the budget, and the last of them: the head is measured on held-out
prompts, planned by batch size, and deployed or not.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from ...configs.errors import BadInput
from ...eval.measurement.metrics import LEAST_TIMED
from ...eval.measurement.result import Result
from ...eval.plan.budget import SAFETY
from ...eval.report.document import read_report
from ...eval.report.recommendation import recommend
from ...heads.export.llamacpp import Conversion, serve_lines
from ...heads.export.write import read_folder, serve_commands
from .answers import LEAST_ANSWERS, answer
from .candidates import OURS
from .clock import ANSWERS, EVALUATION, MACHINE, SIZES_SHARE
from .journal import Decision, Evaluation, SizePlan, known
from .machine import split_and_measure
from .rungs import choose, learn
from .session import AutoRun, Stage
from .training import FITTING, LEAST_STEPS

# time of the whole evaluation (baseline, head, look-ups, both together, checks of texts) relative to the baseline alone
SIDES = 3.4
EXPORTING = 2  # commands started after the evaluation for another engine: export and check
LOOKUP_SECONDS = 60.0  # for measuring look-ups if no head can pay, upper limit
DEFAULT_DRAFT_TOKENS = 3  # K in the evaluation of a head without a score

SIZES = (1, 4, 16)  # batch sizes of the plan
LEAST_SECONDS = 30.0  # below which a plan is not worthwhile
NO_BATCHES = ("llama.cpp",)  # engines that draft for one row at a time

LOOKUP = "suffix"  # the drafter that looks up and needs no training
HYBRID = "hybrid"  # look-ups and a head together
WITH_ANSWERS = "+answers"  # suffix of a drafter's name if it also looks up the target's answers

NO_CANDIDATE = (
    "No head was trained: even with four in five of its drafts accepted, none would be worth it on this machine, with "
    "this target and batch size."
)

# What the stages need


def num_exporting(engine: str) -> int:
    """Commands that are started behind the evaluation."""
    return 0 if engine == OURS else EXPORTING


def batch_seconds(run: AutoRun) -> float:
    """Estimated seconds to evaluate one batch of prompts."""
    return SIDES * run.settings.max_new_tokens * run.machine.baseline_ms / 1000


def ending_seconds(run: AutoRun, num_batches: int) -> float:
    """Estimated seconds of an evaluation of that many batches, but at least of LEAST_TIMED, of export and check."""
    timed = max(num_batches, LEAST_TIMED) * batch_seconds(run)
    return timed / SAFETY + (1 + num_exporting(run.settings.engine)) * run.machine.start_seconds


def planning_seconds(run: AutoRun) -> float:
    """Seconds for the plan, without the start of its command; 0 with too little time or an engine that needs none."""
    seconds = SIZES_SHARE * run.settings.budget
    return 0.0 if seconds < LEAST_SECONDS or run.settings.engine in NO_BATCHES else round(seconds)


def check_budget(run: AutoRun) -> float:
    """The smallest sensible budget in seconds, 0 if nothing is to be trained. Raises BadInput if the given is smaller.

    From here on the folder is kept.
    """
    needed, machine, max_new_tokens = 0.0, run.machine, run.settings.max_new_tokens
    if machine.able:
        answering = machine.start_seconds + LEAST_ANSWERS * max_new_tokens * machine.baseline_ms / 1000
        fitted = FITTING * min(machine.start_tokens, LEAST_ANSWERS * max_new_tokens)
        training = [fitted * able.token_seconds + 3 * LEAST_STEPS * able.step_seconds for able in machine.able]
        learning = 2 * machine.start_seconds + min(training)
        needed = max(answering / ANSWERS, (answering + learning + ending_seconds(run, 1)) / (1 - MACHINE))
    if needed > run.settings.budget:
        minutes = f"{-(-needed // 60):.0f}m"
        raise BadInput(f"--budget: too short for this target here; the least that makes sense is {minutes}")
    run.keep()
    return round(needed, 1)


def end_of_learning(run: AutoRun) -> float:
    """The second of the budget at which training ends: what follows is enough for all held-out prompts, limited to the
    share EVALUATION of the budget; at least enough for one batch."""
    num_batches = -(-known(run.journal.split).held_out // run.machine.batch_size)
    planning = planning_seconds(run)
    planning += run.machine.start_seconds if planning else 0.0
    most = min(ending_seconds(run, num_batches) + planning, EVALUATION * run.settings.budget)
    return run.settings.budget - max(most, ending_seconds(run, 1))


# The stages


def evaluation_seconds(run: AutoRun) -> float:
    """Seconds that are left for the evaluation, its start included."""
    left, planning = max(run.clock.left, 0), planning_seconds(run)
    if not run.journal.trained:
        left, planning = min(LOOKUP_SECONDS, left), 0.0
    num_starts = num_exporting(run.settings.engine) + bool(planning)  # commands after the evaluation
    return left - planning - num_starts * run.machine.start_seconds


def plan_evaluation(run: AutoRun) -> Evaluation:
    """How many held-out prompts there is time for (whole batches, at least LEAST_TIMED), and the head's K."""
    trained, machine = run.journal.trained, run.machine
    num_batches = int((evaluation_seconds(run) - machine.start_seconds) * SAFETY / batch_seconds(run))
    num_prompts = min(max(num_batches, LEAST_TIMED) * machine.batch_size, known(run.journal.split).held_out)
    scored = trained.score.num_draft_tokens if trained and trained.score else 0
    return Evaluation(num_prompts, scored or DEFAULT_DRAFT_TOKENS)


def evaluate(run: AutoRun) -> str:
    """Measures the head, look-ups, and both together; returns the path of report.json.

    Raises: BadInput if that fails; SystemExit after a signal to stop.
    """
    evaluation, output = known(run.journal.evaluation), run.folder / "eval"
    head, answers = head_of(run), answers_to_look_up(run)
    drafters = [f"head:{head}@{evaluation.num_draft_tokens}", f"{HYBRID}:{head}{answers}"] if head else []
    arguments = [
        *("eval", *target_arguments(run)),
        *(word for drafter in (*drafters, LOOKUP + answers) for word in ("--drafter", drafter)),
        *("--prompts", str(run.data / "held_out.jsonl"), "--limit", str(evaluation.num_prompts)),
        *("--max-new-tokens", str(run.settings.max_new_tokens)),
        *("--batch-size", str(run.machine.batch_size), "--repeats", "1", "--output", str(output)),
    ]
    measured = "the head and look-ups" if head else "look-ups, since no head can pay,"
    what = f"measuring {measured} on {evaluation.num_prompts} held-out prompts"
    record = run.step(what, arguments, name="eval", seconds=evaluation_seconds(run))
    if not (output / "report.json").exists():
        raise BadInput(f"the evaluation failed: {record.last_line}")
    return str(output / "report.json")


def plan_sizes(run: AutoRun) -> SizePlan:
    """Plans the chosen head by batch size; a failure is noted, not raised.

    The plan gets what earlier stages left of the budget, at least the time that was kept for it. It is stopped at the
    end of the budget: on a machine that other work shares, it can take longer than it was told.
    """
    settings, output = run.settings, run.folder / "plan"
    reserved = planning_seconds(run)
    num_starts = 1 + num_exporting(settings.engine)
    seconds = max(reserved, run.clock.left - num_starts * run.machine.start_seconds)
    arguments = [
        *("plan", *target_arguments(run), "--head", head_of(run), "--prompts", str(run.data / "held_out.jsonl")),
        *("--max-new-tokens", str(settings.max_new_tokens), "--seconds", f"{seconds:.0f}"),
        *(word for size in sorted({*SIZES, run.machine.batch_size}) for word in ("--batch-size", str(size))),
        *("--output", str(output), "--overwrite"),
    ]
    try:
        what = "K and trees by batch size"
        record = run.step(what, arguments, name="plan", seconds=seconds, until=settings.budget)
        if record.exit_code:
            raise BadInput("its time ran out" if record.stopped else record.last_line)
    except BadInput as error:
        run.say(f"no plan by batch size: {error}")
        return SizePlan(reserved, problem=str(error))
    return SizePlan(reserved, str(output / "plan.json"))


def decide(run: AutoRun) -> Decision:
    """Decides what to deploy. A head for another engine is exported and checked first, which writes `exported`."""
    head, engine = head_of(run), run.settings.engine
    none = Decision(False, "Do not deploy a head: none can pay here", [], [])
    decision = decide_by_report(run, head) if run.journal.report else none
    if decision.deploy and engine != OURS:
        try:
            run.journal.exported = export(run, head)
        except BadInput as error:
            decision.cautions.append(f"It is not exported: {error}")
            decision.commands.clear()
    if not run.machine.able:
        decision.reasons.insert(0, NO_CANDIDATE)
    return decision


def export(run: AutoRun, head: str) -> str:
    """Exports the head for the engine of the run and checks the export; returns the folder.

    Raises: BadInput if the head cannot be exported, or the check finds a problem.
    """
    engine, seconds, output = run.settings.engine, run.machine.start_seconds, run.folder / "served"
    if not output.is_dir():
        arguments = ["export", head, str(output), "--to", engine, "--target", run.settings.target]
        run.step(f"export for {engine}", arguments, name="export", seconds=seconds)
    record = run.step("check of the export", ["check", str(output)], name="check", seconds=seconds)
    if record.exit_code:
        raise BadInput(f"the check found problems: {record.last_line}")
    return str(output)


def head_of(run: AutoRun) -> str:
    """The folder of the trained head; empty if none was trained."""
    return run.journal.trained.head if run.journal.trained else ""


def target_arguments(run: AutoRun) -> list[str]:
    return ["--target", run.settings.target, "--dtype", run.machine.dtype, "--device", run.machine.device]


def answers_to_look_up(run: AutoRun) -> str:
    """The part of a drafter's specification that names the file of the target's answers; empty if there is none, or it
    contains given chats as well."""
    path, answers = run.data / "train.jsonl", run.journal.answers
    return f":{path}" if answers is not None and not answers.given and path.is_file() else ""


def decide_by_report(run: AutoRun, head: str) -> Decision:
    """Decides by the recommendation of the report. For other engines than ours, look-ups are not considered.

    Args: head: folder; empty if no head was trained.
    """
    file = answers_to_look_up(run)
    lookups = {  # specifications by name, of our engine only
        LOOKUP: LOOKUP,
        HYBRID: f"{HYBRID}:{head}",
        LOOKUP + WITH_ANSWERS: LOOKUP + file,
        HYBRID + WITH_ANSWERS: f"{HYBRID}:{head}{file}",
    }
    results = read_report(Path(run.journal.report)).ours
    advice = recommend([one for one in results if run.settings.engine == OURS or one.drafter not in lookups])
    best = advice.best
    if not advice.is_deployable or best is None:
        return Decision(False, advice.headline, advice.reasons, advice.cautions)
    drafter = lookups.get(best.drafter, f"head:{head}")
    return Decision(
        deploy=True,
        headline=advice.headline,
        reasons=advice.reasons,
        cautions=[*advice.cautions, *domains_without_gain(best)],
        drafter=drafter,
        commands=serving_commands(run, best, drafter, head),
        speedup=best.speedup,
        speedup_ci95=list(best.speedup_ci95),
    )


def serving_commands(run: AutoRun, best: Result, drafter: str, head: str) -> list[str]:
    """Command lines that serve the best result in the engine. Our own engine has no server: it decodes prompts."""
    engine, target, exported = run.settings.engine, run.settings.target, str(run.folder / "served")
    length = best.num_draft_tokens
    if engine == OURS:
        how = f"--drafter {quote(drafter)} --num-draft-tokens {length} --batch-size {best.batch_size}"
        return [f"headstart eval --target {quote(target)} {how} --prompts PROMPTS.jsonl --output DIR"]
    folder = read_folder(head, target=target)
    folder = replace(folder, record=replace(folder.record, head={**folder.own, "num_depths": length}))
    if engine == "llama.cpp":
        return serve_lines(folder, exported, Conversion())
    commands = serve_commands(folder, exported, to=engine, target=target)
    return [commands[engine]] if engine in commands else []


def domains_without_gain(best: Result) -> list[str]:
    """A caution for each domain of the prompts in which the speedup's confidence interval does not lie above 1."""
    return [
        f"Not shown to be faster on prompts of {name}: {part.speedup:.2f} times the speed."
        for name, part in best.by_domain.items()
        if part.speedup is not None and (part.speedup_ci95[0] or 0) <= 1
    ]


def can_learn(run: AutoRun) -> bool:
    """Whether a head may pay."""
    return bool(run.machine.able)


def can_evaluate(run: AutoRun) -> bool:
    """Whether there is a drafter to measure: look-ups need no training, but our engine."""
    return can_learn(run) or run.settings.engine == OURS


AUTO: Sequence[Stage[AutoRun]] = (
    Stage("machine", split_and_measure),
    Stage("least_budget", check_budget),
    Stage("answers_until", lambda run: run.clock.used + ANSWERS * run.settings.budget, can_learn),
    Stage("answers", answer, can_learn),
    Stage("learning_until", end_of_learning, can_learn),
    Stage("chosen", choose, can_learn),
    Stage("trained", learn, can_learn),
    Stage("evaluation", plan_evaluation, can_evaluate),
    Stage("report", evaluate, can_evaluate),
    Stage("sizes", plan_sizes, lambda run: bool(run.journal.trained and planning_seconds(run))),
    Stage("decision", decide),
)
