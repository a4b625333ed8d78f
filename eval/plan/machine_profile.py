"""A machine's step times as a linear model in one JSON file: to predict on a GPU that one does not have."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ...configs.errors import BadInput
from ...heads.drafter import Drafter, Reading
from ...heads.target import Target
from ..engine import build_engine
from ..measurement.bandwidth import cache_bytes, weight_bytes
from ..measurement.config import DraftSetting
from ..measurement.step_times import StepTime

PROFILE_VERSION = 1
PROFILES = Path(__file__).resolve().parents[2] / "configs" / "machines"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """milliseconds = fixed_ms + token_ms * tokens read + cache_token_ms * tokens in the cache, summed over the batch.

    The linear model of SmartSpec (Liu et al. 2024, arXiv 2406.14066) for one forward of one target, of weight_bytes
    and with cache_token_bytes of keys and values per token; overhead_ms is what a round takes besides. source: who
    measured it, with what. fit_error: median relative error of the fit, where known.
    """

    name: str
    device: str
    engine: str
    target: str
    source: str
    weight_bytes: float
    cache_token_bytes: float
    fixed_ms: float
    token_ms: float
    cache_token_ms: float
    overhead_ms: float
    fit_error: float | None = None
    version: int = PROFILE_VERSION

    def forward_ms(self, *, tokens: float, cached: float) -> float:
        """Of the profile's own target. Args: tokens read and tokens in the cache, summed over the batch."""
        return self.fixed_ms + self.token_ms * tokens + self.cache_token_ms * cached


def load_machine(name: str) -> Machine:
    """A profile by name, of those that come with the package, or from a file. Raises BadInput."""
    from ...configs.loader import build  # needs pydantic, which a serving image may lack

    path = Path(name) if name.endswith(".json") else PROFILES / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(one.stem for one in PROFILES.glob("*.json")))
        raise BadInput(f"--machine {name}: no such profile; expected a .json file or one of {known}")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: no JSON: {error}") from error
    machine = build(Machine, document, where=str(path))
    if machine.version != PROFILE_VERSION:
        raise BadInput(f"{path}: version {machine.version}: expected {PROFILE_VERSION}")
    return machine


def fit_machine(target: Target, times: Sequence[StepTime], *, name: str, device: str, source: str) -> Machine:
    """The linear model of measured rounds' forwards, terms not negative, least squares of relative errors."""
    rows = [[1.0, one.batch_size * one.num_tokens, one.batch_size * one.context] for one in times if one.verify_ms > 0]
    measured = torch.tensor([one.verify_ms for one in times if one.verify_ms > 0], dtype=torch.float64)
    terms = non_negative_fit(torch.tensor(rows, dtype=torch.float64), measured)
    fitted = torch.tensor(rows, dtype=torch.float64) @ terms
    fixed, token, cached = terms.tolist()
    return Machine(
        name=name,
        device=device,
        engine="headstart",
        target=target.name,
        source=source,
        weight_bytes=weight_bytes(target),
        cache_token_bytes=cache_bytes(target, 1),
        fixed_ms=fixed,
        token_ms=token,
        cache_token_ms=cached,
        overhead_ms=statistics.median(one.overhead_ms for one in times),
        fit_error=round((fitted / measured - 1).abs().quantile(0.5).item(), 4),
    )


def non_negative_fit(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[n, p] and [n] to [p]: least squares of relative errors with terms >= 0, by trying every subset of terms."""
    weighted, ones = rows / values[:, None], torch.ones_like(values)
    best, terms = float("inf"), torch.zeros(rows.shape[1], dtype=rows.dtype)
    for count in range(1, rows.shape[1] + 1):
        for chosen in map(list, combinations(range(rows.shape[1]), count)):
            found = torch.linalg.lstsq(weighted[:, chosen], ones[:, None]).solution[:, 0]
            loss = float((weighted[:, chosen] @ found - ones).square().sum())
            if (found >= 0).all() and loss < best:
                best, terms = loss, torch.zeros_like(terms).index_put((torch.tensor(chosen),), found)
    return terms


@dataclass(frozen=True)
class MachineTimes:
    """Step times of a target and a drafter on a machine that is not here.

    A forward's fixed and per-token time grow with the target's bytes of weights over those of the profile's target,
    its cache time with the cache's. Drafting takes its floating-point operations' share of a baseline step's forward:
    both read each weight once per token at batch size 1. Drafters on the host count as free.
    """

    machine: Machine
    weights: float  # bytes of this target over the profile's
    cache: float
    draft_share: dict[str, float]  # of each setting: operations to draft, over those of a forward of one token

    def at(self, setting: DraftSetting | None, *, batch_size: float, context: float) -> StepTime:
        machine = self.machine
        num_tokens = 1 + (setting.num_drafted if setting else 0)

        def forward(tokens: float, cached: float) -> float:
            # the cache's time grows with its own ratio, the rest with that of the weights
            own = machine.forward_ms(tokens=tokens, cached=cached * self.cache / self.weights)
            return self.weights * own

        share = self.draft_share[setting.name] if setting else 0.0
        return StepTime(
            setting=setting.name if setting else None,
            batch_size=round(batch_size),
            context=round(context),
            num_tokens=num_tokens,
            num_draft_tokens=setting.num_draft_tokens if setting else 0,
            draft_ms=share * forward(batch_size, 0.0),
            verify_ms=forward(batch_size * num_tokens, batch_size * context),
            overhead_ms=machine.overhead_ms,
            prefill_ms=forward(batch_size * context, 0.0),
        )


def times_on(machine: Machine, target: Target, drafter: Drafter, settings: Sequence[DraftSetting]) -> MachineTimes:
    """What a profile predicts for a target and a drafter."""
    one_token = forward_operations(target)
    shares = {one.name: draft_operations(target, drafter, one) / one_token for one in settings}
    weights = weight_bytes(target) / machine.weight_bytes
    return MachineTimes(machine, weights, cache_bytes(target, 1) / machine.cache_token_bytes, shares)


@torch.no_grad()
def forward_operations(target: Target) -> int:
    """Floating-point operations of a forward of one token, its logits included; behind one token of context."""
    engine = build_engine(target, None, None, batch_size=1, max_length=8)
    tokens = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    return operations(lambda: engine.prefill(tokens, torch.ones_like(tokens[0])))


@torch.no_grad()
def draft_operations(target: Target, drafter: Drafter, setting: DraftSetting) -> int:
    """Floating-point operations of one round's drafting of one row, what was committed read first."""
    if drafter.on_host:
        return 0
    engine = build_engine(target, drafter, setting, batch_size=1, max_length=8)
    tokens = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    output, last = engine.prefill(tokens, torch.ones_like(tokens[0]))
    read = engine.commit_prompts(Reading(tokens, last, output, torch.zeros_like(tokens[0]), torch.ones_like(tokens[0])))
    engine.begin_round(2)
    return operations(lambda: engine.draft(read))


def operations(step: Callable[[], Any]) -> int:
    """Of matrix products and attention, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()
