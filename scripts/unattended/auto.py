"""The stages of `headstart auto`, what they need of the budget, and the last of them: the head is measured on held-out
prompts, and deployed or not.
"""

from pathlib import Path

from ...base.errors import BadInput
from ...engines.export import read_folder, windowed
from ...engines.servers.how_to_serve import commands_of_engine, how_to_serve, under_adapter
from ...eval.figures.metrics import LEAST_TIMED
from ...eval.measurement.result import Result
from ...eval.plan.budget import SAFETY
from ...eval.report.recommendation import best_deployable, recommend
from ...eval.report.results.document import read_report
from .answers import LEAST_ANSWERS, answer
from .in_server import LOOKUP as SERVED_LOOKUP
from .in_server import (
    decide_served,
    measure_in_server,
    plan_served,
    served_rate,
    server_of,
    try_server,
    without_server,
)
from .machine import measure, split
from .rungs import choose, learn
from .running.clock import ANSWERS, EVALUATION, MACHINE
from .running.journal import Decision, Evaluation, known
from .running.session import AutoRun, Stage
from .target_server import TargetServer
from .training import FITTING, LEAST_STEPS

# time of the whole evaluation (baseline, head, look-ups, both together, checks of texts) relative to the baseline alone
SIDES = 3.4
READINGS = 4  # of a prompt: by the baseline and by each of the three drafters
EXPORTING = 2  # commands started after the evaluation for another engine: export and check
LOOKUP_SECONDS = 60.0  # for measuring look-ups if no head can pay, upper limit
DEFAULT_DRAFT_TOKENS = 3  # K in the evaluation of a head without a score

LOOKUP = "suffix"  # the drafter that looks up and needs no training
HYBRID = "hybrid"  # look-ups and a head together

NO_CANDIDATE = (
    "No head was trained: even with four in five of its drafts accepted, none would be worth it on this machine, with "
    "this target and batch size."
)

# What the stages need


def exporting_seconds(run: AutoRun) -> float:
    """Estimated seconds of what follows the evaluation."""
    return 0.0 if run.settings.engine.is_ours else EXPORTING * run.machine.start_seconds


def batch_seconds(run: AutoRun) -> float:
    """Estimated seconds to evaluate one batch of prompts, under an adapter without it too."""
    reading = READINGS * run.machine.prefill_ms
    passes = 2 if run.settings.adapter else 1
    return passes * (SIDES * run.settings.max_new_tokens * run.machine.baseline_ms + reading) / 1000


def ending_seconds(run: AutoRun, num_batches: int) -> float:
    """Estimated seconds of an evaluation of that many batches, but at least of LEAST_TIMED, of export and check."""
    if serving := server_of(run):
        settings, num_prompts = run.settings, max(num_batches * run.settings.batch_size, LEAST_TIMED)
        seconds, most = EVALUATION * settings.budget, settings.max_new_tokens
        timed = plan_served(run, serving, num_drafters=2, most=most, held_out=num_prompts, seconds=seconds).seconds
    else:
        timed = max(num_batches, LEAST_TIMED) * batch_seconds(run)
    loading = run.machine.load_seconds * (2 if run.settings.adapter else 1)
    return timed / SAFETY + loading + run.machine.start_seconds + exporting_seconds(run)


def check_budget(run: AutoRun) -> float:
    """The smallest sensible budget in seconds, 0 if nothing is to be trained. Raises BadInput if the given is smaller.

    From here on the folder is kept also after an error."""
    needed, machine, max_new_tokens = 0.0, run.machine, run.settings.max_new_tokens
    if machine.able:
        num_tokens, serving = LEAST_ANSWERS * max_new_tokens, server_of(run)
        answering = machine.begin_seconds
        if serving is None:
            answering += num_tokens * machine.baseline_ms / 1000
        else:
            answering += serving.start_seconds + num_tokens / served_rate(serving)
        fitted = FITTING * min(machine.start_tokens, num_tokens)
        training = [fitted * able.token_seconds + 3 * LEAST_STEPS * able.step_seconds for able in machine.able]
        learning = 2 * machine.begin_seconds + min(training)
        needed = max(answering / ANSWERS, (answering + learning + ending_seconds(run, 1)) / (1 - MACHINE))
    if needed > run.settings.budget:
        minutes = f"{-(-needed // 60):.0f}m"
        raise BadInput(f"--budget: too short for this target here; the least that makes sense is {minutes}")
    run.keep()
    return round(needed, 1)


