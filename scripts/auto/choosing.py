"""The stages that train heads: successive halving among the candidates, then the final training of the chosen one."""

from pathlib import Path

from ...configs.errors import BadInput
from .budget import EVALUATION, HALVING
from .candidates import Candidate, by_gain_per_cost, find_candidates
from .evaluation import ending_seconds
from .halving import LEAST_STEPS, rung_seconds, starting_candidates, survivors
from .journal import Chosen, Rung, Score
from .learning import TIME_IS_UP, plan_rung
from .session import Session
from .sizes import planning_seconds

LATE = 1.5  # a candidate's training in a rung is stopped without a score after this multiple of its time


def ending_reserve(run: Session) -> float:
    """Seconds to keep for evaluation, plan by batch size, export and check.

    Enough for all held-out prompts, limited to the share EVALUATION of the budget; at least enough for one batch.
    """
    assert run.journal.split is not None
    machine, settings = run.machine, run.settings
    num_batches = -(-run.journal.split.held_out // machine.batch_size)
    least, whole = (
        ending_seconds(count, machine, engine=settings.engine, max_new_tokens=settings.max_new_tokens)
        for count in (1, num_batches)
    )
    planning = planning_seconds(settings.budget, engine=settings.engine)
    planning += machine.start_seconds if planning else 0.0
    return max(min(whole + planning, EVALUATION * settings.budget), least)


def offered(run: Session) -> list[Candidate]:
    return find_candidates(run.settings.engine, run.settings.target)


def choose(run: Session) -> None:
    """Chooses one candidate by successive halving; writes `learning_until`, `rungs` and `chosen` into the journal.

    Raises: BadInput if no candidate could be trained; SystemExit after a signal to stop.
    """
    journal, learner = run.journal, run.learner
    if journal.chosen is not None:
        return
    if journal.learning_until is None:
        journal.learning_until = run.settings.budget - ending_reserve(run)
        run.write()
    candidates = {candidate.name: candidate for candidate in offered(run)}
    halving_seconds = HALVING * max(journal.learning_until - run.clock.used, 0)
    if journal.rungs:  # resumed
        names = list(journal.rungs[0].plan)
    else:
        ranked = by_gain_per_cost([(each.name, each.bound, each.step_seconds) for each in run.machine.able])
        names = starting_candidates(ranked, {name: learner.pace(name, []) for name in ranked}, halving_seconds)
        journal.rung_seconds = rung_seconds(halving_seconds, len(names))
    while len(names) > 1:
        names = run_rung(run, names, candidates)
    [name] = names
    scores = [score for rung in journal.rungs for score in rung.scores if score.name == name and not score.problem]
    steps = learner.steps_in(journal.learning_until - run.clock.used, learner.pace(name, journal.rungs))
    journal.chosen = Chosen(name, steps, scores[-1] if scores else None)
    run.write()


def run_rung(run: Session, names: list[str], candidates: dict[str, Candidate]) -> list[str]:
    """Trains and scores the candidates `names`; a rung of the journal with these candidates is resumed.

    Returns the names of the better half, best first; if there was no time to score any, the most promising one.
    Raises: BadInput if all fail in the first rung.
    """
    journal, learner = run.journal, run.learner
    assert journal.learning_until is not None
    current = next((rung for rung in journal.rungs if list(rung.plan) == names), None)
    if current is not None and current.kept:
        return current.kept
    earlier = [rung for rung in journal.rungs if rung is not current]
    if current is None:
        current = Rung(plan_rung(names, journal.rung_seconds, learner, earlier))
        journal.rungs.append(current)
        run.write()
    seconds = journal.rung_seconds / len(names)  # per candidate
    scored = {score.name for score in current.scores}
    for name in [name for name in names if name not in scored]:
        steps = current.plan[name]
        until = min(run.clock.used + LATE * seconds, journal.learning_until)
        pace = learner.pace(name, earlier)
        arguments = learner.rung_training(candidates[name], steps=steps, seconds=seconds, pace=pace)
        what = f"rung {len(earlier) + 1}, {len(names)} candidates: {name} is trained up to step {steps}"
        try:
            record = run.step(what, arguments, name=f"learn-{name}", seconds=seconds, until=until)
            before = max((score.steps for rung in earlier for score in rung.scores if score.name == name), default=0)
            score = learner.score(name, run.folder / "candidates" / name, record, steps_before=before)
        except BadInput as error:  # this candidate cannot be trained; the others may
            score = Score(name, 0, 0.0, 0.0, [], 0, 0.0, str(error))
        current.scores.append(score)
        run.say(f"  {score.problem or describe(score)}")
        run.write()
    speedups = {score.name: score.predicted_speedup for score in current.scores if not score.problem}
    late = [score.name for score in current.scores if score.problem == TIME_IS_UP]
    current.kept = survivors(speedups) or (names if earlier else late)[:1]  # both best first: by scores, by bounds
    if not current.kept:
        raise BadInput(f"no candidate could be trained: {current.scores[0].name}: {current.scores[0].problem}")
    run.write()
    return current.kept


def describe(score: Score) -> str:
    return f"{score.acceptance_length:.2f} tokens per round, predicted speedup {score.predicted_speedup:.2f}"


def learn(run: Session) -> None:
    """Trains the chosen candidate for the rest of the training time, with a decaying learning rate.

    If there is no time for that, or it makes the candidate worse, the best checkpoint of its rungs is taken.

    Raises: BadInput if there is no head at the end; SystemExit after a signal to stop.
    """
    journal, learner = run.journal, run.learner
    chosen = journal.chosen
    assert chosen is not None and journal.learning_until is not None
    if chosen.head:
        return
    earlier = run.folder / "candidates" / chosen.name / "best"
    if chosen.max_steps >= LEAST_STEPS or not earlier.is_dir():
        chosen.max_steps = max(chosen.max_steps, LEAST_STEPS)
        candidates = {candidate.name: candidate for candidate in offered(run)}
        start_from = earlier if earlier.is_dir() else None
        seconds = max(journal.learning_until - run.clock.used, 0)
        rungs = journal.rungs
        arguments = learner.final_training(candidates[chosen.name], chosen, start_from, rungs, seconds=seconds)
        what = f"{chosen.name} is chosen, and trained for {chosen.max_steps} more steps"
        record = run.step(what, arguments, name="learn-chosen", seconds=seconds, until=journal.learning_until)
        score = learner.score(chosen.name, run.folder / "training", record, steps_before=0)
        folders = [run.folder / "training" / name for name in ("final", "best")]
        trained = next((folder for folder in folders if folder.is_dir()), None)
        is_better = chosen.score is None or score.predicted_speedup >= chosen.score.predicted_speedup
        if trained is not None and is_better:
            chosen.head = str(trained)
            chosen.score = score if not score.problem else chosen.score
    chosen.head = chosen.head or str(earlier)
    if not Path(chosen.head).is_dir():
        raise BadInput(f"{chosen.name} was not trained in time: see {run.folder / 'logs'}, or give a larger --budget")
    run.write()
