"""Decoding of a real target: its texts against the model's own forward, what drafts save, and how fast answers come.

    python -m headstart.benchmarks.gpu.decoding single|load|answers --target TARGET --pack FOLDER \
        --output FILE.json [--size toy|full]

FOLDER is what `make gpu-pack` fills: a head of that target, its answers, and prompts. single: eager, captured and
compiled steps, then look-ups, chains and trees of the head, greedy and sampled, at a few numbers of rows. load: both
drafters in one, at more rows. answers: continuous batching, beside what a step's time allows.
"""

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ...eval.decoding import engine as engine_module
from ...eval.decoding.draft_setting import DraftSetting, chain
from ...eval.decoding.engine import Engine
from ...eval.decoding.loop import decode
from ...eval.decoding.stopping import Stop
from ...eval.drafters.registry import build_drafter
from ...eval.figures.environment import device_name
from ...eval.measurement.measure import measure
from ...eval.measurement.step_times import TimedCell
from ...eval.proof.config import MeasureConfig
from ...eval.suites.prompts import Suite, load_suite
from ...heads.drafting.trees import DynamicTree
from ...targets.dtype import default_dtype
from ...targets.loading import default_device
from ...targets.target import Target
from .. import store
from ..store import CellStore, Figures
from .answers import answered

SLOTS = 256  # at least so many in every round, so that each width is compiled once
NUM_TEXTS = 4  # that are compared with the model's own choices
FIGURES = "acceptance_length speedup speedup_ci95 tokens_per_second baseline_tokens_per_second num_prompts num_tokens"


@dataclass(frozen=True, kw_only=True)
class DecodingSize:
    """How much is measured."""

    limit: int  # prompts, and at least as many as rows
    max_new_tokens: int
    num_repeats: int
    batch_sizes: tuple[int, ...]  # beside one row,
    load_sizes: tuple[int, ...]  # of `load`,
    answer_sizes: tuple[int, ...]  # and of `answers`,
    asked_per_row: int  # with so many prompts for each row


