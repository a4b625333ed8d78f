"""Unattended runs in the engine's own server: it is tried before training, and measures heads when they are trained;
what it does in between is in `target_server`.

Where it is not to be had our own engine does that, and the run says so in a line.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.files import remove
from ...engines.servers.registry import SERVER_ENGINES
from ...engines.servers.setting import EngineSetting
from ...eval.figures.metrics import LEAST_TIMED
from ...eval.plan.budget import SAFETY
from ...eval.report.served_page import cautions as served_cautions
from ...eval.report.served_page import read_served, schedule_line, sentences
from ...eval.served.load import Load
from ...eval.served.served_result import ServedResult, deployable
from .running.clock import SERVED_EVALUATION, TRIAL, clock_text
from .running.journal import Decision, ServerTrial
from .running.session import Session

TRIED, TRIED_PROMPTS, TRIED_TOKENS = "server_trial", 4, 32  # the trial, which needs no head: it looks up drafts
LOOKUP = "ngram"  # the drafter that a server has by itself
REPEATS = 2  # of a measurement: four pairs of blocks, the fewest that give an interval over blocks
NO_GAIN = "Do not deploy: no measured setting is proved to be faster in the server"


@dataclass(frozen=True)
class ServedPlan:
    """What a measurement in the server asks: each drafter has servers of its own. seconds: expected."""

    num_drafters: int
    num_prompts: int
    seconds: float


def check_startable(setting: EngineSetting) -> None:
    """Raises BadInput where no server of the engine is started here."""
    engine = SERVER_ENGINES.get(setting.name)
    if engine is None or not engine.can_start:
        raise BadInput(f"no server of {setting.name} is started here")
    package = importlib.util.find_spec(engine.name)  # without an origin: a folder of that name alone
    if not setting.python and (package is None or package.origin is None):
        raise BadInput(f"{engine.title} is not in this Python; --engine-python names one that has it")


def try_server(run: Session[Any, Any], *, most: int) -> ServerTrial:
    """Starts the engine's server, with look-ups and without, and asks it a little.

    Args: most: tokens of an answer, when heads are measured."""
    started, asked = run.clock.used, ["--limit", str(TRIED_PROMPTS), "--max-new-tokens", str(TRIED_TOKENS)]
    until = started + TRIAL * run.settings.budget
    try:
        check_startable(run.settings.engine)
        what = f"trying {SERVER_ENGINES[run.settings.engine.name].title}'s server"
        remove(run.folder / TRIED)  # of an earlier start, perhaps on another machine
        report = served_report(run, what, [LOOKUP], asked, name=TRIED, repeats=1, until=until)
        results = read_served(report).results
        sides = [side for one in results for side in (one.baseline, one.drafted)]
        asking = sum(side.num_answers * TRIED_TOKENS / max(side.tokens_per_second or 0.0, 1e-3) for side in sides)
        serving = ServerTrial(
            start_seconds=round(max(run.clock.used - started - asking, 0.0) / starts(run, repeats=1), 1),
            tokens_per_second=[one.baseline.tokens_per_second or 0.0 for one in results],
        )
        least = plan_served(run, serving, num_drafters=1, most=most, held_out=LEAST_TIMED, seconds=0.0).seconds
        if least > SERVED_EVALUATION * run.settings.budget:
            share = f"more than {SERVED_EVALUATION:.0%} of the budget"
            raise BadInput(f"measuring in it takes {clock_text(least)} at least, {share}")
    except BadInput as error:
        run.say(f"{error}: decided by our own engine")
        return ServerTrial(str(error))
    return serving


def served_rate(serving: ServerTrial) -> float:
    """Tokens per second of the server at the load where it has most."""
    return max(*serving.tokens_per_second, 1e-3)


def measure_in_server(
    run: Session[Any, Any], serving: ServerTrial, drafters: Sequence[str], asked: Sequence[str], *, seconds: float
) -> str:
    """The path of report.json; empty where it failed, which the journal then says.

    Args: drafters: as --drafter takes them. asked: which of the held-out rows, and how. seconds: expected."""
    what = f"measuring in {SERVER_ENGINES[run.settings.engine.name].title} on held-out prompts"
    try:
        return str(served_report(run, what, drafters, asked, name="eval_served", seconds=seconds))
    except BadInput as error:
        run.say(f"{error}: nothing is decided in it")
        run.journal.serving = replace(serving, problem=str(error))
        return ""


def served_report(
    run: Session[Any, Any],
    what: str,
    drafters: Sequence[str],
    asked: Sequence[str],
    *,
    name: str,
    repeats: int = REPEATS,
    seconds: float | None = None,
    until: float | None = None,
) -> Path:
    """The path of report.json of a measurement of held-out rows in the server. Raises: BadInput if there is none."""
    output, settings = run.folder / name, run.settings
    arguments = ["eval", *settings.engine.flags(), "--target", settings.target]
    arguments += ["--adapter", settings.adapter] if settings.adapter else []
    arguments += [word for size in settings.concurrency for word in ("--concurrency", str(size))]
    arguments += [word for drafter in drafters for word in ("--drafter", drafter)]
    arguments += ["--prompts", str(run.data / "held_out.jsonl"), "--repeats", str(repeats)]
    record = run.step(what, [*arguments, *asked, "--output", str(output)], name=name, seconds=seconds, until=until)
    report = output / "report.json"
    if not report.exists():
        late = f"it had no answer in the {TRIAL:.0%} of the budget that are for trying it"
        raise BadInput(late if record.stopped else f"it could not be measured: {record.last_line}")
    return report


def server_of(run: Session[Any, Any]) -> ServerTrial | None:
    """The engine's server, as tried; None: our own engine measures."""
    serving = run.journal.serving
    return None if serving is None or serving.problem else serving


