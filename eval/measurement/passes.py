"""How a measurement decodes: passes over batches of prompts, with drafts and without in turn, kept through kills."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ...configs.errors import BadInput, first_line
from ...heads.drafter import Drafter
from ...heads.target import Target
from ..engine import Engine
from ..generate import Generation, check_request, decode
from ..stopping import Stop
from ..suites.prompts import Asked, Suite
from .config import MeasureConfig
from .resume import Measured, as_record, from_record, settings_key
from .summary import Side


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


def failures(asked: Sequence[Asked], error: Exception) -> list[dict[str, Any]]:
    """The report's `failed` of prompts that were decoded together when an exception was raised."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    return [{"prompt": one.number, "row": one.row, "reason": reason} for one in asked]


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
