"""One drafter on one suite: speculation and baseline interleaved in the same engine, over the same prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch

from ..configs.errors import BadInput, first_line
from ..heads.base import DraftBatch, Drafter, DraftHead
from ..heads.drafting import Tree
from ..heads.target import Target
from .breakdown import acceptance_by, as_entries, context_label, segment_label
from .domains import by_domain
from .drafted import asked_as_trained, beyond_training, draft_vocabulary, tree_shape
from .engine import Engine, draft_length
from .generate import Generation, Round, check_request, decode
from .lossless import LosslessReport, compare_texts
from .measured import Measured, as_record, from_record, settings_key
from .metrics import expected_acceptance
from .sampling_check import check_sampling
from .stopping import Stop
from .suites import Asked, Suite
from .summary import Side, rounded, summarise, timing
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

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


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


def measure_batches(
    target: Target,
    drafter: Drafter,
    suite: Suite,
    config: MeasureConfig,
    places: Sequence[range],
    *,
    name: str,
    on_batch: Callable[[], object],
    store: Measured | None,
) -> tuple[dict[int, tuple[Side, Side]], list[dict[str, Any]]]:
    """Both sides of each batch that could be decoded, and `failed` of the others. Args: places: of each batch's prompts
    in the suite."""
    key = ""
    if store is not None:
        key = settings_key(target, drafter, suite, asdict(config), name=name, engine="headstart", store=store)
    found: dict[int, tuple[Side, Side]] = {}
    failed: list[dict[str, Any]] = []
    run = runner(target, drafter, suite.prompts, config)
    is_warm = False
    for i, batch in enumerate(places):
        record = store.get(key, i) if store else None
        if record is not None:
            spec, base = (Side(from_record(side)) for side in record["sides"])
            found[i] = spec, base
            on_batch()
            continue
        prompts = [suite.prompts[place] for place in batch]
        try:
            for which in () if is_warm else (drafter, None):  # warm-up, not counted; again after a resume
                run(prompts, which, config.seed)
            is_warm = True
            found[i] = measure_batch(run, prompts, drafter, config, number=i)
        except BadInput:  # of the settings: the prompts have been checked
            raise
        except Exception as error:  # out of memory, or a fault in a drafter: the other batches stand
            failed += failures([suite.asked[place] for place in batch], error)
        else:
            if store is not None:
                store.add(key, i, {"sides": [as_record(side.runs) for side in found[i]]})
        on_batch()
    return found, failed


def measure_batch(
    run: Callable[[list[list[int]], Drafter | None, int], Generation],
    prompts: list[list[int]],
    drafter: Drafter,
    config: MeasureConfig,
    *,
    number: int,
) -> tuple[Side, Side]:
    """All repeats of speculation and of the baseline, in an order that alternates."""
    sides = Side(), Side()
    for repeat in range(config.num_repeats):
        order = [(0, drafter), (1, None)]
        for side, which in order if (number + repeat) % 2 == 0 else order[::-1]:
            sides[side].runs.append(run(prompts, which, seed_of(config.seed, number, repeat)))
    return sides


def seed_of(seed: int, batch: int, repeat: int) -> int:
    """What a pass samples with: others for each batch and repeat, the same in another measurement."""
    return int(np.random.SeedSequence([seed, batch, repeat]).generate_state(1)[0])


def texts_of(side: Side) -> list[list[list[int]]]:
    """The new tokens of each row of a batch: its texts in all repeats."""
    return [list(texts) for texts in zip(*(run.token_ids for run in side.runs), strict=True)]


def failures(asked: Sequence[Asked], error: Exception) -> list[dict[str, Any]]:
    """The report's `failed` of prompts that were decoded together when an exception was raised."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    return [{"prompt": one.number, "row": one.row, "reason": reason} for one in asked]


def compared(
    target: Target, suite: Suite, baseline: Sequence[Sequence[int]], speculative: Sequence[Sequence[int]]
) -> LosslessReport:
    """`compare_texts`, with prompts named by their numbers in the whole suite."""
    report = compare_texts(target, suite.prompts, baseline=baseline, speculative=speculative)
    for one in report.divergences:
        one["prompt"] = suite.asked[one["prompt"]].number
    return report


def runner(
    target: Target, drafter: Drafter | None, prompts: list[list[int]], config: MeasureConfig
) -> Callable[[list[list[int]], Drafter | None, int], Generation]:
    """A function that decodes a batch of these prompts with the drafter, or without: the batch, which one, the seed.

    One engine per side and batch size serves all batches, so that recorded steps are recorded once. An engine in which
    an exception was raised is not used again.
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
                sampling=config.sampling,
                accept=config.accept,
                steps=config.steps,
                generator=generator,
            )
        if generator is not None:
            generator.manual_seed(seed)
        try:
            return decode(engines[key], batch, max_new_tokens=config.max_new_tokens, stop=stop)
        except Exception:
            del engines[key]  # whatever state it is in, and its memory
            raise

    return run


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
