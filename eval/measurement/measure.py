"""One drafter on one suite: speculation and baseline interleaved in the same engine, over the same prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import torch

from ...heads.base import DraftBatch, DraftHead
from ...heads.drafter import Drafter
from ...heads.drafting import Tree
from ...heads.target import Target
from ..generate import Round
from ..suites.prompts import Suite
from .breakdown import acceptance_by, as_entries, context_label, segment_label
from .config import MeasureConfig, draft_length
from .domains import by_domain
from .drafted import asked_as_trained, beyond_training, draft_vocabulary, tree_shape
from .lossless import LosslessReport, compare_texts
from .metrics import expected_acceptance
from .passes import measure_batches
from .resume import Measured
from .sampling_check import check_sampling
from .summary import Side, rounded, summarise, timing
from .unrolled import unrolled


def measure(
    target: Target,
    drafter: Drafter,
    suite: Suite,
    config: MeasureConfig,
    *,
    name: str,
    training: dict[str, Any] | None = None,
    on_batch: Callable[[], object] = lambda: None,
    store: Measured | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure a drafter on a suite.

    Passes alternate within every batch of prompts (speculation first in one repeat, baseline first in the next), so
    that a machine whose speed drifts slows both. Both sides emit the same number of tokens at temperature 0. A batch
    in which an exception is raised is left out of all figures and named in the entry's `failed`.

    Args:
        name: what the report calls the drafter. training: what it says of its training.
        on_batch: called after each batch, for a progress bar.
        store: batches that are in it are not measured again, and those measured are put there.

    Returns: the result entry of report.json, and the raw rounds, one entry per batch, side and repeat.
    """
    num_draft = draft_length(drafter, config.tree.depth if config.tree else config.num_draft_tokens)
    places = [range(i, i + config.batch_size) for i in range(0, len(suite.prompts), config.batch_size)]
    places = [range(one.start, min(one.stop, len(suite.prompts))) for one in places]
    found, failed = measure_batches(target, drafter, suite, config, places, name=name, on_batch=on_batch, store=store)
    sides = list(found.values())
    measured = suite.only([i for batch in found for i in places[batch]])
    batches = [[suite.prompts[i] for i in places[batch]] for batch in found]
    result = summarise(target, batches, sides, config=config, num_draft=num_draft)
    label = segment_label(suite.think_tokens)
    first_runs = [spec.runs[0] for spec, _ in sides]
    texts = [[row for pair in sides for row in pair[side].runs[0].token_ids] for side in (0, 1)]
    lossless, sampling_check = LosslessReport(), None
    if config.temperature == 0:
        lossless = compared(target, measured, baseline=texts[1], speculative=texts[0])
    else:
        drafted, plain = ([texts for pair in sides for texts in texts_of(pair[side])] for side in (0, 1))
        sampling_check = asdict(check_sampling(target, measured.prompts, drafted, plain, config.sampling))
    length_label = context_label((training or {}).get("max_length"))
    by_context = as_entries(acceptance_by(measured.prompts, first_runs, num_draft_tokens=num_draft, label=length_label))
    entry = {
        "engine": "headstart",
        "drafter": name,
        "suite": suite.name,
        **suite.described(),
        "tree": config.tree_name,
        "tree_shape": tree_shape(config.tree),
        "num_drafted": config.tree.num_nodes if config.tree else num_draft,
        "draft_vocabulary": draft_vocabulary(drafter, texts[0]),
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "accept": config.accept,
        "steps": config.steps,
        "batch_size": config.batch_size,
        "num_draft_tokens": num_draft,
        "num_prompts": len(measured.prompts),
        "failed": [*suite.failed, *failed],
        "max_new_tokens": config.max_new_tokens,
        "num_repeats": config.num_repeats,
        **result,
        "timing": timing(sides, result["acceptance_length"]),
        "by_segment": as_entries(acceptance_by(measured.prompts, first_runs, num_draft_tokens=num_draft, label=label)),
        "by_context": by_context,
        "by_domain": by_domain(
            [[suite.asked[i] for i in places[batch]] for batch in found], sides, num_draft_tokens=num_draft
        ),
        "teacher_forced_acceptance_length": teacher_forced_length(
            target, drafter, batches, sides, num_draft, config.tree
        ),
        "lossless": asdict(lossless),
        "sampling_check": sampling_check,
        "trained": training,
        "beyond_training": beyond_training(training, by_context),
        "asked_as_trained": rounded(asked_as_trained(training, measured.prompts)),
    }
    return entry, raw_rounds(entry, found)


def texts_of(side: Side) -> list[list[list[int]]]:
    """The new tokens of each row of a batch: its texts in all repeats."""
    return [list(texts) for texts in zip(*(run.token_ids for run in side.runs), strict=True)]


def compared(
    target: Target, suite: Suite, baseline: Sequence[Sequence[int]], speculative: Sequence[Sequence[int]]
) -> LosslessReport:
    """`compare_texts`, with prompts named by their numbers in the whole suite."""
    report = compare_texts(target, suite.prompts, baseline=baseline, speculative=speculative)
    for one in report.divergences:
        one["prompt"] = suite.asked[one["prompt"]].number
    return report


@torch.no_grad()
def teacher_forced_length(
    target: Target, drafter: Drafter, batches: list, sides: list[tuple[Side, Side]], num_draft: int, tree: Tree | None
) -> float | None:
    """acceptance_length that the head's training-time view predicts for the very text that decoding wrote.

    It must equal the measured one up to rounds cut by max_new_tokens; a gap means that training and decoding disagree.
    None for trees, for drafters that are no heads, and where more tokens are drafted than losses were mixed for.
    """
    if tree is not None or not isinstance(drafter, DraftHead):
        return None
    if drafter.config.loss_by_depth is not None and num_draft > drafter.num_depths:
        return None
    num_rounds = num_committed = 0
    for batch, (spec, _) in zip(batches, sides, strict=True):
        for prompt, new in zip(batch, spec.runs[0].token_ids, strict=True):
            ids = torch.tensor([[*prompt, *new]], device=target.device)
            mask = torch.arange(ids.shape[1], device=target.device)[None] >= len(prompt)
            output = target.forward(ids, feature_layers=drafter.feature_layers)
            with unrolled(drafter, num_draft):
                out = drafter.loss(DraftBatch(ids, mask, output))
            counted = expected_acceptance(out.starts, out.hits, num_draft_tokens=num_draft)
            num_rounds += counted.num_rounds
            num_committed += counted.num_committed
    return rounded(num_committed / num_rounds) if num_rounds else None


def raw_rounds(entry: dict[str, Any], found: Mapping[int, tuple[Side, Side]]) -> list[dict[str, Any]]:
    """The records behind an entry, for rounds.jsonl."""
    keys = ("drafter", "suite", "tree", "temperature", "batch_size", "num_draft_tokens")
    where = {key: entry[key] for key in keys}
    rows = []
    for batch, pair in found.items():
        for side, one in zip(("speculative", "baseline"), pair, strict=True):
            for repeat, run in enumerate(one.runs):
                records = [asdict(cast(Round, r)) for r in run.rounds]
                rows.append({**where, "batch": batch, "side": side, "repeat": repeat, "rounds": records})
    return rows
