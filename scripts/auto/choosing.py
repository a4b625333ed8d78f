"""The stages that train heads: successive halving among the candidates, then the chosen one alone."""

from pathlib import Path

from ...configs.errors import BadInput
from .budget import EVALUATION, HALVING
from .candidates import Candidate, by_gain_per_cost, find_candidates
from .evaluation import ending_seconds
from .halving import LEAST_STEPS, field, rung_seconds, survivors
from .journal import Chosen, Rung, Score
from .learning import visit_plan
from .session import Session

LATE = 1.3  # of a visit's planned time, after which it is ended


def kept_for_the_end(run: Session) -> float:
    """Seconds for evaluation, export and check: of all held-out prompts, or as many as its share allows."""
    assert run.journal.split is not None
    machine, settings = run.machine, run.settings
    batches = -(-run.journal.split.held_out // machine.batch_size)
    least, whole = (
        ending_seconds(count, machine, engine=settings.engine, max_new_tokens=settings.max_new_tokens)
        for count in (1, batches)
    )
    return max(min(whole, EVALUATION * settings.budget), least)


def choose(run: Session) -> None:
    """Successive halving among the candidates that may pay."""
    journal, learner = run.journal, run.learner
    if journal.chosen is not None:
        return
    if journal.learning_until is None:
        journal.learning_until = run.settings.budget - kept_for_the_end(run)
        run.write()
    known = {candidate.name: candidate for candidate in find_candidates()}
    ranked = by_gain_per_cost([(each.name, each.bound, each.step_seconds) for each in run.machine.able])
    total = HALVING * max(journal.learning_until - run.clock.used, 0)
    names = list(journal.rungs[0].plan) if journal.rungs else None
    names = names or field(ranked, {name: learner.pace(name, []) for name in ranked}, total)
    if not journal.rungs:
        journal.rung_seconds = rung_seconds(total, len(names))
    while len(names) > 1:
        names = rung(run, names, known)
    scores = [score for rung in journal.rungs for score in rung.scores if score.name == names[0] and not score.problem]
    pace = learner.pace(names[0], journal.rungs)
    steps = learner.budgeted_steps(journal.learning_until - run.clock.used, pace)
    journal.chosen = Chosen(names[0], steps, scores[-1] if scores else None)
    run.write()


def rung(run: Session, names: list[str], known: dict[str, Candidate]) -> list[str]:
    """The next rung, or one that was begun; returns the better half."""
    journal, learner = run.journal, run.learner
    assert journal.learning_until is not None
    done = next((rung for rung in journal.rungs if list(rung.plan) == names), None)
    if done is not None and done.kept:
        return done.kept
    before = [rung for rung in journal.rungs if rung is not done]
    if done is None:
        done = Rung(visit_plan(names, journal.rung_seconds, learner, before))
        journal.rungs.append(done)
        run.write()
    each = journal.rung_seconds / len(names)
    scored = {score.name for score in done.scores}
    for name in [name for name in names if name not in scored]:
        steps = done.plan[name]
        until = min(run.clock.used + LATE * each, journal.learning_until)
        words = learner.visit_words(known[name], steps=steps, pace=learner.pace(name, before))
        what = f"rung {len(before) + 1} of {len(names)} candidates: {name} learns up to step {steps}"
        try:
            record = run.step(what, words, name=f"learn-{name}", seconds=each, until=until)
            score = learner.score(name, run.folder / "candidates" / name, record, steps)
        except BadInput as error:  # training refused it; others may do
            score = Score(name, 0, 0.0, 0.0, [], 0, 0.0, str(error))
        done.scores.append(score)
        figures = (
            f"{score.acceptance_length:.2f} tokens per round, {score.predicted_speedup:.2f} times the speed predicted"
        )
        run.say(f"  {score.problem or figures}")
        run.write()
    good = {score.name: score.predicted_speedup for score in done.scores if not score.problem}
    if not good and not before:
        raise BadInput(f"no candidate could be scored: {done.scores[0].name}: {done.scores[0].problem}")
    done.kept = survivors(good) if good else names[:1]  # which are in order of the rung before
    run.write()
    return done.kept


def learn(run: Session) -> None:
    """Train the chosen candidate for the rest of the time, with a falling learning rate."""
    journal, learner = run.journal, run.learner
    chosen = journal.chosen
    assert chosen is not None and journal.learning_until is not None
    if chosen.head:
        return
    earlier = run.folder / "candidates" / chosen.name / "best"
    if chosen.max_steps >= LEAST_STEPS or not earlier.is_dir():
        chosen.max_steps = max(chosen.max_steps, LEAST_STEPS)
        known = {candidate.name: candidate for candidate in find_candidates()}
        words = learner.last_words(known[chosen.name], chosen, earlier if earlier.is_dir() else None, journal.rungs)
        seconds = max(journal.learning_until - run.clock.used, 0)
        what = f"{chosen.name} is chosen, and learns on for {chosen.max_steps} steps"
        record = run.step(what, words, name="learn-chosen", seconds=seconds, until=journal.learning_until)
        score = learner.score(chosen.name, run.folder / "training", record, 0)
        folders = [run.folder / "training" / name for name in ("final", "best")]
        new = next((folder for folder in folders if folder.is_dir()), None)
        is_better = chosen.score is None or score.predicted_speedup >= chosen.score.predicted_speedup
        if new is not None and is_better:
            chosen.head = str(new)
            chosen.score = score if not score.problem else chosen.score
    chosen.head = chosen.head or str(earlier)
    if not Path(chosen.head).is_dir():
        raise BadInput(f"{chosen.name} was not trained in time: see {run.folder / 'logs'}; give it more time")
    run.write()
