"""A machine's step times as a linear model in one JSON file, to predict for a GPU that is not at hand."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from ...configs.errors import BadInput
from ...configs.jsonl import loads
from ...heads.drafter import Drafter, Reading
from ...heads.target import Target
from ..decoding.draft_setting import DraftSetting
from ..measurement.bandwidth import key_bytes, weight_bytes
from ..measurement.config import MeasureConfig
from ..measurement.runner import build_engine
from ..measurement.step_times import StepTime

PROFILE_VERSION = 1
PROFILES = Path(__file__).resolve().parents[2] / "configs" / "machines"


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """milliseconds = fixed_ms + token_ms * tokens read + cache_token_ms * tokens in the cache, summed over the batch.

    The linear model of SmartSpec (Liu et al. 2024, arXiv 2406.14066) for one forward of one target.
    """

    name: str
    device: str
    engine: str
    target: str
    source: str  # who measured it, with what
    weight_bytes: float  # of the target
    cache_token_bytes: float  # keys and values per token
    fixed_ms: float
    token_ms: float
    cache_token_ms: float
    overhead_ms: float  # what a round takes besides
    fit_error: float | None = None  # median relative error of the fit, where known
    version: int = PROFILE_VERSION

    def forward_ms(self, *, tokens: float, cached: float) -> float:
        """Of the profile's own target. Args: tokens read and tokens in the cache, summed over the batch."""
        return self.fixed_ms + self.token_ms * tokens + self.cache_token_ms * cached


def load_profile(name: str) -> MachineProfile:
    """A profile by name, of those that come with the package, or from a file. Raises BadInput."""
    from ...configs.loader import build  # needs pydantic, which a serving image may lack

    path = Path(name) if name.endswith(".json") else PROFILES / f"{name}.json"
    if not path.is_file():
        names = ", ".join(sorted(shipped.stem for shipped in PROFILES.glob("*.json")))
        raise BadInput(f"--machine {name}: no such profile; expected a .json file or one of {names}")
    try:
        document = loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: no JSON: {error}") from error
    profile = build(MachineProfile, document, where=str(path))
    if profile.version != PROFILE_VERSION:
        raise BadInput(f"{path}: version {profile.version}: expected {PROFILE_VERSION}")
    return profile


def fit_profile(target: Target, times: Sequence[StepTime], *, name: str, device: str, source: str) -> MachineProfile:
    """The linear model of measured rounds' forwards, terms not negative, least squares of relative errors."""
    timed = [time for time in times if time.verify_ms > 0]
    rows = np.array([[1.0, time.batch_size * time.num_tokens, time.batch_size * time.context] for time in timed])
    measured = np.array([time.verify_ms for time in timed])
    terms = non_negative_fit(rows, measured)
    fixed, token, cached = terms.tolist()
    return MachineProfile(
        name=name,
        device=device,
        engine="headstart",
        target=target.name,
        source=source,
        weight_bytes=weight_bytes(target),
        cache_token_bytes=key_bytes(target, 1),
        fixed_ms=fixed,
        token_ms=token,
        cache_token_ms=cached,
        overhead_ms=statistics.median(time.overhead_ms for time in times),
        fit_error=round(float(np.median(np.abs(rows @ terms / measured - 1))), 4),
    )


def non_negative_fit(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[n, p] and [n] to [p]: least squares of relative errors with terms >= 0."""
    from scipy.optimize import nnls

    weighted = rows / values[:, None]
    scale = np.linalg.norm(weighted, axis=0)  # columns differ by orders of magnitude
    return nnls(weighted / scale, np.ones_like(values))[0] / scale


@dataclass(frozen=True)
class ProfileTimes:
    """Predicted step times of a target and a drafter on another machine.

    A forward's fixed and per-token times scale with the target's bytes of weights relative to the profile's target, its
    cache time with the bytes of the cache. Drafting takes a share of a baseline step's forward, the ratio of their
    floating-point operations, as both read each weight once per token at batch size 1. Drafters on the host are free.
    """

    profile: MachineProfile
    weights: float  # bytes of this target over the profile's
    cache: float
    draft_share: dict[str, float]  # of each setting: operations to draft, over those of a forward of one token

    def at(self, setting: DraftSetting | None, *, batch_size: float, context: float) -> StepTime:
        def forward(tokens: float, cached: float) -> float:
            # the cache's time grows with its own ratio, the rest with that of the weights
            return self.weights * self.profile.forward_ms(tokens=tokens, cached=cached * self.cache / self.weights)

        num_tokens = 1 + (setting.num_drafted if setting else 0)
        return StepTime.of(
            setting,
            batch_size=batch_size,
            context=context,
            draft_ms=(self.draft_share[setting.name] if setting else 0.0) * forward(batch_size, 0.0),
            verify_ms=forward(batch_size * num_tokens, batch_size * context),
            overhead_ms=self.profile.overhead_ms,
            prefill_ms=forward(batch_size * context, 0.0),
        )


def times_on(
    profile: MachineProfile, target: Target, drafter: Drafter, settings: Sequence[DraftSetting]
) -> ProfileTimes:
    """What a profile predicts for a target and a drafter."""
    one_token = forward_operations(target)
    shares = {setting.name: draft_operations(target, drafter, setting) / one_token for setting in settings}
    weights = weight_bytes(target) / profile.weight_bytes
    return ProfileTimes(profile, weights, key_bytes(target, 1) / max(1, profile.cache_token_bytes), shares)


@torch.no_grad()
def forward_operations(target: Target) -> int:
    """Floating-point operations of a forward of one token, its logits included; behind one token of context."""
    engine = build_engine(target, None, None, MeasureConfig(), batch_size=1, max_length=8)
    tokens = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    return operations(lambda: engine.prefill(tokens, torch.ones_like(tokens[0])))


@torch.no_grad()
def draft_operations(target: Target, drafter: Drafter, setting: DraftSetting) -> int:
    """Floating-point operations of one round's drafting of one row, what was committed read first."""
    if drafter.on_host:
        return 0
    engine = build_engine(target, drafter, setting, MeasureConfig(), batch_size=1, max_length=8)
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
