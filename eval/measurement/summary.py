"""The numbers of a result entry, all derived from the rounds of both sides."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...heads.target import Target
from ..generate import Generation
from .bandwidth import baseline_bandwidth
from .breakdown import conventions
from .config import MeasureConfig
from .metrics import Acceptance, acceptance, bootstrap_ratio


@dataclass
class Side:
    """Everything one side (speculation or baseline) did with one batch of prompts, a generation per repeat."""

    runs: list[Generation] = field(default_factory=list)

    @property
    def prefill_seconds(self) -> float:
        return sum(run.rounds[0].seconds for run in self.runs)

    @property
    def decode_seconds(self) -> float:
        """From each row's first token to its last."""
        return sum(one.seconds for run in self.runs for one in run.rounds[1:])

    @property
    def decode_tokens(self) -> int:
        """Emitted tokens but the first of each row, which the prefill gives."""
        return sum(sum(one.num_emitted) for run in self.runs for one in run.rounds[1:])

    @property
    def seconds_per_token(self) -> float:
        return self.decode_seconds / max(1, self.decode_tokens)


def summarise(
    target: Target, batches: list, sides: list[tuple[Side, Side]], *, config: MeasureConfig, num_draft: int
) -> dict[str, Any]:
    """The numbers of a result entry, all derived from the rounds. batches: the prompts behind each pair of sides."""
    # greedy repeats count the same rounds: acceptance is taken from the first; sampled ones differ: from all
    counted_runs = 1 if config.temperature == 0 else config.num_repeats
    rounds = [one for spec, _ in sides for run in spec.runs[:counted_runs] for one in run.rounds]
    counted: Acceptance = acceptance(rounds, num_draft_tokens=num_draft)
    # seconds per token and prompt, weighted by the tokens that speculation emitted: equal tokens on both sides
    tokens = [spec.decode_tokens for spec, _ in sides]
    spec_seconds = [spec.decode_seconds for spec, _ in sides]
    base_seconds = [base.seconds_per_token * spec.decode_tokens for spec, base in sides]
    timed = timed_pairs(sides)
    speedup, interval = speedup_of(timed)
    spec_whole = sum(spec.prefill_seconds for spec, _ in sides) + sum(spec_seconds)
    base_whole = sum(base.prefill_seconds for _, base in sides) + sum(base_seconds)
    total, spec_total, base_total = sum(tokens), sum(spec_seconds), sum(base_seconds)
    return {
        "num_tokens": sum(len(row) for spec, _ in sides for run in spec.runs[:counted_runs] for row in run.token_ids),
        "num_rounds": counted.num_rounds,
        "num_committed": counted.num_committed,
        "acceptance_length": rounded(counted.length),
        "acceptance_rate": [rounded(rate) for rate in counted.rate],
        "tokens_per_second": rounded(total / spec_total if spec_total else None, 2),
        "baseline_tokens_per_second": rounded(total / base_total if base_total else None, 2),
        "speedup": rounded(speedup),
        "speedup_ci95": [rounded(x) for x in interval],
        **speedup_percentiles(timed),
        "conventions": conventions(counted, num_tokens=total // config.num_repeats * counted_runs),
        "end_to_end_speedup": rounded(base_whole / spec_whole if sides else None),
        "ttft_ms": first_token_ms(spec for spec, _ in sides),
        "baseline_ttft_ms": first_token_ms(base for _, base in sides),
        "time_per_output_token_ms": rounded(1000 * spec_total / max(1, total), 3),
        "baseline_time_per_output_token_ms": rounded(1000 * base_total / max(1, total), 3),
        "baseline_bandwidth": baseline_bandwidth(
            target, [(prompts, base.runs) for prompts, (_, base) in zip(batches, sides, strict=True)]
        ),
    }


def timed_pairs(sides: Sequence[tuple[Side, Side]]) -> list[tuple[float, float]]:
    """Baseline and speculative seconds for as many tokens as speculation emitted, of each prompt or batch.

    Answers that end with their first token leave nothing to time, and are left out.
    """
    pairs = ((base.seconds_per_token * spec.decode_tokens, spec.decode_seconds) for spec, base in sides)
    return [(base, spec) for base, spec in pairs if base and spec]


def speedup_of(timed: Sequence[tuple[float, float]]) -> tuple[float | None, list[Any]]:
    """Summed baseline time over summed speculative time, and its 95 % interval; None where nothing was timed."""
    return bootstrap_ratio(*zip(*timed, strict=True)) if timed else (None, [None, None])


def first_token_ms(sides: Iterable[Side]) -> float | None:
    """The median over batches of the mean over repeats."""
    seconds = [side.prefill_seconds / len(side.runs) for side in sides]
    return rounded(1000 * statistics.median(seconds), 3) if seconds else None


def speedup_percentiles(timed: Iterable[tuple[float, float]]) -> dict[str, float | None]:
    """What the slowest, middling and fastest prompts (batches) see, interpolated linearly between them.

    Args: timed: baseline and speculative seconds for equal tokens, one pair per prompt or batch.
    """
    names = ("speedup_p10", "speedup_median", "speedup_p90")
    ratios = torch.tensor([base / spec for base, spec in timed], dtype=torch.float64)
    if not len(ratios):
        return dict.fromkeys(names)
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    return {name: rounded(x) for name, x in zip(names, ratios.quantile(shares).tolist(), strict=True)}


def timing(sides: list[tuple[Side, Side]], acceptance_length: float | None) -> dict[str, float | None]:
    """Where a round's time goes, mean milliseconds, and what speedup that explains.

    formula_speedup = acceptance_length * baseline_ms / (draft_ms + verify_ms + overhead_ms): what rounds that all
    commit the mean would give. It differs from the measured speedup by last rounds that max_new_tokens cuts and, at
    batch size > 1, by rows that end early.
    """
    rounds = [one for spec, _ in sides for run in spec.runs for one in run.rounds[1:]]
    steps = [one for _, base in sides for run in base.runs for one in run.rounds[1:]]
    if not rounds or not steps or acceptance_length is None:
        return dict.fromkeys(("draft_ms", "verify_ms", "overhead_ms", "baseline_ms", "formula_speedup"))
    whole = 1000 * statistics.fmean(one.seconds for one in rounds)
    draft = 1000 * statistics.fmean(one.draft_seconds for one in rounds)
    verify = 1000 * statistics.fmean(one.verify_seconds for one in rounds)
    baseline = 1000 * statistics.fmean(one.seconds for one in steps)
    return {
        "draft_ms": rounded(draft),
        "verify_ms": rounded(verify),
        "overhead_ms": rounded(whole - draft - verify),
        "baseline_ms": rounded(baseline),
        "formula_speedup": rounded(acceptance_length * baseline / whole),
    }


def rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
