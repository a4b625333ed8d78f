"""The stages of `headstart auto` and of `headstart refit`, in order, and what runs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from . import evaluation, refit
from .answers import answer, end_of_answers
from .candidates import OURS
from .machine import split_and_measure
from .reading import RefitRun
from .rungs import choose, learn
from .session import AutoRun, Session

R = TypeVar("R", bound=Session)


@dataclass(frozen=True)
class Stage(Generic[R]):
    """A part of a run, which finds the value of a field of the journal.

    find: raises BadInput on what the user can correct, and SystemExit after a signal to stop.
    """

    field: str
    find: Callable[[R], Any]
    is_needed: Callable[[R], bool] = lambda run: True


def can_learn(run: AutoRun) -> bool:
    """Whether a head may pay."""
    return bool(run.machine.able)


def can_evaluate(run: AutoRun) -> bool:
    """Whether there is a drafter to measure: look-ups need no training, but our engine."""
    return can_learn(run) or run.settings.engine == OURS


AUTO: Sequence[Stage[AutoRun]] = (
    Stage("machine", split_and_measure),
    Stage("least_budget", evaluation.check_budget),
    Stage("answers_until", end_of_answers, can_learn),
    Stage("answers", answer, can_learn),
    Stage("learning_until", evaluation.end_of_learning, can_learn),
    Stage("chosen", choose, can_learn),
    Stage("trained", learn, can_learn),
    Stage("evaluation", evaluation.plan_evaluation, can_evaluate),
    Stage("report", evaluation.evaluate, can_evaluate),
    Stage("sizes", evaluation.plan_sizes, lambda run: evaluation.sizes_seconds(run) > 0),
    Stage("decision", evaluation.decide),
)

REFIT: Sequence[Stage[RefitRun]] = (
    Stage("found", refit.find_rows),
    Stage("reading_until", refit.end_of_reading),
    Stage("own", refit.answer_itself),
    Stage("foreign", refit.read),
    Stage("drift", refit.drift),
    Stage("decision", refit.refuse_few),
    Stage("plan", refit.plan_training),
    Stage("trained", refit.train),
    Stage("shares", refit.try_shares),
    Stage("head", refit.choose_share),
    Stage("compared", refit.compare_heads),
    Stage("decision", refit.decide),
)


def run_stages(run: R, stages: Sequence[Stage[R]], write_page: Callable[[R], list[str]]) -> None:
    """Runs the stages up to a decision, writes the page, and prints the lines that it returns.

    The journal is written behind each stage, and a stage whose field is filled is skipped: a killed run resumes.
    """
    for stage in stages:
        if run.journal.decision is None and not getattr(run.journal, stage.field) and stage.is_needed(run):
            setattr(run.journal, stage.field, stage.find(run))
            run.write()
    for line in write_page(run):
        run.print(line)
