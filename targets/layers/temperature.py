"""Attention that grows sharper with the position, in our forwards by the position of each row's tokens.

Llama 4 multiplies the queries of layers without rotary positions by 1 + scale * log(1 + floor((position + 1) / floor)),
and counts positions from what its cache holds, the same for all rows (Nakanishi 2025).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

FLOORS = "floor_scale", "log_scaling_n_floor"  # names of the number of tokens from which on queries are scaled
BY_BETA = "llama_4_scaling_beta"  # Ministral's rotary parameters have it where queries are scaled so


class Temperature:
    """The layers of a model that count positions themselves; in forwards that are given positions they use these."""

    def __init__(self, base: nn.Module):
        self.positions: Tensor | None = None  # [B, Q] of the forward that runs now
        self.parts: list[Any] = [
            part
            for part in base.modules()
            if getattr(part, "attn_temperature_tuning", False) and not getattr(part, "use_rope", True)
        ]
        if self.parts:
            base.register_forward_pre_hook(self._begin, with_kwargs=True)
        for part in self.parts:
            part.q_proj.register_forward_hook(self._scaled(part))

    def _begin(self, base: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.positions = kwargs.get("position_ids")
        for part in self.parts:
            part.attn_temperature_tuning = self.positions is None

    def _scaled(self, part: Any) -> Any:
        def scale(module: nn.Module, args: tuple, queries: Tensor) -> Tensor | None:
            if self.positions is None:
                return None
            steps = torch.floor((self.positions.to(queries.device).float() + 1) / part.floor_scale)
            scales = torch.log1p(steps) * part.attn_scale + 1  # [B, Q]
            return (queries.view(*scales.shape, -1) * scales[..., None]).to(queries.dtype).view_as(queries)

        return scale


@contextmanager
def scaled_from(target: Any, num_tokens: int) -> Iterator[None]:
    """Inside, every scale of queries that grows with the position does so from `num_tokens` on, so that a short text
    shows whether it is computed rightly."""
    rope = getattr(target.config, "rope_parameters", None) or {}
    ropes = [part for part in (rope, *rope.values()) if isinstance(part, dict) and part.get(BY_BETA)]
    places = [(vars(part), name) for part in [*target.base.modules(), target.config] for name in FLOORS]
    places += [(part, "original_max_position_embeddings") for part in ropes]
    places = [(place, name) for place, name in places if isinstance(place.get(name), int) and place[name] > num_tokens]
    before = [place[name] for place, name in places]
    for place, name in places:
        place[name] = num_tokens
    try:
        yield
    finally:
        for (place, name), value in zip(places, before, strict=True):
            place[name] = value
