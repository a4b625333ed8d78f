"""How a measurement decodes: passes over batches of prompts, with drafts and without in turn, kept through kills."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
import torch

from ...configs.errors import BadInput, first_line
from ...heads.drafter import Drafter
from ...heads.target import Target
from ..engine import Engine, build_engine
from ..generate import Generation, check_request, decode
from ..stopping import Stop
from ..suites.prompts import FailedPrompt, PromptSource, Suite
from .config import MeasureConfig
from .result import ENGINE
from .resume import BatchStore, generations_from, record_of, settings_key
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
    key = ""
    if store is not None:
        key = settings_key(target, drafter, suite, asdict(config), name=name, engine=ENGINE, store=store)
    batches: list[MeasuredBatch] = []
    failed: list[FailedPrompt] = []
    run = runner(target, drafter, suite.prompts, config)
    is_warmed_up = False
    for number, start in enumerate(range(0, len(suite.prompts), config.batch_size)):
        part = suite.subset(range(start, min(start + config.batch_size, len(suite.prompts))))
        record = store.get(key, number) if store is not None else None
        if record is not None:
            drafted, baseline = (Side(generations_from(side)) for side in record["sides"])
            batches.append(MeasuredBatch(number, part, drafted, baseline))
            on_batch()
            continue
        try:
            for which in () if is_warmed_up else (drafter, None):  # not counted; again after a resume
                run(part.prompts, which, config.seed)
            is_warmed_up = True
            drafted, baseline = both_sides(run, part.prompts, drafter, config, number=number)
        except BadInput:  # of the settings: the prompts have been checked
            raise
        except Exception as error:  # out of memory, or a fault in a drafter: the other batches are measured
            failed += failures(part.sources, error)
        else:
            batches.append(MeasuredBatch(number, part, drafted, baseline))
            if store is not None:
                store.add(key, number, {"sides": [record_of(side.runs) for side in (drafted, baseline)]})
        on_batch()
    return batches, failed


def both_sides(
    run: Run, prompts: list[list[int]], drafter: Drafter, config: MeasureConfig, *, number: int
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


def failures(sources: Sequence[PromptSource], error: Exception) -> list[FailedPrompt]:
    """The prompts that were decoded together when an exception was raised."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    return [FailedPrompt(source.number, source.row, reason) for source in sources]


def runner(target: Target, drafter: Drafter | None, prompts: list[list[int]], config: MeasureConfig) -> Run:
    """A function that decodes a batch of these prompts with the drafter, in the config's setting, or without.

    One engine per side and batch size serves all batches, so that recorded steps are recorded once. An engine in which
    an exception was raised is not used again.
    """
    check_request(prompts, target=target, max_new_tokens=config.max_new_tokens)
    stop = Stop.of(target, strings=config.stop_strings)
    generator = torch.Generator(device=target.device) if config.temperature > 0 else None
    setting = None if drafter is None else config.setting_for(drafter)
    engines: dict[tuple[int, bool], Engine] = {}

    def run(batch: list[list[int]], which: Drafter | None, seed: int) -> Generation:
        key = len(batch), which is not None
        if key not in engines:
            engines[key] = build_engine(
                target,
                which,
                setting if which is not None else None,
                batch_size=len(batch),
                max_length=max(map(len, prompts)) + config.max_new_tokens,
                sampling=config.sampling,
                accept=config.accept_rule,
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
