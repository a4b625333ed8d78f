"""The engine of a draft setting, or of the baseline."""

import torch

from ...heads.drafter import Drafter
from ...heads.target import Target
from ..engine import Engine
from ..sampling import Sampling
from ..verify import AcceptRule
from .config import DraftSetting


def build_engine(
    target: Target,
    drafter: Drafter | None,
    setting: DraftSetting | None,
    *,
    batch_size: int,
    max_length: int,
    sampling: Sampling | None = None,
    accept: str | AcceptRule = "exact",
    steps: str = "eager",
    generator: torch.Generator | None = None,
) -> Engine:
    """The engine of a draft setting, or the baseline where that is None. Args: as of `Engine`."""
    return Engine(
        target,
        drafter if setting else None,
        batch_size=batch_size,
        max_length=max_length,
        num_draft_tokens=setting.num_draft_tokens if setting and not setting.tree else None,
        tree=setting.tree if setting else None,
        sampling=sampling,
        accept=accept,
        steps=steps,
        generator=generator,
    )
