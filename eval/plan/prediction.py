"""What speedup each setting is to have at each batch size: what texts accept of it, and how long its rounds take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...configs.errors import BadInput
from ...heads.drafter import Drafter
from ...heads.target import Target
from ..generate import Generation
from ..measurement.config import DraftSetting, MeasureConfig
from ..measurement.metrics import Acceptance, acceptance
from ..measurement.passes import runner
from ..measurement.step_times import StepTime
from ..measurement.tree_search import TREE_NAMES, named_tree

LEAST_GAIN = 0.01  # a setting that drafts more must be so much faster than one that drafts less
MOST_FINALISTS = 4  # settings that are measured per batch size
MOST_ERROR = 0.2  # a prediction so far below the best one is taken to be really below it


class StepTimes(Protocol):
    """Where times come from: a table measured here, or a machine's profile."""

    def at(self, setting: DraftSetting | None, *, batch_size: float, context: float) -> StepTime:
        """A round of a setting; None: a baseline step."""
        ...


@dataclass(frozen=True)
class Accepted:
    """What a workload's texts accept of a setting. emitted: of each prompt, the tokens that each of its rounds gave."""

    setting: DraftSetting
    counted: Acceptance
    emitted: list[list[int]]

    @property
    def rounds(self) -> list[int]:
        """Rounds of each prompt, the prefill left out."""
        return [len(row) for row in self.emitted]

    @property
    def tokens(self) -> list[int]:
        """New tokens of each prompt, the prefill's one included."""
        return [1 + sum(row) for row in self.emitted]

    @property
    def length(self) -> float:
        """acceptance_length; 1 where no round was needed."""
        return self.counted.length or 1.0

    def as_json(self) -> dict[str, Any]:
        """An entry of plan.json's `acceptance`."""
        return {
            "setting": self.setting.name,
            "acceptance_length": round(self.length, 4),
            "acceptance_rate": [None if rate is None else round(rate, 4) for rate in self.counted.rate],
            "num_rounds": self.counted.num_rounds,
        }


def named_trees(
    specs: Sequence[str], target: Target, drafter: Drafter, prompts: Sequence[list[int]], *, max_new_tokens: int
) -> list[DraftSetting]:
    """Trees by name and number of nodes, `static:16`; shaped by what the target writes behind the first prompts.

    Raises: BadInput on an unknown name or number, and on a drafter that drafts chains only.
    """
    found = []
    for spec in specs:
        name, _, number = spec.partition(":")
        if name not in TREE_NAMES or "chain" in name or not number.isdecimal() or int(number) < 1:
            choice = ", ".join(one for one in TREE_NAMES if "chain" not in one)
            raise BadInput(f"--tree {spec}: expected NAME:NODES, NAME one of {choice}")
        tree = named_tree(name, target, drafter, prompts, max_new_tokens=max_new_tokens, num_nodes=int(number))
        assert tree is not None
        found.append(DraftSetting(spec, tree.depth, tree))
    return found


@torch.no_grad()
def accepted_by(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    settings: Sequence[DraftSetting],
    config: MeasureConfig,
    *,
    on_setting: Callable[[], object] = lambda: None,
) -> list[Accepted]:
    """Decode the prompts once per setting, config.batch_size at a time. Acceptance does not depend on that size."""
    size, found = config.batch_size, []
    for setting in settings:
        run = runner(target, drafter, prompts, with_setting(config, setting))
        runs = [run(prompts[i : i + size], drafter, config.seed) for i in range(0, len(prompts), size)]
        counted = acceptance((one for text in runs for one in text.rounds), num_draft_tokens=setting.num_draft_tokens)
        found.append(Accepted(setting, counted, [row for text in runs for row in emitted_by_row(text)]))
        on_setting()
    return found


def with_setting(config: MeasureConfig, setting: DraftSetting) -> MeasureConfig:
    """The same measurement, drafting so."""
    changes: dict[str, Any] = {"tree": setting.tree, "tree_name": setting.tree_name}
    changes["num_draft_tokens"] = None if setting.tree else setting.num_draft_tokens
    return MeasureConfig(**{**vars(config), **changes})


def emitted_by_row(text: Generation) -> list[list[int]]:
    """The tokens that each row's rounds gave until it ended, the prefill left out."""
    return [
        [one.num_emitted[row] for one in text.rounds[1:] if one.num_committed[row]]
        for row in range(len(text.token_ids))
    ]


@dataclass(frozen=True)
class Workload:
    """Prompts' lengths, and how many tokens follow them, in the order in which batches take them."""

    prompt_lengths: list[int]
    max_new_tokens: int

    @property
    def context(self) -> int:
        """Mean tokens before a round: the prompt and half of the answer."""
        return round(sum(self.prompt_lengths) / len(self.prompt_lengths) + self.max_new_tokens / 2)

    def spans(self, batch_size: int, tokens: Sequence[int]) -> list[tuple[int, int, float]]:
        """Of each batch, tokens before a round: at its start, at its end, and on average; of its longest rows, which
        set how far attention reads. Args: tokens: new ones of each prompt."""
        found = []
        for i in range(0, len(self.prompt_lengths), batch_size):
            rows = list(zip(self.prompt_lengths[i : i + batch_size], tokens[i : i + batch_size], strict=True))
            start, end = max(length for length, _ in rows), max(length + new for length, new in rows)
            found.append((start, end, max(length + new / 2 for length, new in rows)))
        return found


