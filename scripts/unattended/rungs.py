"""The stages of `headstart auto` that train heads: successive halving among the candidates, then the final training.

In successive halving (Jamieson and Talwalkar 2016), each rung has the same time and half as many candidates. Within a
rung, every candidate is trained once, for an equal share of the rung's time.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...configs.errors import BadInput
from ...train.trend import Validated, forecast
from .candidates import Candidate, find_candidates
from .clock import HALVING
from .journal import Chosen, Measured, Rung, Score, Trained
from .session import AutoRun
from .training import LEAST_STEPS, TIME_IS_UP, Learner, Pace, head_in, steps_in, validations

MORE = 2  # times the answers and steps: what a run of twice the budget has, about
WORTHWHILE = 1.01  # times the acceptance length that the final training must be able to reach
LATE = 1.5  # a candidate's training in a rung is stopped without a score after this multiple of its time


def by_gain_per_cost(measured: Sequence[Measured]) -> list[str]:
    """Ranks candidates by the time per token that heads like them save, over the square root of their training cost.

    The square root is there because acceptance grows more slowly than the number of training steps.

    Returns the names, best first.
    """
    ranked = sorted(measured, key=lambda candidate: -(1 - 1 / candidate.usual_speedup) / candidate.step_seconds**0.5)
    return [candidate.name for candidate in ranked]


def rung_sizes(num_candidates: int) -> list[int]:
    """Number of candidates in each rung: 4 -> [4, 2], 3 -> [3, 2]. Empty for fewer than two candidates."""
    sizes, left = [], num_candidates
    while left > 1:
        sizes.append(left)
        left = -(-left // 2)
    return sizes


def rung_seconds(seconds: float, num_candidates: int) -> float:
    """Seconds of each rung. Args: seconds: for all rungs together."""
    return seconds / max(len(rung_sizes(num_candidates)), 1)


def starting_candidates(ranked: Sequence[str], paces: Mapping[str, Pace], seconds: float) -> list[str]:
    """The candidates of the first rung: as many of the best-ranked ones as can each train LEAST_STEPS steps per rung.

    Args:
        ranked: names, most promising first.
        seconds: for all rungs together.

    Returns at least one name.
    """
    for size in range(len(ranked), 1, -1):
        share = rung_seconds(seconds, size) / size
        if all(paces[name].overhead + LEAST_STEPS * paces[name].step <= share for name in ranked[:size]):
            return list(ranked[:size])
    return list(ranked[:1])


def survivors(scores: Mapping[str, float]) -> list[str]:
    """The better half by score (rounded up), best first; ties keep the order of the mapping."""
    order = sorted(scores, key=lambda name: -scores[name])
    return order[: -(-len(order) // 2)]


def offered(run: AutoRun) -> dict[str, Candidate]:
    """The candidates by name."""
    return {candidate.name: candidate for candidate in find_candidates(run.settings.engine, run.settings.target)}


def choose(run: AutoRun) -> Chosen:
    """Chooses one candidate by successive halving; writes `rung_seconds` and `rungs` into the journal.

    Raises: BadInput if no candidate could be trained; SystemExit after a signal to stop.
    """
    journal, learner = run.journal, Learner(run, offered(run))
    if journal.rungs:  # resumed
        names = list(journal.rungs[0].plan)
    else:
        halving_seconds = HALVING * run.left_until(journal.learning_until)
        ranked = by_gain_per_cost(run.machine.able)
        names = starting_candidates(ranked, {name: learner.pace(name, []) for name in ranked}, halving_seconds)
        journal.rung_seconds = rung_seconds(halving_seconds, len(names))
    while len(names) > 1:
        names = run_rung(run, names, learner)
    [name] = names
    scores = [score for rung in journal.rungs for score in rung.scores if score.name == name and not score.problem]
    steps, extracts = learner.planned(name, journal.rungs, seconds=run.left_until(journal.learning_until))
    course, steps = course_of(run, name), max(steps, 0)
    expected = forecast(course, course[-1].step + steps) if course and steps else None
    return Chosen(name, steps, extracts, scores[-1] if scores else None, expected)


def course_of(run: AutoRun, name: str) -> list[Validated]:
    """A candidate's validations in its rungs."""
    scores = [score for rung in run.journal.rungs for score in rung.scores]
    return [score.validated for score in scores if score.name == name and not score.problem]