SIZES = {
    "toy": DecodingSize(
        limit=2, max_new_tokens=12, num_repeats=1, batch_sizes=(2,), load_sizes=(1, 2), answer_sizes=(2,),
        asked_per_row=2,
    ),
    "full": DecodingSize(
        limit=12, max_new_tokens=96, num_repeats=2, batch_sizes=(8, 32), load_sizes=(1, 8, 32, 64),
        answer_sizes=(64, 128, 256), asked_per_row=8,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecodingCell(store.BenchedCell):
    """One setting. what: `texts`, `drafts` or `answers`."""

    what: str
    steps: str
    drafter: str = ""  # as `headstart eval --drafter` takes it
    num_draft_tokens: int | None = None  # None: the drafter's default
    num_nodes: int = 0  # of a dynamic tree; 0: chains
    suite: str = "orders"
    batch_size: int = 1
    temperature: float = 0.0


def single_cells(size: DecodingSize, pack: Path, steps: str) -> list[DecodingCell]:
    """The most telling cells first."""
    ways = ("graph", "eager", "compile") if steps == "graph" else ("eager",)
    texts = [DecodingCell(name=f"texts, {way}", what="texts", steps=way) for way in ways]
    look_ups = DecodingCell(
        name="look-ups", what="drafts", steps=steps, drafter=f"suffix:{pack / 'text/answers.jsonl'}", num_draft_tokens=7
    )
    head = DecodingCell(name="head", what="drafts", steps=steps, drafter=f"head:{pack / 'head'}", num_draft_tokens=4)
    drafters = head, look_ups
    cells = [*texts[:2], *drafters, *(changed(each, suite="contrast") for each in drafters)]
    cells += [changed(head, num_nodes=12), *(changed(each, temperature=0.7) for each in drafters)]
    cells += [changed(each, batch_size=rows) for rows in size.batch_sizes for each in drafters]
    return cells + texts[2:]  # compiling whole steps takes longest


def load_cells(size: DecodingSize, pack: Path, steps: str) -> list[DecodingCell]:
    drafter = f"hybrid:{pack / 'head'}:{pack / 'text/answers.jsonl'}"
    hybrid = DecodingCell(name="hybrid", what="drafts", steps=steps, drafter=drafter)
    return [changed(hybrid, batch_size=rows) for rows in size.load_sizes]


def answer_cells(size: DecodingSize, pack: Path, steps: str) -> list[DecodingCell]:
    cell = DecodingCell(name="answers", what="answers", steps=steps, suite="prompts")
    return [changed(cell, batch_size=rows) for rows in size.answer_sizes]


CELLS = {"single": single_cells, "load": load_cells, "answers": answer_cells}


def changed(cell: DecodingCell, **changes: Any) -> DecodingCell:
    """The cell with other settings, which its name tells."""
    return replace(cell, name=", ".join([cell.name, *(f"{key} {value}" for key, value in changes.items())]), **changes)


class DecodingWorkbench:
    """A target, and what its cells share."""

    def __init__(self, target: Target, pack: Path, size: DecodingSize):
        self.target, self.pack, self.size = target, pack, size
        self.drafter = cache(lambda spec: build_drafter(spec, target)[1])

    def measure(self, cell: DecodingCell) -> Figures:
        """The cell's figures."""
        with patch.object(engine_module, "SMALLEST_BUCKET", SLOTS):
            return {"texts": self.texts, "drafts": self.drafts, "answers": self.answers}[cell.what](cell)

    def suite(self, cell: DecodingCell, limit: int) -> Suite:
        path = self.pack / "text" / f"{cell.suite}.jsonl"
        return load_suite(path, self.target, max_new_tokens=self.size.max_new_tokens, limit=limit)

    def texts(self, cell: DecodingCell) -> Figures:
        """Greedy texts of the baseline: how many of their tokens the model's own forward over the whole text, without a
        cache, would have chosen too, and how far a token's logit was below the highest."""
        prompts, most = self.suite(cell, NUM_TEXTS).prompts, self.size.max_new_tokens
        rows, longest = len(prompts), max(map(len, prompts)) + most
        engine = Engine(self.target, None, batch_size=rows, max_length=longest, steps=cell.steps)
        texts = decode(engine, prompts, max_new_tokens=most, stop=Stop.of(self.target)).token_ids
        gaps = [gap for prompt, text in zip(prompts, texts, strict=True) for gap in self.logit_gaps(prompt, text)]
        return {"num_tokens": len(gaps), "model_chooses_too": gaps.count(0.0), "largest_logit_gap": max(gaps)}

    @torch.no_grad()
    def logit_gaps(self, prompt: list[int], text: list[int]) -> list[float]:
        """Of each token of a text, how far its logit is below the highest, by the model's own forward."""
        ids = torch.tensor([prompt + text], device=self.target.device)  # [1, T]
        logits = self.target.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()  # [N, V]
        own = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]  # [N]
        return (logits.amax(1) - own).tolist()

    def drafts(self, cell: DecodingCell) -> Figures:
        """Acceptance and speed of a drafter beside the baseline, and whether the texts are the target's."""
        size, drafter = self.size, self.drafter(cell.drafter)
        config = MeasureConfig(
            setting=setting_of(cell), max_new_tokens=size.max_new_tokens, temperature=cell.temperature,
            steps=cell.steps, batch_size=cell.batch_size, num_repeats=size.num_repeats,
        )  # fmt: skip
        suite = self.suite(cell, max(size.limit, cell.batch_size))
        result, _ = measure(self.target, drafter, suite, config, name=cell.name)
        if result.failed:
            raise RuntimeError(result.failed[0].reason)
        check = result.sampling_check
        return {
            **store.picked(result, FIGURES),
            "texts_identical": result.lossless.identical,
            "texts_unexplained": result.lossless.unexplained,
            "sampling_p_value": None if check is None else check.p_value,
        }

    def answers(self, cell: DecodingCell) -> Figures:
        """Tokens per second of answers by continuous batching, and of a baseline step at as many rows."""
        size, rows = self.size, cell.batch_size
        prompts = self.suite(cell, size.asked_per_row * rows).prompts
        done = answered(self.target, prompts, batch_size=rows, max_new_tokens=size.max_new_tokens)
        context = round(statistics.median(map(len, prompts)))
        config = MeasureConfig(steps=cell.steps)
        timer = TimedCell(self.target, None, [], config, batch_size=rows, context=context, text=prompts[0])
        timer.run()
        return done.figures(timer.baseline.round_ms / 1000)


def setting_of(cell: DecodingCell) -> DraftSetting | None:
    """None: a chain of the drafter's default length."""
    if cell.num_draft_tokens is None:
        return None
    if not cell.num_nodes:
        return chain(cell.num_draft_tokens)
    tree = DynamicTree(num_nodes=cell.num_nodes, depth=cell.num_draft_tokens, top_k=4)
    return DraftSetting(f"dynamic:{cell.num_nodes}", cell.num_draft_tokens, tree)


def main() -> int:
    """Returns the exit code: 1 where a cell failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cells", choices=sorted(CELLS))
    parser.add_argument("--target", required=True)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(SIZES), default="toy")
    options = parser.parse_args()
    device, size = default_device(), SIZES[options.size]
    header = {"device": device_name(torch.device(device)), "size": asdict(size)}
    results = CellStore[DecodingCell](options.output, header, is_new=True)
    target = Target.load(options.target, dtype=default_dtype(options.target, device), device=device)
    cells = CELLS[options.cells](size, options.pack, "graph" if device == "cuda" else "eager")
    return results.run(cells, DecodingWorkbench(target, options.pack, size).measure)


if __name__ == "__main__":
    sys.exit(main())
