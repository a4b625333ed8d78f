"""How a measurement decodes: passes over batches of prompts, with drafts and without in turn, kept through kills."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...configs.errors import BadInput, first_line
from ...heads.drafter import Drafter
from ...heads.target import Target
from ..engine import Engine
from ..generate import Generation, Stop, check_request, decode
from ..suites.prompts import FailedPrompt, Suite
from .built_engine import build_engine
from .config import MeasureConfig
from .disturbance import MOST_AGAIN, SHARE_AGAIN, ProcessorMeter, passes_disturbed
from .lossless import Unproved
from .proof import first_unproved
from .result import ENGINE
from .resume import BatchStore, Record, generations_from, kept_in, record_of
from .summary import MeasuredBatch, Side

Run = Callable[[list[list[int]], Drafter | None, int], Generation]  # a batch, the drafter or None, the seed


def measure_batches(
    target: Target,
    drafter: Drafter,
    suite: Suite,
    config: MeasureConfig,
    *,
    name: str,
    on_batch: Callable[[], object],
    store: BatchStore | None,
) -> tuple[list[MeasuredBatch], list[FailedPrompt]]:
    """Both sides of each batch that could be decoded, and the prompts of the others."""
    kept = kept_in(store, target, drafter, suite, config, name=name, engine=ENGINE)
    run = runner(target, drafter, suite.prompts, config)

    def warm_up(batch: Suite) -> None:
        for which in (drafter, None):
            run(batch.prompts, which, config.seed)

    rows = range(len(suite.prompts))
    parts = [suite.subset(rows[start : start + config.batch_size]) for start in rows[:: config.batch_size]]
    left = [max(1, len(parts) // SHARE_AGAIN)]  # batches that may still be measured again

    def decode_both(number: int, batch: Suite) -> Record:
        def once() -> tuple[Side, Side]:
            return both_sides(run, batch.prompts, drafter, config, number=number)

        sides, num_again = least_disturbed(once, most_again=MOST_AGAIN if left[0] else 0)
        left[0] -= num_again > 0
        return {
            "sides": [record_of(side.runs) for side in sides],
            "others": [side.others for side in sides],
            "num_again": num_again,
        }

    done, failed = measure_parts(parts, decode_both, warm_up, kept=kept, on_part=on_batch)
    batches = []
    for number, record in done.items():
        both = zip(record["sides"], record["others"], strict=True)
        drafted, baseline = (Side(generations_from(side), others) for side, others in both)
        batches.append(MeasuredBatch(number, parts[number], drafted, baseline, record["num_again"]))
    return batches, failed


def measure_parts(
    parts: Sequence[Suite],
    measure_part: Callable[[int, Suite], Record],
    warm_up: Callable[[Suite], object],
    *,
    kept: tuple[BatchStore, str] | None,
    on_part: Callable[[], object],
    warms_each: bool = False,
) -> tuple[dict[int, Record], list[FailedPrompt]]:
    """The records of those parts of a suite that could be decoded, by number, and the prompts of the others.

    Args:
        warm_up: not counted; before the first part that is measured, after a resume too, or with `warms_each` any.
        kept: where records are kept, and the key of this measurement there.
    """
    done: dict[int, Record] = {}
    failed: list[FailedPrompt] = []
    is_warmed_up = False
    for number, part in enumerate(parts):
        record = kept[0].get(kept[1], number) if kept else None
        if record is None:
            try:
                if warms_each or not is_warmed_up:
                    warm_up(part)
                is_warmed_up = True
                record = measure_part(number, part)
            except BadInput:  # of the settings: the prompts have been checked
                raise
            except Exception as error:  # out of memory, or a fault in a drafter: the other parts are measured
                reason = f"{type(error).__name__}: {first_line(error)}"
                failed += [FailedPrompt(source.number, source.row, reason) for source in part.sources]
                on_part()
                continue
            if kept:
                kept[0].add(kept[1], number, record)
        done[number] = record
        on_part()
    return done, failed


def both_sides(
    run: Run, prompts: list[list[int]], drafter: Drafter, config: MeasureConfig, *, number: int
) -> tuple[Side, Side]:
    """All repeats of speculation and of the baseline, in an order that alternates."""
    sides = Side(), Side()
    for repeat in range(config.num_repeats):
        order = [(0, drafter), (1, None)]
        for side, which in order if (number + repeat) % 2 == 0 else order[::-1]:
            meter = ProcessorMeter()
            sides[side].runs.append(run(prompts, which, seed_of(config.seed, number, repeat)))
            sides[side].others.append(meter.others())
    return sides


def least_disturbed(once: Callable[[], tuple[Side, Side]], *, most_again: int) -> tuple[tuple[Side, Side], int]:
    """A batch's passes, measured again as long as some are disturbed, at most so often: the attempt with the fewest
    disturbed passes, the first of several, and how often they were measured again."""
    attempts = [once()]
    counts = [num_disturbed(attempts[0])]
    while counts[-1] and len(attempts) <= most_again:
        attempts.append(once())
        counts.append(num_disturbed(attempts[-1]))
    return attempts[counts.index(min(counts))], len(attempts) - 1


def num_disturbed(sides: tuple[Side, Side]) -> int:
    """How many passes of a batch are."""
    return sum(map(bool, passes_disturbed(*sides)))


def seed_of(seed: int, batch: int, repeat: int) -> int:
    """What a pass samples with: others for each batch and repeat, the same in another measurement."""
    return int(np.random.SeedSequence([seed, batch, repeat]).generate_state(1)[0])


def runner(target: Target, drafter: Drafter | None, prompts: list[list[int]], config: MeasureConfig) -> Run:
    """A function that decodes a batch of these prompts with the drafter, in the config's setting, or without.

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
            engines[key] = engine_for(target, which, prompts, config, batch_size=len(batch), generator=generator)
        if generator is not None:
            generator.manual_seed(seed)
        try:
            return decode(engines[key], batch, max_new_tokens=config.max_new_tokens, stop=stop)
        except Exception:
            del engines[key]  # whatever state it is in, and its memory
            raise

    return run


def engine_for(
    target: Target,
    drafter: Drafter | None,
    prompts: list[list[int]],
    config: MeasureConfig,
    *,
    batch_size: int,
    generator: torch.Generator | None = None,
) -> Engine:
    """The engine that decodes batches of these prompts in the config's setting; without a drafter the baseline."""
    return build_engine(
        target,
        drafter,
        None if drafter is None else config.setting_for(drafter),
        batch_size=batch_size,
        max_length=max(map(len, prompts)) + config.max_new_tokens,
        sampling=config.sampling,
        accept=config.accept_rule,
        steps=config.steps,
        generator=generator,
    )


class Prover:
    """Replays batches of these prompts, each in an engine like that which decoded it: see `first_unproved`."""

    def __init__(self, target: Target, drafter: Drafter | None, prompts: list[list[int]], config: MeasureConfig):
        self.target, self.drafter, self.prompts, self.config = target, drafter, prompts, config
        self.stop = Stop.of(target, strings=config.stop_strings)
        self.engine: Engine | None = None  # of the latest batch size

    def __call__(self, batch: list[list[int]], run: Generation) -> Unproved:
        if self.engine is None or self.engine.batch_size != len(batch):
            self.engine = None  # its memory first
            self.engine = engine_for(self.target, self.drafter, self.prompts, self.config, batch_size=len(batch))
        return first_unproved(self.engine, batch, run, max_new_tokens=self.config.max_new_tokens, stop=self.stop)
