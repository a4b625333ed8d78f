"""One drafter on one suite: speculation and baseline interleaved in the same engine, over the same prompts."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch

from ..configs.errors import BadInput
from ..heads.base import DraftBatch, Drafter, DraftHead
from ..heads.drafting import Tree
from ..heads.target import Target
from .bandwidth import baseline_bandwidth
from .breakdown import acceptance_by, as_entries, context_label, conventions, segment_label
from .drafted import asked_as_trained, draft_vocabulary, tree_shape
from .engine import Engine, draft_length
from .generate import Generation, Round, check_request, decode
from .lossless import LosslessReport, compare_texts
from .metrics import Acceptance, acceptance, bootstrap_ratio, expected_acceptance
from .stopping import Stop
from .suites import Suite
from .verify import Sampling


@dataclass(kw_only=True)
class MeasureConfig:
    """How to measure.

    num_draft_tokens: K of chains; None: the drafter's default. tree: draft trees of this shape instead; tree_name is
    what the report calls it. accept, steps: as `Engine` takes them. stop_strings: texts that end an answer.
    num_repeats: timed passes over the suite per side, after a warm-up, in alternating order.
    """

    num_draft_tokens: int | None = None
    tree: Tree | None = None
    tree_name: str = "chain"
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    accept: str = "exact"
    steps: str = "eager"
    stop_strings: tuple[str, ...] = ()
    batch_size: int = 1
    num_repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_repeats"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} {getattr(self, name)}: expected at least 1")


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


def measure(
    target: Target,
    drafter: Drafter,
    suite: Suite,
    config: MeasureConfig,
    *,
    name: str,
    training: dict[str, Any] | None = None,
    on_batch: Callable[[], object] = lambda: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure a drafter on a suite.

    Passes alternate within every batch of prompts (speculation first in one repeat, baseline first in the next), so
    that a machine whose speed drifts slows both. Both sides emit the same number of tokens at temperature 0.

    Args: name: what the report calls the drafter. training: what it says of its training. on_batch: called after each
        batch, for a progress bar.

    Returns: the result entry of report.json, and the raw rounds, one entry per batch, side and repeat.
    """
    num_draft = draft_length(drafter, config.tree.depth if config.tree else config.num_draft_tokens)
    size = config.batch_size
    batches = [suite.prompts[i : i + size] for i in range(0, len(suite.prompts), size)]
    sides: list[tuple[Side, Side]] = [(Side(), Side()) for _ in batches]

    run = runner(target, drafter, suite.prompts, config)
    for which in (drafter, None):  # warm-up, not counted
        run(batches[0], which, config.seed)
    for i, batch in enumerate(batches):
        for repeat in range(config.num_repeats):
            order = [(0, drafter), (1, None)]
            for side, which in order if (i + repeat) % 2 == 0 else order[::-1]:
                sides[i][side].runs.append(run(batch, which, config.seed + repeat))
        on_batch()
    result = summarise(target, batches, sides, config=config, num_draft=num_draft)
    lossless = LosslessReport()
    if config.temperature == 0:
        texts = [[row for pair in sides for row in pair[side].runs[0].token_ids] for side in (0, 1)]
        lossless = compare_texts(target, suite.prompts, baseline=texts[1], speculative=texts[0])
    label = segment_label(suite.think_tokens)
    first_runs = [spec.runs[0] for spec, _ in sides]
    entry = {
        "engine": "headstart",
        "drafter": name,
        "suite": suite.name,
        "tree": config.tree_name,
        "tree_shape": tree_shape(config.tree),
        "num_drafted": config.tree.num_nodes if config.tree else num_draft,
        "draft_vocabulary": draft_vocabulary(drafter, (row for run in first_runs for row in run.token_ids)),
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "accept": config.accept,
        "steps": config.steps,
        "batch_size": size,
        "num_draft_tokens": num_draft,
        "num_prompts": len(suite.prompts),
        "max_new_tokens": config.max_new_tokens,
        "num_repeats": config.num_repeats,
        **result,
        "timing": timing(sides, result["acceptance_length"]),
        "by_segment": as_entries(acceptance_by(suite.prompts, first_runs, num_draft_tokens=num_draft, label=label)),
        "by_context": as_entries(
            acceptance_by(
                suite.prompts,
                first_runs,
                num_draft_tokens=num_draft,
                label=context_label((training or {}).get("max_length")),
            )
        ),
        "teacher_forced_acceptance_length": teacher_forced_length(
            target, drafter, batches, sides, num_draft, config.tree
        ),
        "lossless": asdict(lossless),
        "trained": training,
        "asked_as_trained": rounded(asked_as_trained(training, suite.prompts)),
    }
    return entry, raw_rounds(entry, sides)