def run_rung(run: AutoRun, names: list[str], learner: Learner) -> list[str]:
    """Trains and scores the candidates `names`; a rung of the journal with these candidates is resumed.

    Returns the names of the better half, best first; if there was no time to score any, the most promising one.
    Raises: BadInput if all fail in the first rung.
    """
    journal, candidates = run.journal, learner.candidates
    current = next((rung for rung in journal.rungs if list(rung.plan) == names), None)
    if current is not None and current.kept:
        return current.kept
    earlier = [rung for rung in journal.rungs if rung is not current]
    reached = {score.name: score.steps for rung in earlier for score in rung.scores}
    seconds = journal.rung_seconds / len(names)  # per candidate
    if current is None:
        steps = {name: max(steps_in(seconds, learner.pace(name, earlier)), LEAST_STEPS) for name in names}
        current = Rung({name: reached.get(name, 0) + steps[name] for name in names})
        journal.rungs.append(current)
        run.write()
    scored = {score.name for score in current.scores}
    for name in [name for name in names if name not in scored]:
        assert journal.learning_until is not None
        steps = current.plan[name]
        until = min(run.clock.used + LATE * seconds, journal.learning_until)
        pace = learner.pace(name, earlier)
        arguments = learner.rung_training(candidates[name], steps=steps, seconds=seconds, pace=pace)
        what = f"rung {len(earlier) + 1}, {len(names)} candidates: {name} is trained up to step {steps}"
        try:
            record = run.step(what, arguments, name=f"learn-{name}", seconds=seconds, until=until)
            score = learner.score(name, run.folder / "candidates" / name, record, steps_before=reached.get(name, 0))
        except BadInput as error:  # this candidate cannot be trained; the others may
            score = Score(name, 0, 0.0, 0.0, [], 0, 0.0, problem=str(error))
        current.scores.append(score)
        told = f"{score.acceptance_length:.2f} tokens per round, predicted speedup {score.predicted_speedup:.2f}"
        run.say(f"  {score.problem or told}")
        run.write()
    speedups = {score.name: score.predicted_speedup for score in current.scores if not score.problem}
    late = [score.name for score in current.scores if score.problem == TIME_IS_UP]
    current.kept = (
        survivors(speedups) or (names if earlier else late)[:1]
    )  # both best first: by scores, by gain per cost
    if not current.kept:
        raise BadInput(f"no candidate could be trained: {current.scores[0].name}: {current.scores[0].problem}")
    run.write()
    return current.kept


def extract(run: AutoRun, learner: Learner) -> bool:
    """Extracts the target's states on the final training's rows, in at most half of the time left for learning.

    Returns whether it succeeded: there may be no room for them, or they take too long.
    """
    half = run.left_until(run.journal.learning_until) / 2
    what = "the target reads the rows once, and its states are kept for the training"
    try:
        record = run.step(what, learner.extraction(), name="extract", seconds=half, until=run.clock.used + half)
    except BadInput as error:
        run.say(f"  {error}: the rows are read in every step")
        return False
    return record.exit_code == 0


def learn(run: AutoRun) -> Trained:
    """Trains the chosen candidate for the rest of the training time, with a decaying learning rate.

    If there is no time for that, it would gain too little, or it makes the candidate worse, the best checkpoint of its
    rungs is taken.

    Raises: BadInput if there is no head at the end; SystemExit after a signal to stop.
    """
    journal, chosen, learner = run.journal, run.journal.chosen, Learner(run, offered(run))
    assert chosen is not None
    earlier = head_in(run.folder / "candidates" / chosen.name, "best")
    head, score, course = earlier, chosen.score, course_of(run, chosen.name)
    if not earlier or (chosen.max_steps >= LEAST_STEPS and gains_by_training(run, chosen)):
        steps, pace = max(chosen.max_steps, LEAST_STEPS), learner.pace(chosen.name, journal.rungs)
        training = partial(learner.final_training, learner.candidates[chosen.name], steps, earlier, pace=pace)
        seconds = run.left_until(journal.learning_until)
        arguments = training(seconds=seconds)  # writes the config
        if chosen.extracts and extract(run, learner):
            seconds = run.left_until(journal.learning_until)
            arguments = [*training(seconds=seconds), f"data.features={learner.states}"]
        what = f"{chosen.name} is chosen, and trained for {steps} more steps"
        record = run.step(what, arguments, name="learn-chosen", seconds=seconds, until=journal.learning_until)
        shutil.rmtree(learner.states, ignore_errors=True)
        last = learner.score(chosen.name, run.folder / "training", record, steps_before=0)
        before = course[-1].step if course else 0
        course += [
            replace(part.validated, step=before + part.validated.step) for part in validations(run.folder / "training")
        ]
        trained = head_in(run.folder / "training", "final", "best")
        if trained and (score is None or last.predicted_speedup >= score.predicted_speedup):
            head, score = trained, score if last.problem else last
    if not head:
        raise BadInput(f"{chosen.name} was not trained in time: see {run.folder / 'logs'}, or give a larger --budget")
    with_more = forecast(course, MORE * course[-1].step, answers=MORE) if course else None
    return Trained(head, score, course, with_more)


def gains_by_training(run: AutoRun, chosen: Chosen) -> bool:
    """Whether the final training may be worth its time, by the forecast from the rungs; says what that is."""
    expected, score = chosen.expected, chosen.score
    if expected is None or score is None:
        return True
    gains = expected.high >= WORTHWHILE * score.acceptance_length
    run.say(
        f"  tokens per round expected after {chosen.max_steps} more steps: {expected}" + ("" if gains else "; it ends")
    )
    return gains
