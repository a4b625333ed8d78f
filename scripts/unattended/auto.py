"""The stages of `headstart auto`, what they need of the budget, and the last of them: the head is measured on held-out
prompts, and deployed or not.
"""

from pathlib import Path

from ...base.errors import BadInput
from ...engines.export import read_folder, windowed
from ...engines.servers.how_to_serve import commands_of_engine, how_to_serve, under_adapter
from ...engines.servers.setting import OURS
from ...eval.figures.metrics import LEAST_TIMED
from ...eval.measurement.result import Result
from ...eval.plan.budget import SAFETY
from ...eval.report.recommendation import best_deployable, recommend
from ...eval.report.results.document import read_report
from ...eval.report.results.drafter_words import WITH_ANSWERS
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


def num_exporting(engine: str) -> int:
    """Commands that are started behind the evaluation."""
    return 0 if engine == OURS else EXPORTING


def batch_seconds(run: AutoRun) -> float:
    """Estimated seconds to evaluate one batch of prompts, under an adapter without it too."""
    reading = READINGS * run.machine.prefill_ms
    passes = 2 if run.settings.adapter else 1
    return passes * (SIDES * run.settings.max_new_tokens * run.machine.baseline_ms + reading) / 1000


def ending_seconds(run: AutoRun, num_batches: int) -> float:
    """Estimated seconds of an evaluation of that many batches, but at least of LEAST_TIMED, of export and check."""
    if serving := server_of(run):
        settings, num_prompts = run.settings, max(num_batches * run.machine.batch_size, LEAST_TIMED)
        seconds, most = EVALUATION * settings.budget, settings.max_new_tokens
        timed = plan_served(run, serving, num_drafters=2, most=most, held_out=num_prompts, seconds=seconds).seconds
    else:
        timed = max(num_batches, LEAST_TIMED) * batch_seconds(run)
    loading = run.machine.load_seconds * (2 if run.settings.adapter else 1)
    return timed / SAFETY + loading + (1 + num_exporting(run.settings.engine.name)) * run.machine.start_seconds


