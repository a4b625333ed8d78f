"""What tests of several folders decode with: untrained heads, states that have read a text, transformers' own text."""

from typing import Any

import torch
from headstart.engines.heads import HEADS, build_head
from headstart.heads.drafting.drafter import Drafter, Reading
from headstart.targets.layers.target_output import TargetOutput
from headstart.targets.target import Target


def untrained(head_type: str, target: Target, **options: Any) -> Any:
    """A head of that family as it starts. Args: options: of its config."""
    return build_head(HEADS[head_type].config_class(type=head_type, **options), target, seed=1).eval()


def own_text(model: Any, prompt: list[int], num_new: int, **how: Any) -> list[int]:
    """What transformers' own `generate` writes behind a prompt, greedily. Args: how: options of `generate`."""
    ids = torch.tensor([prompt])
    how = {"do_sample": False, "max_new_tokens": num_new, "pad_token_id": 0, **how}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].tolist()


def told(drafter: Drafter, texts: list[list[int]], *, state: Any = None, start: int = 0) -> Any:
    """A state that has read these texts, of which each row's last token is pending."""
    state = drafter.begin(batch_size=len(texts), max_length=99) if state is None else state
    length = max(map(len, texts)) - 1
    rows = torch.tensor([text + [0] * (length + 1 - len(text)) for text in texts])  # [B, Q + 1]
    nothing = TargetOutput(torch.zeros(len(texts), length, 0, 1), torch.zeros(len(texts), length, 1))
    num_valid = torch.tensor([len(text) - 1 for text in texts])
    drafter.commit(state, Reading(rows[:, :-1], rows[:, 1:], nothing, torch.full_like(num_valid, start), num_valid))
    return state
