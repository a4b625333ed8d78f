"""The table of head families: what `head.type` names, and how a fresh head is built."""

import torch
from torch import Tensor

from ..base.errors import BadInput
from ..targets.target import Target
from .assistant import AssistantHead
from .base import DraftHead, HeadConfig
from .block import BlockHead
from .draft_lm import DraftLMHead
from .eagle import EagleHead
from .eagle3 import Eagle3Head
from .medusa import MedusaHead
from .mtp import MtpHead

HEADS: dict[str, type[DraftHead]] = {
    "medusa": MedusaHead,
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "mtp": MtpHead,
    "draft_lm": DraftLMHead,
    "block": BlockHead,
    "assistant": AssistantHead,
}


def head_class(name: str) -> type[DraftHead]:
    """The family of that name. Raises BadInput, listing the names, if there is none."""
    if name not in HEADS:
        raise BadInput(f"head.type: {name!r}: expected one of {', '.join(HEADS)}")
    return HEADS[name]


def build_head(
    config: HeadConfig, target: Target, *, draft_token_ids: Tensor | None = None, seed: int = 0
) -> DraftHead:
    """A fresh head for a target, on its device, in fp32; the same seed gives the same weights.

    Args: draft_token_ids: [Vd] ascending target ids, where config.draft_vocab_size is set.

    Raises: BadInput if another head has put its adapters on this target.
    """
    if target.is_adapted:
        raise BadInput(f"target {target.name}: computes with another head's adapters, so {config.type} needs it afresh")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = head_class(config.type)(config, target, draft_token_ids).to(target.device)
    target.check_layers(head.feature_layers)
    return head
