"""The cells of the engine's benchmark: what is timed or decoded in one go, on a random target of a given size."""

import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..engines.heads import HEADS, build_head
from ..eval.decoding.draft_setting import DraftSetting, chains
from ..eval.figures.bandwidth import cache_bytes, weight_bytes
from ..eval.measurement.measure import measure
from ..eval.measurement.step_times import NUM_ROUNDS, TimedCell, check_room
from ..eval.plan.prediction import expected_length
from ..eval.proof.config import MeasureConfig
from ..eval.suites.prompts import Suite
from ..heads.base import DraftHead
from ..heads.drafting.drafter import Drafter
from ..targets.caches import split_attention
from ..targets.loading import release_memory
from ..targets.target import Target
from . import store
from .operations import profiled
from .synthetic import BlankDrafter, SyntheticDrafter

NUM_DRAFT = 5
MAIN = "eagle3"  # the family whose chain is timed at every batch size and context
OTHERS = ("block", "medusa", "mtp")  # families that are timed beside it
FIXED_RATES = (0.80, 0.75, 0.70, 0.65, 0.60)  # by draft position: about what is published of EAGLE-3 heads
CONTEXT_ROOM = 2048  # positions behind the longest context
ROOM = 160  # slots behind the context in every cell, whatever its K, so that cells share compiled layers
PARTS = "draft_ms verify_ms overhead_ms round_ms reading_ms"  # of a round, and what reading the prompt takes
LEFT_OUT = ("parts", "compiler")  # attention over parts of the cache; captured layers that are not compiled
EMBEDDING_SCALE = 5000.0  # of a token's embedding, over what it is initialised to