def starts(run: Session[Any, Any], *, repeats: int) -> int:
    """How often servers are started: one of each side where both have room, else anew at each change of sides."""
    return 2 if run.settings.engine.has_room_for_two else 2 * repeats + 1


def served_seconds(run: Session[Any, Any], serving: ServerTrial, *, num_prompts: int, most: int) -> float:
    """Estimated seconds of a measurement of one drafter in the server. Args: most: tokens of an answer."""
    seconds = starts(run, repeats=REPEATS) * serving.start_seconds
    for size, speed in zip(run.settings.concurrency, serving.tokens_per_second, strict=True):
        tokens = len(Load(size).numbers(num_prompts)) * most
        seconds += 4 * REPEATS * tokens / max(speed, 1e-3)
    return seconds


def plan_served(
    run: Session[Any, Any], serving: ServerTrial, *, num_drafters: int, most: int, held_out: int, seconds: float
) -> ServedPlan:
    """The measurement there is time for: of fewer prompts, and if need be of one drafter; LEAST_TIMED prompts at least.

    Args: num_drafters, held_out: of drafters and prompts, at most. most: tokens of an answer."""
    least, plans = min(LEAST_TIMED, held_out), list[ServedPlan]()
    for drafters in dict.fromkeys((num_drafters, 1)):
        for num_prompts in range(held_out, least - 1, -1):
            timed = drafters * served_seconds(run, serving, num_prompts=num_prompts, most=most)
            plans.append(ServedPlan(drafters, num_prompts, timed))
    return next((plan for plan in plans if plan.seconds <= seconds * SAFETY), plans[-1])


def decide_served(report: str, *, lookup: str) -> tuple[Decision, ServedResult | None]:
    """Decides by what the server did, and the result to deploy. Args: lookup: the `drafter` of a decision for look-ups.

    Of those that are `deployable` at some load it takes the one with the highest lower end."""
    results = read_served(Path(report)).results
    said = sentences(results)
    paying = deployable(results)
    if not paying:
        return Decision(False, NO_GAIN, said, [f"{line}." for line in served_cautions(results)]), None
    best = max(paying, key=lambda one: one.speedup_ci95[0] or 0.0)
    same = [one for one in results if one.drafter == best.drafter]
    cautions = [schedule] if (schedule := schedule_line(same)) else []
    cautions += [f"{line}." for line in served_cautions(results, drafter=best.drafter)]
    title, (name, _, length) = SERVER_ENGINES[best.engine].title, best.drafter.rpartition(" at K ")
    decision = Decision(
        deploy=True,
        headline=f"Deploy {'look-ups' if name == LOOKUP else 'the head'}, K {length}, in {title}",
        reasons=[*said, "These are the server's own answers, asked with drafts and without in turns."],
        cautions=cautions,
        drafter=lookup if name == LOOKUP else name,
        speedup=best.speedup,
        speedup_ci95=list(best.speedup_ci95),
    )
    return decision, best


def without_server(decision: Decision, serving: ServerTrial | None, engine: str) -> Decision:
    """A decision by our own engine for another one, which says so first among its cautions."""
    why = "" if serving is None else f", since {serving.problem}"
    caution = f"Decided by our own engine{why}: in {engine} the figures will differ."
    return replace(decision, cautions=[caution, *decision.cautions])
