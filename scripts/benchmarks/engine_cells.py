"""The cells of the engine's benchmark: what is timed or decoded in one go, and how."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...configs.errors import first_line
from ...eval.drafters.synthetic import BlankDrafter, SyntheticDrafter, expected_length
from ...eval.measurement.bandwidth import bytes_per_step, cache_bytes, free_memory
from ...eval.measurement.config import DraftSetting, chains
from ...eval.measurement.measure import MeasureConfig, measure
from ...eval.measurement.step_times import NUM_ROUNDS, Place, check_room, most_tokens
from ...eval.suites.prompts import Suite
from ...heads.base import DraftHead
from ...heads.drafter import Drafter
from ...heads.loading import release_memory
from ...heads.registry import HEADS, build_head
from ...heads.target import Target
from .engine_shapes import Shape, random_prompts

NUM_DRAFT = 5
MAIN = "eagle3"  # the family whose chain is timed at every batch size and context, and eagerly


@dataclass(frozen=True)
class Cell:
    """What is measured in one go, beside baseline steps. head: whose drafts; None: drafts that cost nothing.

    num_draft_tokens: asked for, 0: the baseline alone; a family drafts as many as it can of them. rates: of synthetic
    acceptance, which is decoded in earnest; none: rounds are timed.
    """

    name: str
    steps: str
    batch_size: int
    context: int
    head: str | None = None
    num_draft_tokens: int = 0
    num_passes: int = 0
    rates: tuple[float, ...] = ()


def cells_of(shape: Shape, steps: str, rates: Mapping[str, Sequence[float]]) -> list[Cell]:
    """All cells, those that bars are about first, and one after the other those that share a head."""
    usual: dict[str, Any] = {"batch_size": 1, "context": shape.context, "steps": steps, "num_passes": shape.num_passes}
    found = [Cell("baseline", **{**usual, "num_passes": 2 * shape.num_passes})]
    found += [Cell(f"verify {n}", num_draft_tokens=n - 1, **usual) for n in shape.verified if n > 1]
    for family in sorted(HEADS, key=lambda family: family != MAIN):
        drafts = {"head": family, "num_draft_tokens": NUM_DRAFT}
        found.append(Cell(f"draft {family}", **usual, **drafts))
        decoded = {**usual, "num_passes": shape.num_repeats, "rates": tuple(rates[family])}
        found.append(Cell(f"synthetic {family}", **decoded, **drafts))
    drafts = {"head": MAIN, "num_draft_tokens": NUM_DRAFT}
    if steps != "eager":  # slow: one cell
        found.append(Cell(f"eager {MAIN}", **{**usual, "steps": "eager", "num_passes": 2}, **drafts))
    places = [(size, shape.context) for size in shape.batch_sizes]
    places += [(size, context) for context in shape.contexts[1:] for size in shape.long_batch_sizes]
    for size, context in places:
        name = f"batch {size} context {context}"
        found.append(Cell(name, **{**usual, "batch_size": size, "context": context}, **drafts))
    if steps != "eager":  # last: compiling takes minutes
        found.append(Cell(f"compile {MAIN}", **{**usual, "steps": "compile"}, **drafts))
    return found


class Workbench:
    """A target, and what its cells share: one head at a time, and the texts of synthetic acceptance."""

    def __init__(self, target: Target, shape: Shape):
        self.target, self.shape = target, shape
        self.heads: dict[str, DraftHead] = {}
        self.text = random_prompts(shape, count=1, length=4 * max(shape.contexts))[0]

    def attempt(self, cell: Cell) -> dict[str, Any]:
        """The cell's figures; or `left_out`, why it was not tried, or `failed`, what was raised. Frees its memory."""
        release_memory()
        reason = left_out(self.target, cell, available=free_memory(self.target.device))
        if reason is not None:
            return {"left_out": reason}
        try:
            return self.decode(cell) if cell.rates else self.time(cell)
        except Exception as error:  # out of memory, a step that cannot be captured: the other cells stand
            reason = f"{type(error).__name__}: {first_line(error)}"
        release_memory()
        return {"failed": reason}

    def time(self, cell: Cell) -> dict[str, Any]:
        """Rounds, each pass beside baseline steps."""
        drafter, settings = self.drafted(cell)
        check_room(self.target, [cell.context], settings)
        how: dict[str, Any] = {"batch_size": cell.batch_size, "context": cell.context, "steps": cell.steps}
        place = Place(self.target, drafter, settings, text=self.text, **how)
        for _ in range(cell.num_passes):
            place.run(reads_again=cell.batch_size == 1 and cell.context == self.shape.context)  # cheap there alone
        return timed_figures(place)

    def decode(self, cell: Cell) -> dict[str, Any]:
        """Texts with drafts that are right at the cell's rates, and without. The head's time counts, not its drafts."""
        head, settings = self.drafted(cell)
        drafter, num_draft = self.synthetic.around(head, cell.rates), settings[0].num_draft_tokens
        config = MeasureConfig(
            num_draft_tokens=num_draft,
            max_new_tokens=self.shape.num_new,
            num_repeats=cell.num_passes,
            steps=cell.steps,
        )
        suite = Suite(name="random tokens", prompts=self.prompts)
        entry, _ = measure(self.target, drafter, suite, config, name=cell.name)
        if entry["failed"]:
            raise RuntimeError(entry["failed"][0]["reason"])
        assert entry["speedup"] is not None
        told = "num_prompts num_tokens num_rounds acceptance_length acceptance_rate speedup speedup_ci95"
        told += " tokens_per_second baseline_tokens_per_second"
        return {
            "num_draft_tokens": num_draft,
            "given_rates": list(cell.rates),
            "given_acceptance_length": round(expected_length(cell.rates, num_draft), 4),
            **{key: entry[key] for key in told.split()},
            "identical_texts": entry["lossless"]["identical"],
        }

    def drafted(self, cell: Cell) -> tuple[Drafter | None, list[DraftSetting]]:
        """The drafter of a cell, and its chain."""
        if not cell.num_draft_tokens:
            return None, []
        drafter = BlankDrafter() if cell.head is None else self.head(cell.head)
        return drafter, chains(drafter, [cell.num_draft_tokens])

    def head(self, family: str) -> DraftHead:
        """An untrained one: it takes the time that a trained one does. The last family's is forgotten."""
        if family not in self.heads:
            self.heads.clear()
            release_memory()
            with torch.device(self.target.device):
                head = build_head(HEADS[family].config_class(type=family), self.target)
            self.heads[family] = head.to(self.target.dtype).eval().requires_grad_(False)
        return self.heads[family]

    @property
    def prompts(self) -> list[list[int]]:
        return random_prompts(self.shape, count=self.shape.num_prompts, length=self.shape.context)

    @cached_property
    def synthetic(self) -> SyntheticDrafter:
        """With the target's own texts behind the prompts; its rates do not count."""
        return SyntheticDrafter(self.target, self.prompts, [1.0], max_new_tokens=self.shape.num_new)