def workload_speedup(accepted: Accepted, workload: Workload, times: StepTimes, *, batch_size: int) -> float:
    """Decoding time of these prompts without drafts over that with them, in batches of that size, prefills left out.

    A batch lasts as long as its slowest row, with drafts and without: rows that end are not replaced. Sampled texts
    differ between the two sides; lengths are those of the drafted ones.
    """
    plain = drafted = 0.0
    for number, (start, _, context) in enumerate(workload.spans(batch_size, accepted.tokens)):
        rows = slice(number * batch_size, (number + 1) * batch_size)
        size = len(accepted.rounds[rows])
        base = times.at(None, batch_size=size, context=context)
        spec = times.at(accepted.setting, batch_size=size, context=context)
        plain += (max(accepted.tokens[rows]) - 1) * base.round_ms
        drafted += max(accepted.rounds[rows]) * spec.round_ms
        drafted += times.at(accepted.setting, batch_size=size, context=start).reading_ms
    return plain / drafted if drafted else 1.0


def steady_speedup(accepted: Accepted, times: StepTimes, *, batch_size: float, context: float) -> float:
    """Tokens per second with drafts over those without, all rows busy: what a server that refills its batch sees.

    acceptance_length * baseline step / round: the speed model of Leviathan et al. 2023, section 3.3, with measured
    terms in place of its cost coefficient.
    """
    base = times.at(None, batch_size=batch_size, context=context)
    return accepted.length * base.round_ms / times.at(accepted.setting, batch_size=batch_size, context=context).round_ms


def predict(
    accepted: Sequence[Accepted],
    workload: Workload,
    times: StepTimes,
    *,
    batch_sizes: Sequence[int],
    contexts: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """The cells of plan.json: every setting at every batch size.

    `load` is `prompts` for decoding the workload's texts, in batches whose rows are not replaced when they end; and
    `steady`, all rows busy, at each of the contexts, where nothing was decoded: acceptance is taken to be the same.
    """
    found = []
    for size in batch_sizes:
        for one in accepted:
            speedup = workload_speedup(one, workload, times, batch_size=size)
            found.append(cell(one, size, workload.context, "prompts", speedup))
            for context in contexts:
                speedup = steady_speedup(one, times, batch_size=size, context=context)
                found.append(cell(one, size, context, "steady", speedup))
    return found


def cell(accepted: Accepted, batch_size: int, context: int, load: str, speedup: float) -> dict[str, Any]:
    """A cell of plan.json, not measured yet."""
    setting = accepted.setting
    return {
        "setting": setting.name,
        "tree": setting.tree_name,
        "num_draft_tokens": setting.num_draft_tokens,
        "num_drafted": setting.num_drafted,
        "batch_size": batch_size,
        "context": context,
        "load": load,
        "predicted_speedup": round(speedup, 4),
        "measured_speedup": None,
        "measured_ci95": [None, None],
    }


def shortlist(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells worth measuring: at each batch size up to MOST_FINALISTS, none predicted far below the best."""
    found = []
    for size in sorted({one["batch_size"] for one in cells}):
        here = [one for one in cells if one["batch_size"] == size and one["load"] == "prompts"]
        here.sort(key=lambda one: -one["predicted_speedup"])
        least = here[0]["predicted_speedup"] * (1 - MOST_ERROR)
        found += [one for one in here[:MOST_FINALISTS] if one["predicted_speedup"] >= least]
    return found


def recommend(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each batch size, context and load the fastest cell, or `off` where none is faster than no drafts.

    Where cells were measured, the fastest of those, else the one predicted to be. Of cells within LEAST_GAIN of the
    fastest, the one that drafts least.
    """
    keys = ("batch_size", "context", "load")
    advice = []
    for place in sorted({tuple(one[key] for key in keys) for one in cells}):
        here = [one for one in cells if tuple(one[key] for key in keys) == place]
        here = [one for one in here if one["measured_speedup"]] or here
        fastest = max(map(speedup, here))
        near = [one for one in here if speedup(one) >= fastest * (1 - LEAST_GAIN)]
        best = min(near, key=lambda one: (one["num_drafted"], one["num_draft_tokens"]))
        told = ("setting", "tree", "num_draft_tokens", "num_drafted", "predicted_speedup", "measured_speedup")
        place_of = dict(zip(keys, place, strict=True))
        advice.append({**place_of, "off": fastest <= 1, **{key: best[key] for key in told}})
    return advice


def speedup(cell: dict[str, Any]) -> float:
    """The measured one where there is one."""
    return cell["measured_speedup"] or cell["predicted_speedup"]


def errors(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far predictions lie from what was measured, relative to it; null where nothing was."""
    apart = sorted(
        abs(one["predicted_speedup"] / one["measured_speedup"] - 1) for one in cells if one["measured_speedup"]
    )
    if not apart:
        return {"num_cells": 0, "median_error": None, "max_error": None}
    middle = torch.tensor(apart, dtype=torch.float64).quantile(0.5).item()
    return {"num_cells": len(apart), "median_error": round(middle, 4), "max_error": round(apart[-1], 4)}
