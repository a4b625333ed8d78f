"""Measures this machine: a step of the target, and for each candidate a round with its drafts and an optimizer step.

Candidates are measured untrained. Their drafts are wrong, but take the same time as those of a trained head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...configs.errors import BadInput
from ...eval.decoding.draft_setting import DraftSetting, chain
from ...eval.decoding.replay import default_steps
from ...eval.measurement.step_times import TimedCell
from ...heads.base import DraftHead
from ...heads.fit import build_skeleton_head
from ...heads.loading import TargetConfig
from ...heads.registry import build_head
from ...heads.start.closed_form import num_fitted
from ...heads.target import Target
from ...heads.targets.skeleton import NoSkeleton, load_skeleton
from ..unattended.pace import measure_step
from .candidates import Candidate, is_served
from .journal import Machine, Measured
from .prediction import LEAST_GAIN, RoundCost, bound

MOST_DRAFTED = 5  # tokens; longer chains are not considered
# size of a cut vocabulary before there are answers to count: this fraction of the target's, but at least so many tokens
VOCABULARY_FRACTION = 1 / 16
LEAST_VOCABULARY = 1024
MOST_ROWS = 64  # the largest batch that is considered for a load


@dataclass(frozen=True)
class Workload:
    """What is served, as far as step times depend on it."""

    batch_size: int
    context: int  # tokens of a row before the timed rounds
    text: Sequence[int]  # token ids from the traffic, to fill rows with
    max_new_tokens: int


def measure_machine(
    target: Target,
    candidates: Sequence[Candidate],
    work: Workload,
    *,
    engine: str,
    start_seconds: float,
    report: Callable[[Measured | None], bool],
) -> Machine:
    """Measures the baseline and the candidates in their order.

    Args:
        start_seconds: time that a command needs to start.
        report: called with None before the first candidate, then with each one measured. Once it returns False, the
            remaining candidates are excluded without being measured.
    """
    cell = timed_cell(target, work)
    for _ in range(2):
        cell.run()
    found: list[Measured] = []
    skeleton = skeleton_of(target)
    has_time = report(None)
    for candidate in candidates:
        if not has_time:
            found.append(Measured(candidate.name, out="there was no time to measure it"))
            continue
        found.append(measure_candidate(target, skeleton, candidate, work, engine=engine))
        has_time = report(found[-1])
    device, dtype = str(target.device), str(target.dtype).removeprefix("torch.")
    return Machine(
        round(cell.baseline.round_ms, 3),
        work.batch_size,
        dtype,
        device,
        start_seconds=round(start_seconds, 1),
        start_tokens=num_fitted(target.hidden_size),
        candidates=found,
    )


def timed_cell(
    target: Target,
    work: Workload,
    *,
    batch_size: int | None = None,
    head: DraftHead | None = None,
    settings: Sequence[DraftSetting] = (),
) -> TimedCell:
    """What times baseline steps and rounds for this workload. Args: batch_size: instead of the workload's."""
    return TimedCell(
        target,
        head,
        list(settings),
        batch_size=work.batch_size if batch_size is None else batch_size,
        context=work.context,
        text=work.text,
        steps=default_steps(target.device),
    )


def busy_rows(load: float, work: Workload, step_ms: Callable[[int], float]) -> tuple[int, bool]:
    """The batch size that a load leads to without drafts.

    By Little's law, the rows in service are the arrival rate times the seconds in service, and these grow with the
    number of rows. All answers are taken to have `max_new_tokens` tokens.

    Args:
        load: requests per second.
        step_ms: milliseconds of a step of the target, by number of rows.

    Returns the number of rows, and whether MOST_ROWS rows are enough for the load.
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
    """Milliseconds of a step of the target for that many rows."""
    cell = timed_cell(target, work, batch_size=rows)
    cell.run()
    return cell.baseline.round_ms


def measure_candidate(
    target: Target, skeleton: Target | None, candidate: Candidate, work: Workload, *, engine: str
) -> Measured:
    """Measures one candidate. `out` says why it is excluded: it does not fit the target or the engine, or cannot pay.

    Args: skeleton: the target without weights; None if there is none.
    """
    name = candidate.name
    if not is_served(candidate, engine, target.name):
        return Measured(name, out=f"{engine} does not load heads of this family with this target")
    try:
        if skeleton is not None and build_skeleton_head(candidate.head, skeleton).adapts_target:
            raise BadInput("it changes the target's weights, and with them the text")
        candidate = candidate.with_vocabulary(assumed_vocabulary(target))
        vocabulary_size = candidate.head.draft_vocab_size
        ids = None if vocabulary_size is None else torch.arange(vocabulary_size)
        head = build_head(candidate.head, target, draft_token_ids=ids)
        parameters = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
        row_length = work.context + work.max_new_tokens // 2
        seconds = measure_step(target, head, candidate.train, work.text, row_length=row_length)
        costs = round_costs(target, head, work)
    except BadInput as error:
        return Measured(name, out=str(error))
    best = bound(costs, longest_chain(head))
    out = ""
    if best.speedup < LEAST_GAIN:
        out = f"even with most of its drafts accepted, the speedup would be {best.speedup:.2f}"
    return Measured(
        name,
        parameters=parameters,
        costs=costs,
        bound=best.speedup,
        bound_num_draft_tokens=best.num_draft_tokens,
        step_seconds=max(round(seconds.step, 4), 1e-4),
        token_seconds=seconds.token,
        out=out,
    )


def skeleton_of(target: Target) -> Target | None:
    """The target without weights; None if it cannot be built without them."""
    try:
        return load_skeleton(TargetConfig(path=target.name))
    except NoSkeleton:
        return None


def assumed_vocabulary(target: Target) -> int | None:
    """Size of a cut draft vocabulary before there are answers to count; None if the target's is hardly larger."""
    size = max(int(target.vocab_size * VOCABULARY_FRACTION), LEAST_VOCABULARY)
    return size if size < target.vocab_size else None


def longest_chain(head: DraftHead) -> int:
    """Tokens of the longest chain that is considered for a head."""
    return min(head.max_draft_tokens or max(head.num_depths, head.default_draft_tokens), MOST_DRAFTED)


def round_costs(target: Target, head: DraftHead, work: Workload) -> list[RoundCost]:
    """Costs of rounds with the shortest chain, the longest one and one in between, relative to the baseline."""
    head = head.to(target.dtype).eval().requires_grad_(False)
    head.pack()
    longest = longest_chain(head)
    settings = [chain(length) for length in sorted({1, (longest + 1) // 2, longest})]
    cell = timed_cell(target, work, head=head, settings=settings)
    cell.run()
    base = cell.baseline.round_ms
    return [RoundCost(time.num_draft_tokens, round(time.round_ms / base, 4)) for time in cell.rounds]
