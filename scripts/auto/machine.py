"""What this machine does with this target: a step, a round that drafts with each candidate, and an optimizer step.

Heads are fresh: their drafts are wrong, which a round does not notice until its end, so that its time is that of a
trained one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...configs.errors import BadInput
from ...eval.measurement.config import chain
from ...eval.measurement.step_times import TimedCell
from ...heads.base import DraftHead
from ...heads.fit import NoSkeleton, build_skeleton_head, load_skeleton
from ...heads.loading import TargetConfig
from ...heads.registry import build_head
from ...heads.target import Target
from ..unattended.pace import learning_seconds
from .candidates import Candidate, is_served
from .journal import Machine, Measured
from .prediction import LEAST_GAIN, RoundCost, bound

MOST_DRAFTED = 5  # the longest chain that is considered
VOCABULARY_SHARE = 16  # a cut vocabulary, before the answers are known, is one in so many of the target's tokens,
LEAST_VOCABULARY = 1024  # and at least so many
MOST_ROWS = 64  # that a load is spread over


@dataclass(frozen=True)
class Workload:
    """What is decoded and learnt. text: tokens of the traffic. context: before a round."""

    batch_size: int
    context: int
    text: Sequence[int]
    max_new_tokens: int


def measure_machine(
    target: Target,
    candidates: Sequence[Candidate],
    work: Workload,
    *,
    engine: str,
    start_seconds: float,
    go_on: Callable[[Measured | None], bool],
) -> Machine:
    """Args: go_on: called before the first candidate and after each; False: the rest is left out, for lack of time."""
    steps = steps_of(target)
    cell = TimedCell(target, None, [], batch_size=work.batch_size, context=work.context, text=work.text, steps=steps)
    for _ in range(2):
        cell.run()
    found: list[Measured] = []
    skeleton = skeleton_of(target)
    is_on = go_on(None)
    for candidate in candidates:
        if not is_on:
            found.append(Measured(candidate.name, out="there was no time to measure it"))
            continue
        found.append(measured(target, skeleton, candidate, work, engine=engine, steps=steps))
        is_on = go_on(found[-1])
    device, dtype = str(target.device), str(target.dtype).removeprefix("torch.")
    return Machine(round(cell.baseline.round_ms, 3), work.batch_size, dtype, device, round(start_seconds, 1), found)


def busy_rows(load: float, work: Workload, step_ms: Callable[[int], float]) -> tuple[int, bool]:
    """Rows that so many requests per second keep busy without drafts, and whether MOST_ROWS serve them all.

    Little's law: rows = rate * seconds in service, which grow with the rows. Answers count as of full length.
    Args: step_ms: of a step of the target, by rows.
    """
    rows = 1
    while True:
        busy = load * work.max_new_tokens * step_ms(rows) / 1000
        if busy <= rows:
            return max(1, round(busy)), True
        if rows == MOST_ROWS:
            return MOST_ROWS, False
        rows *= 2


def baseline_ms(target: Target, work: Workload, rows: int) -> float:
    """A step of the target for that many rows."""
    cell = TimedCell(target, None, [], batch_size=rows, context=work.context, text=work.text, steps=steps_of(target))
    cell.run()
    return cell.baseline.round_ms


def steps_of(target: Target) -> str:
    return "eager" if target.device.type == "cpu" else "graph"


def measured(
    target: Target, skeleton: Target | None, candidate: Candidate, work: Workload, *, engine: str, steps: str
) -> Measured:
    """One candidate; where it cannot be of this target, or cannot pay, with the reason."""
    name = candidate.name
    if not is_served(candidate, engine):
        return Measured(name, out=f"{engine} loads no heads of this family")
    try:
        if skeleton is not None and build_skeleton_head(candidate.head, skeleton).adapts_target:
            raise BadInput("it changes the target, whose text would be another")
        size = guessed_vocabulary(target)
        candidate = candidate.with_vocabulary(size)
        ids = None if candidate.head.draft_vocab_size is None else torch.arange(candidate.head.draft_vocab_size)
        head = build_head(candidate.head, target, draft_token_ids=ids)
        parameters = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
        length = work.context + work.max_new_tokens // 2
        seconds = learning_seconds(target, head, candidate.train, work.text, length=length)
        costs = drafting_costs(target, head, work, steps)
    except BadInput as error:
        return Measured(name, out=str(error))
    best = bound(costs, longest(head))
    short = f"even with most of its drafts accepted, {best.speedup:.2f} times the speed at best"
    out = "" if best.speedup >= LEAST_GAIN else short
    return Measured(name, parameters, costs, best.speedup, best.num_draft_tokens, max(round(seconds, 4), 1e-4), out)


def skeleton_of(target: Target) -> Target | None:
    """The target without weights; None if it cannot be built without them."""
    try:
        return load_skeleton(TargetConfig(path=target.name))
    except NoSkeleton:
        return None


def guessed_vocabulary(target: Target) -> int | None:
    """Tokens of a cut draft vocabulary before there are answers to count."""
    size = max(target.vocab_size // VOCABULARY_SHARE, LEAST_VOCABULARY)
    return size if size < target.vocab_size else None


def longest(head: DraftHead) -> int:
    """The longest chain that is considered for a head."""
    return min(head.max_draft_tokens or max(head.num_depths, head.default_draft_tokens), MOST_DRAFTED)


def drafting_costs(target: Target, head: DraftHead, work: Workload, steps: str) -> list[RoundCost]:
    """Rounds of the shortest chain, the longest, and one between them, in baseline steps measured beside them."""
    head = head.to(target.dtype).eval().requires_grad_(False)
    head.pack()
    most = longest(head)
    settings = [chain(length) for length in sorted({1, (most + 1) // 2, most})]
    size, context = work.batch_size, work.context
    cell = TimedCell(target, head, settings, batch_size=size, context=context, text=work.text, steps=steps)
    cell.run()
    base = cell.baseline.round_ms
    return [RoundCost(time.num_draft_tokens, round(time.round_ms / base, 4)) for time in cell.rounds]