@dataclass(frozen=True, kw_only=True)
class EngineSize:
    """A Llama target's sizes, and how much is measured on it."""

    llama: dict[str, int]
    dtype: str
    contexts: tuple[int, ...]  # tokens before the timed rounds; the first is the usual one
    batch_sizes: tuple[int, ...]  # at the usual context
    long_batch_sizes: tuple[int, ...]  # at the others
    verified: tuple[int, ...]  # tokens per forward
    num_passes: int  # over each timed cell
    num_prompts: int  # of the usual context, decoded where speedups are measured
    num_new: int  # tokens behind each prompt, at most ROOM
    num_repeats: int  # passes over the prompts
    draft_vocabulary: int  # of a head whose output layer is cut, as those of published EAGLE-3 heads are

    @property
    def context(self) -> int:
        return self.contexts[0]

    @property
    def config(self) -> LlamaConfig:
        room: dict[str, Any] = {"max_position_embeddings": max(self.contexts) + CONTEXT_ROOM}
        return LlamaConfig(**self.llama, **room, tie_word_embeddings=False, eos_token_id=None)

    def prompts(self, count: int, *, length: int) -> list[list[int]]:
        """Prompts of random tokens."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(0, self.llama["vocab_size"], (count, length), generator=generator).tolist()


SIZES = {
    "toy": EngineSize(
        llama={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 128,
        },
        dtype="float32", contexts=(16, 48), batch_sizes=(1, 3), long_batch_sizes=(1, 2),
        verified=(2, 64), num_passes=2, num_prompts=2, num_new=24, num_repeats=1, draft_vocabulary=48,
    ),
    "8b": EngineSize(
        llama={
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256,
        },
        dtype="bfloat16", contexts=(512, 4096, 16384), batch_sizes=(1, 8, 32, 64), long_batch_sizes=(1, 8, 32),
        verified=(2, 4, 8, 16, 32, 64), num_passes=3, num_prompts=4, num_new=128, num_repeats=2,
        draft_vocabulary=32000,
    ),
}  # fmt: skip


def random_target(size: EngineSize, device: torch.device) -> Target:
    """A Llama with random weights, made on the device, whose greedy text counts: x, x + 1, x + 2, ...

    Each token's embedding outweighs what all layers add to it, and the output layer looks for the one before. So the
    choice of a token is never close, and rounding, which differs with the number of tokens in a forward, changes no
    text. Between plain random weights it soon would, and drafts that are to be right would be wrong from there on.
    """
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    with torch.device(device), torch.no_grad():
        torch.set_default_dtype(getattr(torch, size.dtype))
        try:
            model: Any = LlamaForCausalLM(size.config)
        finally:
            torch.set_default_dtype(default)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))
        model.model.embed_tokens.weight.mul_(EMBEDDING_SCALE)
    model.generation_config.eos_token_id = None
    return Target.of(model, name=f"random Llama, hidden {size.config.hidden_size}", fingerprint="random")


@dataclass(frozen=True, kw_only=True)
class RoundsCell(store.BenchedCell):
    """Settings that are measured interleaved with baseline steps."""

    steps: str  # as `Engine` takes them
    batch_size: int
    context: int
    num_passes: int
    head: str | None = None  # the family that drafts; None: drafts that cost nothing
    draft_vocabulary: int | None = None  # of the head; None: the target's
    num_draft_tokens: int = 0  # at most, as far as the family drafts; 0: the baseline alone
    rates: tuple[float, ...] = ()  # of synthetic acceptance, with which texts are decoded; none: rounds are timed
    without: str = ""  # one of LEFT_OUT
    is_profiled: bool = False  # by operator: a pass of NUM_ROUNDS baseline steps, and of rounds between two of these


def single_cells(size: EngineSize, steps: str) -> list[RoundsCell]:
    """One row at the usual context and a few more rows, the most telling cells first."""
    base = RoundsCell(name="baseline", steps=steps, batch_size=1, context=size.context, num_passes=size.num_passes)
    main = replace(base, head=MAIN, draft_vocabulary=size.draft_vocabulary, num_draft_tokens=NUM_DRAFT)
    cells = [replace(base, name=f"baseline without {part}", without=part) for part in LEFT_OUT]
    cells = [base, *(cells if steps != "eager" else [])]
    cells += [replace(base, name=f"verify {n}", num_draft_tokens=n - 1) for n in size.verified if n <= 16]
    cells += [replace(main, name=f"draft {MAIN}")]
    cells += [replace(main, name=f"synthetic {MAIN}", num_passes=size.num_repeats, rates=FIXED_RATES)]
    cells += [batch_cell(main, rows, size.context) for rows in size.batch_sizes if 1 < rows <= 32]
    cells += [replace(main, name=f"draft {MAIN}, whole vocabulary", draft_vocabulary=None)]
    cells += [replace(main, name=f"draft {family}", head=family, draft_vocabulary=None) for family in OTHERS]
    cells += [replace(base, name=f"verify {n}", num_draft_tokens=n - 1) for n in size.verified if n > 16]
    cells += [
        replace(cell, name=f"profile of {cell.name}", is_profiled=True) for cell in (base, replace(main, name=MAIN))
    ]
    if steps != "eager":
        cells.append(replace(main, name=f"eager {MAIN}", steps="eager", num_passes=1))
    return cells


def load_cells(size: EngineSize, steps: str) -> list[RoundsCell]:
    """EAGLE-3 by rows at a time and context."""
    main = RoundsCell(
        name="", steps=steps, batch_size=1, context=size.context, num_passes=2, head=MAIN,
        draft_vocabulary=size.draft_vocabulary, num_draft_tokens=NUM_DRAFT,
    )  # fmt: skip
    conditions = [(batch_size, size.context) for batch_size in size.batch_sizes]
    conditions += [(batch_size, context) for batch_size in size.long_batch_sizes for context in size.contexts[1:]]
    return [batch_cell(main, *condition) for condition in conditions]


def batch_cell(cell: RoundsCell, batch_size: int, context: int) -> RoundsCell:
    return replace(cell, name=f"batch {batch_size} context {context}", batch_size=batch_size, context=context)


CELLS = {"single": single_cells, "load": load_cells}


class EngineWorkbench:
    """A target, and what its cells share: one head at a time, and the texts of synthetic acceptance."""

    def __init__(self, target: Target, size: EngineSize):
        self.target, self.size = target, size
        self.heads: dict[tuple[str, int | None], DraftHead] = {}
        self.text = size.prompts(1, length=4 * max(size.contexts))[0]
        self.prompts = size.prompts(size.num_prompts, length=size.context)

    def measure(self, cell: RoundsCell) -> store.Figures:
        """The cell's figures."""
        with left_out(cell.without, self.target):
            return self.decode(cell) if cell.rates else self.time(cell)

    def time(self, cell: RoundsCell) -> store.Figures:
        """Rounds, each pass beside baseline steps."""
        drafter, settings = self.drafted(cell)
        check_room(self.target, [cell.context], settings)
        how = store.picked(cell, "batch_size context")
        timer = TimedCell(self.target, drafter, settings, MeasureConfig(steps=cell.steps), text=self.text, **how)
        timer.max_length = cell.context + ROOM
        for _ in range(cell.num_passes):
            timer.run(reads_again=cell.batch_size == 1 and cell.context == self.size.context)  # cheap there alone
        return profiled(timer.run, self.target.device, top=16) if cell.is_profiled else timed_figures(timer)

    def decode(self, cell: RoundsCell) -> store.Figures:
        """Texts with drafts that are right at the cell's rates, and without. The head's time counts, not its drafts."""
        head, (setting,) = self.drafted(cell)
        config = MeasureConfig(
            setting=setting, max_new_tokens=self.size.num_new, num_repeats=cell.num_passes, steps=cell.steps
        )
        suite = Suite(name="random tokens", prompts=self.prompts)
        result, _ = measure(self.target, self.synthetic.around(head, cell.rates), suite, config, name=cell.name)
        if result.failed:
            raise RuntimeError(result.failed[0].reason)
        return {
            "num_draft_tokens": setting.num_draft_tokens,
            "given_rates": list(cell.rates),
            "given_acceptance_length": round(expected_length(cell.rates, setting.num_draft_tokens), 4),
            **store.picked(result, "num_prompts num_tokens num_rounds acceptance_length acceptance_rate speedup"),
            **store.picked(result, "speedup_ci95 tokens_per_second baseline_tokens_per_second"),
            "identical_texts": result.lossless.identical,
        }

    def drafted(self, cell: RoundsCell) -> tuple[Drafter | None, list[DraftSetting]]:
        """The drafter of a cell, and its chain."""
        if not cell.num_draft_tokens:
            return None, []
        drafter = BlankDrafter() if cell.head is None else self.head(cell.head, cell.draft_vocabulary)
        return drafter, chains(drafter, [cell.num_draft_tokens])

    def head(self, family: str, draft_vocabulary: int | None = None) -> DraftHead:
        """An untrained head, which takes the time of a trained one. The last one is dropped."""
        key = family, draft_vocabulary
        if key not in self.heads:
            self.heads.clear()
            release_memory()
            with torch.device(self.target.device):
                ids = None if draft_vocabulary is None else torch.arange(draft_vocabulary)
                config = HEADS[family].config_class(type=family, draft_vocab_size=draft_vocabulary)
                head = build_head(config, self.target, draft_token_ids=ids)
            self.heads[key] = head.to(self.target.dtype).eval().requires_grad_(False)
        return self.heads[key]

    @cached_property
    def synthetic(self) -> SyntheticDrafter:
        """With the target's own texts behind the prompts; cells bring their rates."""
        return SyntheticDrafter(self.target, self.prompts, [1.0], max_new_tokens=self.size.num_new)