def end_of_learning(run: AutoRun) -> float:
    """The second of the budget at which training ends: what follows is enough for all held-out prompts, limited to the
    share EVALUATION of the budget; at least enough for one batch."""
    num_batches = -(-known(run.journal.split).held_out // run.settings.batch_size)
    most = min(ending_seconds(run, num_batches), EVALUATION * run.settings.budget)
    return run.settings.budget - max(most, ending_seconds(run, 1))


# The stages


def evaluation_seconds(run: AutoRun) -> float:
    """Seconds that are left for the evaluation, its start included."""
    left = max(run.clock.left, 0)
    if not run.journal.trained:
        left = min(LOOKUP_SECONDS, left)
    return left - exporting_seconds(run)


def plan_evaluation(run: AutoRun) -> Evaluation:
    """How many held-out prompts there is time for (whole batches, at least LEAST_TIMED), and the head's K."""
    trained, seconds = run.journal.trained, evaluation_seconds(run) - run.machine.begin_seconds
    held_out = known(run.journal.split).held_out
    length = trained.score.num_draft_tokens if trained and trained.score else DEFAULT_DRAFT_TOKENS
    if serving := server_of(run):
        most, num_drafters = run.settings.max_new_tokens, 1 if trained is None else 2
        plan = plan_served(
            run, serving, num_drafters=num_drafters, most=most, held_out=held_out, seconds=max(seconds, 0.0)
        )
        return Evaluation(plan.num_prompts, length, has_look_ups=plan.num_drafters == num_drafters)
    num_batches = int(seconds * SAFETY / batch_seconds(run) + 1e-6)
    return Evaluation(min(max(num_batches, LEAST_TIMED) * run.settings.batch_size, held_out), length)


def evaluate(run: AutoRun) -> str:
    """Measures on held-out prompts: the head and look-ups in the engine's server where one can be started; in our own
    engine also both together. Returns the path of report.json; empty if the server failed, as the journal then says.

    Raises: BadInput if our own engine fails.
    """
    evaluation, settings, head = known(run.journal.evaluation), run.settings, head_of(run)
    length, seconds = evaluation.num_draft_tokens, evaluation_seconds(run)
    asked = ["--limit", str(evaluation.num_prompts), "--max-new-tokens", str(settings.max_new_tokens)]
    asked += window_of(run) if head else []
    drafters = [f"head:{head}@{length}"] if head else []
    if serving := server_of(run):
        drafters += [f"{SERVED_LOOKUP}@{length}"] if evaluation.has_look_ups else []
        return measure_in_server(run, serving, drafters, asked, seconds=seconds)
    answers, output = answers_to_look_up(run), run.folder / "eval"
    drafters += [f"{HYBRID}:{head}{answers}"] if head else []
    adapter = ["--adapter", settings.adapter] if settings.adapter else []
    arguments = [
        *("eval", "--target", settings.target, *adapter, "--dtype", run.machine.dtype, "--device", settings.device),
        *(word for drafter in (*drafters, LOOKUP + answers) for word in ("--drafter", drafter)),
        *("--prompts", str(run.data / "held_out.jsonl"), *asked),
        *("--batch-size", str(settings.batch_size), "--repeats", "1", "--output", str(output)),
    ]
    measured = "the head and look-ups" if head else "look-ups, since no head can pay,"
    what = f"measuring {measured} on {evaluation.num_prompts} held-out prompts"
    record = run.step(what, arguments, name="eval", seconds=seconds)
    if not (output / "report.json").exists():
        raise BadInput(f"the evaluation failed: {record.last_line}")
    return str(output / "report.json")


def decide(run: AutoRun) -> Decision:
    """Decides what to deploy. A head for another engine is exported and checked first, which writes `exported`."""
    head, engine, journal = head_of(run), run.settings.engine, run.journal
    if journal.report and server_of(run):
        decision, best = decide_served(journal.report, lookup=LOOKUP)
        if best is not None:
            served = head if decision.drafter != LOOKUP else ""
            decision.commands.extend(served_commands(run, best.num_draft_tokens, served))
    elif journal.report:
        decision = decide_by_report(run, head)
        decision = decision if engine.is_ours else without_server(decision, journal.serving, engine.name)
    elif head:
        why = known(journal.serving).problem
        decision = Decision(False, "Do not deploy: the head could not be measured in the server", [why], [])
    else:
        decision = Decision(False, "Do not deploy a head: none can pay here", [], [])
    if decision.deploy and not engine.is_ours and decision.drafter != LOOKUP:
        try:
            journal.exported = export(run, head)
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
    engine, seconds, output = run.settings.engine.name, run.machine.start_seconds, run.folder / "served"
    if not output.is_dir():
        arguments = ["export", head, str(output), "--to", engine, "--target", run.settings.target, *window_of(run)]
        run.step(f"export for {engine}", arguments, name="export", seconds=seconds)
    record = run.step("check of the export", ["check", str(output)], name="check", seconds=seconds)
    if record.exit_code:
        raise BadInput(f"the check found problems: {record.last_line}")
    return str(output)


def head_of(run: AutoRun) -> str:
    """The folder of the trained head; empty if none was trained."""
    return run.journal.trained.head if run.journal.trained else ""


def window_of(run: AutoRun) -> list[str]:
    """What commands are told of the window that heads draft with, if any."""
    return ["--draft-window", run.settings.draft_window] if run.settings.draft_window else []


def answers_to_look_up(run: AutoRun) -> str:
    """The part of a drafter's specification that names the file of the target's answers; empty if there is none."""
    path = run.data / "train.jsonl"
    return f":{path}" if path.is_file() else ""


def decide_by_report(run: AutoRun, head: str) -> Decision:
    """Decides by the recommendation of the report. For other engines than ours, look-ups are not considered.

    Args: head: folder; empty if no head was trained.
    """
    settings = run.settings
    results = read_report(Path(run.journal.report)).results
    results = [one for one in results if (one.adapter is not None) == bool(settings.adapter)]
    results = [one for one in results if settings.engine.is_ours or not looks_up(one)]
    advice, best = recommend(results), best_deployable(results)
    if best is None:
        return Decision(False, advice.headline, list(advice.reasons), list(advice.cautions))
    drafter, length = specification(best, head, answers_to_look_up(run)), best.num_draft_tokens
    if settings.engine.is_ours:  # which has no server: in another
        window = settings.draft_window
        commands = how_to_serve(drafter, length, has_tree=False, target=settings.target, window=window)
    else:
        commands = served_commands(run, length, head)
    return Decision(
        deploy=True,
        headline=advice.headline,
        reasons=list(advice.reasons),
        cautions=[*advice.cautions, *domains_without_gain(best)],
        drafter=drafter,
        commands=commands,
        speedup=best.speedup,
        speedup_ci95=list(best.speedup_ci95),
    )


def looks_up(result: Result) -> bool:
    """Whether its drafter looks up, which needs our engine."""
    return result.drafter.startswith((LOOKUP, HYBRID))


def specification(result: Result, head: str, answers: str) -> str:
    """Its drafter as `headstart eval --drafter` takes it. Args: answers: as of `answers_to_look_up`."""
    if result.drafter.startswith(HYBRID):
        return f"{HYBRID}:{head}{answers}"
    return LOOKUP + answers if looks_up(result) else f"head:{head}"


def served_commands(run: AutoRun, length: int | None, head: str) -> list[str]:
    """Command lines that serve the exported head, or look-ups without one, with K drafts. Args: length: K."""
    engine, adapter, target = run.settings.engine.name, run.settings.adapter, run.settings.target
    if head:
        folder = windowed(read_folder(head, target=target), run.settings.draft_window, to=engine)
        commands = commands_of_engine(engine, folder, str(run.folder / "served"), length)
    else:
        commands = how_to_serve(SERVED_LOOKUP, known(length), has_tree=False, target=target)
    *before, starts = commands or [""]
    commands = [*before, f"{starts} {run.settings.engine.args}".strip()]  # as it was measured
    return under_adapter([line for line in commands if line], adapter)


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
    """Whether there is a drafter to measure: look-ups need no training, but our engine or the server."""
    return can_learn(run) or run.settings.engine.is_ours or server_of(run) is not None


def stages(server: TargetServer) -> list[Stage[AutoRun]]:
    """In their order. Args: server: of the run's target."""
    return [
        Stage("split", split),
        Stage(
            "serving",
            lambda run: try_server(run, most=run.settings.max_new_tokens),
            lambda run: not run.settings.engine.is_ours,
        ),
        Stage("machine", lambda run: measure(run, server)),
        Stage("least_budget", check_budget),
        Stage("answers_until", lambda run: run.clock.used + ANSWERS * run.settings.budget, can_learn),
        Stage("answers", lambda run: answer(run, server), can_learn),
        Stage("learning_until", end_of_learning, can_learn),
        Stage("chosen", lambda run: choose(run, server), can_learn),
        Stage("trained", lambda run: learn(run, server), can_learn),
        Stage("evaluation", plan_evaluation, can_evaluate),
        Stage("report", evaluate, can_evaluate),
        Stage("decision", decide),
    ]