def check_budget(run: AutoRun) -> float:
    """The smallest sensible budget in seconds, 0 if nothing is to be trained. Raises BadInput if the given is smaller.

    From here on the folder is kept also after an error."""
    needed, machine, max_new_tokens = 0.0, run.machine, run.settings.max_new_tokens
    if machine.able:
        num_tokens, serving = LEAST_ANSWERS * max_new_tokens, server_of(run)
        answering = num_tokens * machine.baseline_ms / 1000
        if serving is not None:  # our own engine answers where the server takes too long to start
            answering = min(answering, serving.start_seconds + num_tokens / served_rate(serving))
        answering += machine.begin_seconds
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
    num_batches = -(-known(run.journal.split).held_out // run.machine.batch_size)
    most = min(ending_seconds(run, num_batches), EVALUATION * run.settings.budget)
    return run.settings.budget - max(most, ending_seconds(run, 1))


# The stages


def evaluation_seconds(run: AutoRun) -> float:
    """Seconds that are left for the evaluation, its start included."""
    left = max(run.clock.left, 0)
    if not run.journal.trained:
        left = min(LOOKUP_SECONDS, left)
    return left - num_exporting(run.settings.engine.name) * run.machine.start_seconds


def plan_evaluation(run: AutoRun) -> Evaluation:
    """How many held-out prompts there is time for (whole batches, at least LEAST_TIMED), and the head's K."""
    trained, machine = run.journal.trained, run.machine
    held_out, seconds = known(run.journal.split).held_out, evaluation_seconds(run) - machine.begin_seconds
    length = trained.score.num_draft_tokens if trained and trained.score else DEFAULT_DRAFT_TOKENS
    if serving := server_of(run):
        most, num_drafters = run.settings.max_new_tokens, 1 if trained is None else 2
        plan = plan_served(
            run, serving, num_drafters=num_drafters, most=most, held_out=held_out, seconds=max(seconds, 0.0)
        )
        return Evaluation(plan.num_prompts, length, has_look_ups=plan.num_drafters == num_drafters)
    num_batches = int(seconds * SAFETY / batch_seconds(run) + 1e-6)
    return Evaluation(min(max(num_batches, LEAST_TIMED) * machine.batch_size, held_out), length)


def evaluate(run: AutoRun) -> str:
    """Measures on held-out prompts, in the engine's server where one can be started; returns the path of report.json.

    Raises: as `evaluate_here`.
    """
    serving = server_of(run)
    if serving is None:
        return evaluate_here(run)
    evaluation, head, most = known(run.journal.evaluation), head_of(run), run.settings.max_new_tokens
    length, seconds = evaluation.num_draft_tokens, evaluation_seconds(run)
    drafters = [f"head:{head}@{length}"] if head else []
    drafters += [f"{SERVED_LOOKUP}@{length}"] if evaluation.has_look_ups else []
    asked = ["--limit", str(evaluation.num_prompts), "--max-new-tokens", str(most), *(window_of(run) if head else [])]
    if report := measure_in_server(run, serving, drafters, asked, seconds=seconds):
        return report
    run.journal.evaluation = plan_evaluation(run)
    run.write()
    return evaluate_here(run) if head else ""


def evaluate_here(run: AutoRun) -> str:
    """Measures the head, look-ups, and both together in our engine; returns the path of report.json.

    Raises: BadInput if that fails; SystemExit after a signal to stop.
    """
    evaluation, output = known(run.journal.evaluation), run.folder / "eval"
    head, answers = head_of(run), answers_to_look_up(run)
    drafters = [f"head:{head}@{evaluation.num_draft_tokens}", f"{HYBRID}:{head}{answers}"] if head else []
    arguments = [
        *("eval", *target_arguments(run)),
        *(word for drafter in (*drafters, LOOKUP + answers) for word in ("--drafter", drafter)),
        *("--prompts", str(run.data / "held_out.jsonl"), "--limit", str(evaluation.num_prompts)),
        *("--max-new-tokens", str(run.settings.max_new_tokens), *(window_of(run) if head else [])),
        *("--batch-size", str(run.machine.batch_size), "--repeats", "1", "--output", str(output)),
    ]
    measured = "the head and look-ups" if head else "look-ups, since no head can pay,"
    what = f"measuring {measured} on {evaluation.num_prompts} held-out prompts"
    record = run.step(what, arguments, name="eval", seconds=evaluation_seconds(run))
    if not (output / "report.json").exists():
        raise BadInput(f"the evaluation failed: {record.last_line}")
    return str(output / "report.json")


def decide(run: AutoRun) -> Decision:
    """Decides what to deploy. A head for another engine is exported and checked first, which writes `exported`."""
    head, engine = head_of(run), run.settings.engine.name
    if not run.journal.report:
        decision = Decision(False, "Do not deploy a head: none can pay here", [], [])
    elif server_of(run):
        decision, best = decide_served(run.journal.report, lookup=LOOKUP)
        if best is not None:
            is_head = decision.drafter != LOOKUP
            told = served_commands(run, best.num_draft_tokens, head) if is_head else best.commands[1:]
            decision.commands.extend(told)
    else:
        decision = decide_by_report(run, head)
        if engine != OURS:
            decision = without_server(decision, run.journal.serving, engine)
    if decision.deploy and engine != OURS and decision.drafter != LOOKUP:
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


def target_arguments(run: AutoRun) -> list[str]:
    adapter = ["--adapter", run.settings.adapter] if run.settings.adapter else []
    return ["--target", run.settings.target, *adapter, "--dtype", run.machine.dtype, "--device", run.machine.device]


def answers_to_look_up(run: AutoRun) -> str:
    """The part of a drafter's specification that names the file of the target's answers; empty if there is none, or it
    contains given chats as well."""
    path, answers = run.data / "train.jsonl", run.journal.answers
    return f":{path}" if answers is not None and not answers.given and path.is_file() else ""


def decide_by_report(run: AutoRun, head: str) -> Decision:
    """Decides by the recommendation of the report. For other engines than ours, look-ups are not considered.

    Args: head: folder; empty if no head was trained.
    """
    results = read_report(Path(run.journal.report)).results
    results = [one for one in results if (one.adapter is not None) == bool(run.settings.adapter)]
    results = [one for one in results if run.settings.engine.is_ours or not looks_up(one)]
    advice, best = recommend(results), best_deployable(results)
    if best is None:
        return Decision(False, advice.headline, list(advice.reasons), list(advice.cautions))
    drafter = specification(best, head, answers_to_look_up(run))
    return Decision(
        deploy=True,
        headline=advice.headline,
        reasons=list(advice.reasons),
        cautions=[*advice.cautions, *domains_without_gain(best)],
        drafter=drafter,
        commands=serving_commands(run, best, drafter, head),
        speedup=best.speedup,
        speedup_ci95=list(best.speedup_ci95),
    )


def looks_up(result: Result) -> bool:
    """Whether its drafter looks up, which needs our engine."""
    return result.drafter.startswith((LOOKUP, HYBRID))


def specification(result: Result, head: str, answers: str) -> str:
    """Its drafter as `headstart eval --drafter` takes it. Args: answers: as of `answers_to_look_up`."""
    if not looks_up(result):
        return f"head:{head}"
    file = answers if WITH_ANSWERS in result.drafter else ""
    return LOOKUP + file if result.drafter.startswith(LOOKUP) else f"{HYBRID}:{head}{file}"


def serving_commands(run: AutoRun, best: Result, drafter: str, head: str) -> list[str]:
    """Command lines that serve the best result in the engine, of ours, which has no server, in another."""
    if run.settings.engine.is_ours:
        has_tree = "chain" not in best.tree
        window, target = run.settings.draft_window, run.settings.target
        return how_to_serve(drafter, best.num_draft_tokens, has_tree=has_tree, target=target, window=window)
    return served_commands(run, best.num_draft_tokens, head)


def served_commands(run: AutoRun, length: int | None, head: str) -> list[str]:
    """Command lines that serve the exported head with K drafts. Args: length: K."""
    engine, adapter = run.settings.engine.name, run.settings.adapter
    folder = read_folder(head, target=run.settings.target)
    folder = windowed(folder, run.settings.draft_window, to=engine)
    commands = commands_of_engine(engine, folder, str(run.folder / "served"), length)
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
