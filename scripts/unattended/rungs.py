"""The stages of `headstart auto` that train heads: successive halving among the candidates, then the final training.

In successive halving (Jamieson and Talwalkar 2016), each rung has the same time and half as many candidates. Within a
rung, every candidate is trained once, for an equal share of the rung's time.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...base.errors import BadInput
from ...eval.report.results.drafter_words import drafter_words
from .running.clock import HALVING
from .running.journal import Chosen, Measured, Rung, Score, Trained, known
from .running.session import AutoRun
from .target_server import TargetServer
from .training import LEAST_STEPS, TIME_IS_UP, Learner, Pace, head_in, learners_of, steps_in

LATE = 1.5  # a candidate's training in a rung is stopped without a score after this multiple of its time


def by_gain_per_cost(measured: Sequence[Measured]) -> list[str]:
    """Ranks candidates by the time per token that heads like them save, over the square root of their training cost.

    The square root is there because acceptance grows more slowly than the number of training steps.

    Returns the names, best first.
    """
    ranked = sorted(measured, key=lambda candidate: -(1 - 1 / candidate.usual_speedup) / candidate.step_seconds**0.5)
    return [candidate.name for candidate in ranked]


def rung_seconds(seconds: float, num_candidates: int) -> float:
    """Seconds of each rung; of 4 candidates there are two (4, 2), of 5 three. Args: seconds: for all rungs together."""
    return seconds / max((num_candidates - 1).bit_length(), 1)


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


def choose(run: AutoRun, server: TargetServer) -> Chosen:
    """Chooses one candidate by successive halving; writes `rung_seconds` and `rungs` into the journal.

    Raises: BadInput if no candidate could be trained.
    """
    journal, learners = run.journal, learners_of(run, server)
    if journal.rungs:  # resumed
        names = list(journal.rungs[0].plan)
    else:
        halving_seconds = HALVING * run.left_until(journal.learning_until)
        ranked = by_gain_per_cost(run.machine.able)
        names = starting_candidates(ranked, {name: learners[name].pace for name in ranked}, halving_seconds)
        journal.rung_seconds = rung_seconds(halving_seconds, len(names))
    number = 1
    while len(names) > 1:
        names, number = run_rung(run, server, number, {name: learners[name] for name in names}), number + 1
    [name] = names
    steps = learners[name].planned(run.left_until(journal.learning_until))
    return Chosen(name, max(steps, 0), (journal.scores_of(name) or [None])[-1])


def run_rung(run: AutoRun, server: TargetServer, number: int, learners: Mapping[str, Learner]) -> list[str]:
    """Trains and scores candidates in the rung of that number, from 1; one in the journal is resumed.

    Returns the names of the better half, best first; if there was no time to score any, the most promising one.
    Raises: BadInput if all fail in the first rung.
    """
    journal = run.journal
    seconds = journal.rung_seconds / len(learners)  # per candidate
    before = {name: scores[-1].steps if (scores := journal.scores_of(name)) else 0 for name in learners}
    if len(journal.rungs) < number:
        steps = {name: max(steps_in(seconds, learner.pace), LEAST_STEPS) for name, learner in learners.items()}
        journal.rungs.append(Rung({name: before[name] + steps[name] for name in learners}))
        run.write()
    current = journal.rungs[number - 1]
    if current.kept:
        return current.kept
    scored = [score.name for score in current.scores]
    for name in [name for name in learners if name not in scored]:
        steps, learner = current.plan[name], learners[name]
        until = min(run.clock.used + LATE * seconds, known(journal.learning_until))
        arguments = learner.rung_training(steps, seconds=seconds)
        what = f"rung {number}, {len(learners)} candidates: {drafter_words(name)} is trained up to step {steps}"
        try:
            record = server.train(what, arguments, name=f"learn-{name}", seconds=seconds, until=until)
            score = learner.score(run.folder / "candidates" / name, record, steps_before=before[name])
        except BadInput as error:
            if server.problem:
                raise
            # this candidate cannot be trained; the others may
            score = Score(name, problem=str(error))
        current.scores.append(score)
        told = f"{score.acceptance_length:.2f} tokens per round, predicted speedup {score.predicted_speedup:.2f}"
        run.say(f"  {score.problem or told}")
        run.write()
    speedups = {score.name: score.predicted_speedup for score in current.scores if not score.problem}
    late = [score.name for score in current.scores if score.problem == TIME_IS_UP]
    # both best first: by scores, by gain per cost
    current.kept = survivors(speedups) or (list(learners) if number > 1 else late)[:1]
    if not current.kept:
        raise BadInput(f"no candidate could be trained: {current.scores[0].name}: {current.scores[0].problem}")
    run.write()
    return current.kept


def learn(run: AutoRun, server: TargetServer) -> Trained:
    """Trains the chosen candidate for the rest of the training time, with a decaying learning rate; the server ends.

    If there is no time for that, or it makes the candidate worse, the best checkpoint of its rungs is taken.

    Raises: BadInput if there is no head at the end.
    """
    journal, chosen = run.journal, known(run.journal.chosen)
    learner = learners_of(run, server)[chosen.name]
    earlier = head_in(run.folder / "candidates" / chosen.name, "best")
    head, score = earlier, learner.score_of(earlier) if earlier else None
    if not earlier or chosen.max_steps >= LEAST_STEPS:
        steps, output = max(chosen.max_steps, LEAST_STEPS), run.folder / "training"
        seconds = run.left_until(journal.learning_until)
        arguments = learner.final_training(steps, earlier, seconds=seconds)
        what = f"{drafter_words(chosen.name)} is chosen, and trained for {steps} more steps"
        record = server.train(what, arguments, name="learn-chosen", seconds=seconds, until=journal.learning_until)
        last = learner.score(output, record, steps_before=0)
        trained = head_in(output, "final", "best")
        own = learner.score_of(trained, seconds=record.seconds) if trained else None
        if trained and (score is None or own and own.predicted_speedup >= score.predicted_speedup):
            head, score = trained, own
        taken = f"its {Path(trained).name} checkpoint" if head == trained else "the best head of the rungs"
        if head and last.problem:
            run.say(f"warning: the last training: {last.problem}; {taken} is taken")
        elif head != trained:
            run.say(f"the last training did not make it better: {taken} is taken")
    server.close()
    if not head:
        raise BadInput(f"{chosen.name} was not trained in time: see {run.folder / 'logs'}, or give a larger --budget")
    return Trained(head, score)