@contextmanager
def left_out(part: str, target: Target) -> Iterator[None]:
    """Decoding without one of LEFT_OUT."""
    decoder: Any = target.decoder
    if not part or decoder is None:
        yield
        return
    compiles, compiled = decoder.compiles, decoder.compiled
    decoder.compiles, decoder.compiled = compiles and part != "compiler", {}  # what was compiled reads in parts
    blocks = 0 if part == "parts" else split_attention.ENOUGH_BLOCKS
    try:
        with patch.object(split_attention, "ENOUGH_BLOCKS", blocks):
            yield
    finally:
        decoder.compiles, decoder.compiled = compiles, compiled


def timed_figures(timer: TimedCell) -> store.Figures:
    """Milliseconds are medians over the passes; figures of several passes have their least and most beside it."""
    base, size = timer.baseline, len(timer.rows)
    steps = [step.round_ms for step in timer.plain]
    kept = size * cache_bytes(timer.target, base.context + NUM_ROUNDS // 2)
    read = weight_bytes(timer.target, num_tokens=size) + kept
    figures: store.Figures = {
        "baseline_ms": spread(steps),
        "baseline_tokens_per_second": spread(1000 * size / step for step in steps),
        "baseline_gigabytes_per_second": spread(read / step / 1e6 for step in steps),
    }
    for time, (setting, passes) in zip(timer.rounds, timer.drafted.items(), strict=True):  # passes: in baseline steps
        figures |= {
            "num_draft_tokens": setting.num_draft_tokens,
            **{key: round(ms, 4) for key, ms in store.picked(time, PARTS).items()},
            "draft_in_baseline_steps": spread(each.draft_ms for each in passes),
            "verify_in_baseline_steps": spread(each.verify_ms + each.overhead_ms for each in passes),
            "round_in_baseline_steps": spread(each.round_ms for each in passes),
            "round_overhead": spread(each.overhead_ms / each.round_ms for each in passes),
        }
    return figures


def spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    found = {"median": statistics.median(ordered), "least": ordered[0], "most": ordered[-1]}
    return {key: round(value, 4) for key, value in found.items()}