def runner(
    target: Target, drafter: Drafter | None, prompts: list[list[int]], config: MeasureConfig
) -> Callable[[list[list[int]], Drafter | None, int], Generation]:
    """A function that decodes a batch of these prompts with the drafter, or without: the batch, which one, the seed.

    One engine per side and batch size serves all batches, so that recorded steps are recorded once.
    """
    check_request(prompts, target=target, max_new_tokens=config.max_new_tokens)
    stop = Stop.of(target, strings=config.stop_strings)
    generator = torch.Generator(device=target.device) if config.temperature > 0 else None
    engines: dict[tuple[int, bool], Engine] = {}

    def run(batch: list[list[int]], which: Drafter | None, seed: int) -> Generation:
        key = len(batch), which is not None
        if key not in engines:
            engines[key] = Engine(
                target,
                which,
                batch_size=len(batch),
                max_length=max(map(len, prompts)) + config.max_new_tokens,
                num_draft_tokens=config.num_draft_tokens if which is not None else None,
                tree=config.tree if which is not None else None,
                sampling=Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p),
                accept=config.accept,
                steps=config.steps,
                generator=generator,
            )
        if generator is not None:
            generator.manual_seed(seed)
        return decode(engines[key], batch, max_new_tokens=config.max_new_tokens, stop=stop)

    return run


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
    # answers that end with their first token leave nothing to time
    timed = [(base, spec) for base, spec in zip(base_seconds, spec_seconds, strict=True) if base and spec]
    speedup, interval = bootstrap_ratio(*zip(*timed, strict=True)) if timed else (None, [None, None])
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
        "end_to_end_speedup": rounded(base_whole / spec_whole),
        "ttft_ms": rounded(1000 * statistics.median(s.prefill_seconds / len(s.runs) for s, _ in sides), 3),
        "baseline_ttft_ms": rounded(1000 * statistics.median(b.prefill_seconds / len(b.runs) for _, b in sides), 3),
        "time_per_output_token_ms": rounded(1000 * spec_total / max(1, total), 3),
        "baseline_time_per_output_token_ms": rounded(1000 * base_total / max(1, total), 3),
        "baseline_bandwidth": baseline_bandwidth(
            target, [(prompts, base.runs) for prompts, (_, base) in zip(batches, sides, strict=True)]
        ),
    }


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


@torch.no_grad()
def teacher_forced_length(
    target: Target, drafter: Drafter, batches: list, sides: list[tuple[Side, Side]], num_draft: int, tree: Tree | None
) -> float | None:
    """acceptance_length that the head's training-time view predicts for the very text that decoding wrote.

    It must equal the measured one up to rounds cut by max_new_tokens; a gap means that training and decoding disagree.
    None for trees, for drafters that are no heads, and where more tokens are drafted than the head unrolls.
    """
    if tree is not None or not isinstance(drafter, DraftHead) or num_draft > drafter.num_depths:
        return None
    num_rounds = num_committed = 0
    for batch, (spec, _) in zip(batches, sides, strict=True):
        for prompt, new in zip(batch, spec.runs[0].token_ids, strict=True):
            ids = torch.tensor([[*prompt, *new]], device=target.device)
            mask = torch.arange(ids.shape[1], device=target.device)[None] >= len(prompt)
            output = target.forward(ids, feature_layers=drafter.feature_layers)
            out = drafter.loss(DraftBatch(ids, mask, output))
            counted = expected_acceptance(out.starts, out.hits, num_draft_tokens=num_draft)
            num_rounds += counted.num_rounds
            num_committed += counted.num_committed
    return rounded(num_committed / num_rounds) if num_rounds else None


def raw_rounds(entry: dict[str, Any], sides: list[tuple[Side, Side]]) -> list[dict[str, Any]]:
    """The records behind an entry, for rounds.jsonl."""
    keys = ("drafter", "suite", "tree", "temperature", "batch_size", "num_draft_tokens")
    where = {key: entry[key] for key in keys}
    rows = []
    for batch, pair in enumerate(sides):
        for side, one in zip(("speculative", "baseline"), pair, strict=True):
            for repeat, run in enumerate(one.runs):
                records = [asdict(cast(Round, r)) for r in run.rounds]
                rows.append({**where, "batch": batch, "side": side, "repeat": repeat, "rounds": records})
    return rows


def rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