def left_out(target: Target, cell: Cell, *, available: float) -> str | None:
    """Why a cell cannot be measured in so many bytes; None where it may be: its keys and values alone are counted.

    Those of the target, of two engines where there are drafts: the baseline's lie beside them.
    """
    if cell.rates:
        return None
    setting = DraftSetting("", cell.num_draft_tokens) if cell.num_draft_tokens else None
    num_slots = cell.context + most_tokens(setting)
    needed = (2 if setting else 1) * cell.batch_size * cache_bytes(target, num_slots)
    if needed <= available:
        return None
    return f"keys and values of {num_slots} tokens need {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are free"


def timed_figures(place: Place) -> dict[str, Any]:
    """Milliseconds are medians over the passes; what is told of several passes has their least and most beside it."""
    base, size = place.usual, len(place.rows)
    steps = [one.round_ms for one in place.plain]
    read = bytes_per_step(place.target, base.context + NUM_ROUNDS // 2, num_rows=size)
    found: dict[str, Any] = {
        "baseline_ms": spread(steps),
        "baseline_tokens_per_second": spread(1000 * size / one for one in steps),
        "baseline_gigabytes_per_second": spread(read / one / 1e6 for one in steps),
    }
    for one, (setting, passes) in zip(place.found, place.drafted.items(), strict=True):  # in baseline steps
        found |= {
            "num_draft_tokens": setting.num_draft_tokens,
            **{key: round(getattr(one, key), 4) for key in ("draft_ms", "verify_ms", "overhead_ms", "round_ms")},
            "reading_ms": round(one.reading_ms, 4),
            "draft_in_baseline_steps": spread(row.draft_ms for row in passes),
            "verify_in_baseline_steps": spread(row.verify_ms + row.overhead_ms for row in passes),
            "round_in_baseline_steps": spread(row.round_ms for row in passes),
            "round_overhead": spread(row.overhead_ms / row.round_ms for row in passes),
        }
    return found


def spread(values: Iterable[float]) -> dict[str, float]:
    kept = sorted(values)
    return {"median": round(statistics.median(kept), 4), "least": round(kept[0], 4), "most": round(kept[-1], 4)}
