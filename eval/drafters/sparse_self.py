"""The target drafting for itself over a small part of its cache (MagicDec, Chen et al. 2025); needs no training.

At a long context, most of a step's time is reading keys and values; a draft that reads a fixed number of them takes
little more time than reading the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...configs.errors import BadInput
from ...heads.base import Proposal
from ...heads.decoders.cache import SlotCache, SlotLayer
from ...heads.drafter import Drafter, Reading
from ...heads.nn.masks import hiding
from ...heads.target import Target

NUM_SINKS = 4  # attention sinks: first tokens, attended to whatever they say (StreamingLLM, Xiao et al. 2024)
NUM_OBSERVED = 16  # last prompt tokens whose attention chooses keys (SnapKV, Li et al. 2024)
SMALLEST_BUDGET = 32


class SparseCache(SlotCache):
    """For each row, layer and key head, `budget` keys and values copied from the target's cache.

    The first 3/4 of the slots are chosen when the prompt is read: in layers with full attention the sinks and what the
    prompt's end attends to most, in sliding layers the latest positions. The other slots are a ring buffer of the
    positions from `base` on: drafts are written there, and committed tokens replace them. A row that fits into the
    budget is held completely: base is then the number of chosen slots, and position p < base is in slot p.
    """

    def __init__(self, *, num_layers: int, budget: int, batch_size: int, device: torch.device):
        super().__init__(num_layers=num_layers, max_length=budget)
        self.num_recent = budget // 4
        self.num_chosen = budget - self.num_recent
        self.base = torch.zeros(batch_size, dtype=torch.long, device=device)  # [B]
        self.num_visible = self.num_recent  # latest ring positions that a query sees; drafts overwrote the others

    def seek(self, positions: Tensor, *, extent: int, is_exact: bool = False) -> None:
        """Set the positions [B, Q] of the next write; attention always reads all slots."""
        super().seek(self.slots(positions), extent=self.max_length, is_exact=True)

    def slots(self, positions: Tensor) -> Tensor:
        """The slots [B, Q] of positions [B, Q]."""
        behind = positions - self.base[:, None]
        return torch.where(behind < 0, positions, self.num_chosen + behind % self.num_recent)

    def mask(
        self,
        positions: Tensor,
        *,
        dtype: torch.dtype,
        window: int | None = None,
        chunk: int | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """As `visibility_mask`, for the positions that the slots hold now; for chains only."""
        assert seen is None and chunk is None, "no tree, and no attention in chunks, is drafted from a sparse cache"
        chosen = torch.arange(self.num_chosen, device=positions.device).expand(len(positions), 1, -1)  # [B, 1, C]
        base, positions = self.base[:, None, None], positions[..., None]  # [B, 1, 1], [B, Q, 1]
        ring = torch.arange(self.num_recent, device=positions.device)
        held = positions - (positions - base - ring) % self.num_recent  # [B, Q, R] the latest that a slot may hold
        is_seen = (held >= base) & (held > positions - self.num_visible)
        if window is None:  # chosen positions differ by head, but all are before any query
            is_chosen = chosen <= positions  # [B, Q, C]
        else:
            latest = base - self.num_chosen + chosen
            is_chosen = (latest <= positions) & (latest > positions - window)
            is_seen &= held > positions - window
        return hiding(~torch.cat([is_chosen, is_seen], -1)[:, None], dtype=dtype)  # [B, 1, Q, C + R]

    def fill(self, source: SlotCache, num_valid: Tensor, choose: Callable[[int, int, Tensor, Tensor], Tensor]) -> None:
        """Copy prompts of num_valid [B] tokens. choose(layer, Nkv, latest positions [B, C], base [B]) returns the
        positions to keep in the chosen slots, [B, Nkv or 1, C]."""
        self.base.copy_((num_valid - self.num_recent).clamp(min=self.num_chosen))
        positions = torch.arange(self.max_length, device=num_valid.device) + self.base[:, None] - self.num_chosen
        latest, recent = positions.split([self.num_chosen, self.num_recent], 1)  # [B, C], [B, R]
        recent = recent[:, None].clamp(max=source.max_length - 1)  # beyond a short prompt; masked until written
        for i, whole, part in self._pairs(source):
            keys, values = cast(Tensor, whole.keys), cast(Tensor, whole.values)
            self.layer(i, keys, values)
            chosen = choose(i, keys.shape[1], latest, self.base)  # [B, Nkv or 1, C]
            index = torch.cat([chosen, recent.expand(-1, chosen.shape[1], -1)], 2)[..., None]  # [B, Nkv or 1, C + R, 1]
            for into, stored in ((part.keys, keys), (part.values, values)):
                shape = (*stored.shape[:2], self.max_length, stored.shape[-1])
                cast(Tensor, into).copy_(stored.gather(2, index.expand(shape)))

    def refresh(self, source: SlotCache, positions: Tensor) -> None:
        """Replace what was drafted at these positions [B, Q] by the target's own keys and values."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]  # [B, 1]
        slots = self.slots(positions)
        for _, whole, part in self._pairs(source):
            for into, stored in ((part.keys, whole.keys), (part.values, whole.values)):
                taken = cast(Tensor, stored).transpose(1, 2)[rows, positions]  # [B, Q, Nkv, H]
                cast(Tensor, into).transpose(1, 2).index_put_((rows, slots), taken)

    def take_row(self, row: int, source: SlotCache, source_row: int) -> None:
        """Copy a row of another sparse cache, with its ring's base."""
        super().take_row(row, source, source_row)
        self.base[row] = cast(SparseCache, source).base[source_row]

    def _pairs(self, source: SlotCache) -> list[tuple[int, SlotLayer, SlotLayer]]:
        """The allocated layers of the source: number, layer, and our layer."""
        pairs = zip(cast(list[SlotLayer], source.layers), cast(list[SlotLayer], self.layers), strict=True)
        return [(i, whole, part) for i, (whole, part) in enumerate(pairs) if whole.is_initialized]


class Reread(SlotCache):
    """A read-only view of another cache: tokens that are read again are not written again."""

    def __init__(self, source: SlotCache):
        super().__init__(num_layers=len(source.layers), max_length=source.max_length)
        self.source = source

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs) -> tuple:
        layer = cast(SlotLayer, self.source.layers[layer_idx])
        return cast(Tensor, layer.keys)[:, :, : self.extent], cast(Tensor, layer.values)[:, :, : self.extent]


class KeyScores:
    """Collects how much a forward's queries attend to each key; passed to the target as `watch`."""

    def __init__(self) -> None:
        self.of_layer: dict[int, Tensor] = {}  # [B, Nkv, P] fp32, summed over queries and heads of the group

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor, scaling: float | None) -> None:
        """query [B, N, Q, H]; key [B, Nkv, P, H]; mask [B, 1 or N, Q, P] additive."""
        num_rows, _, num_queries, head_dim = query.shape
        packed = query.reshape(num_rows, key.shape[1], -1, head_dim)  # [B, Nkv, G * Q, H]
        logits = (packed @ key.transpose(2, 3)).float() * (head_dim**-0.5 if scaling is None else scaling)
        by_group = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (key.shape[1], -1))
        logits = logits.unflatten(2, (-1, num_queries)) + by_group  # [B, Nkv, G, Q, P]
        self.of_layer[cast(int, module.layer_idx)] = logits.softmax(-1).sum((2, 3))


@dataclass
class SparseState:
    """The state of drafting, which starts at the pending token, the last committed one."""

    cache: SparseCache
    extent: int  # all positions of the round are below this
    token: Tensor  # [B, 1] the pending token
    position: Tensor  # [B] its position


class SparseSelfDrafter(Drafter):
    """K greedy steps of the target itself, each over `budget` keys per layer and key head instead of all.

    Keys keep the rotation of their true positions. Each round copies the committed tokens' keys and values from the
    target's cache, so only those of the drafts themselves are approximate.
    """

    def __init__(self, target: Target, budget: int = 256):
        """Args: budget: keys per row, layer and key head, drafted ones included.

        Raises: BadInput if these are too few, or the target keeps more of a text than keys.
        """
        if budget < SMALLEST_BUDGET:
            raise BadInput(f"sparse-self: a budget of {budget} keys: expected at least {SMALLEST_BUDGET}")
        unknown = "recurrent layers" if target.has_states else "attention in chunks" if target.chunk else None
        if unknown is not None:
            raise BadInput(f"sparse-self: target {target.name} has {unknown}: no part of its keys stands for all")
        self.target, self.budget = target, budget

    def begin(self, *, batch_size: int, max_length: int) -> SparseState:
        device, layers = self.target.device, len(self.target.kept)
        budget = max(SMALLEST_BUDGET, min(self.budget, max_length))
        cache = SparseCache(num_layers=layers, budget=budget, batch_size=batch_size, device=device)
        position = torch.zeros(batch_size, dtype=torch.long, device=device)
        return SparseState(cache, 0, position[:, None], position)

    @torch.no_grad()
    def commit(self, state: SparseState, read: Reading) -> None:
        assert read.cache is not None
        state.extent = read.extent or read.cache.max_length
        state.token = read.next_tokens.gather(1, read.last[:, None])  # [B, 1]
        state.position = read.start + read.num_valid
        if read.follows_draft:
            offsets = torch.arange(read.tokens.shape[1], device=read.start.device)
            state.cache.refresh(read.cache, read.start[:, None] + offsets)
        else:
            self._read_prompts(state, read, read.cache)

    def commit_prompts(self, state: SparseState, read: Reading, *, most: int) -> None:
        self.commit(state, read)  # in one call, as it reads only the prompts' last tokens

    @torch.no_grad()
    def propose(self, state: SparseState, *, num_draft_tokens: int) -> Proposal:
        cache, token, tokens = state.cache, state.token, []
        cache.num_visible = cache.num_recent - num_draft_tokens  # hides positions that drafts may have overwritten
        if cache.num_visible < 1:
            raise BadInput(f"num_draft_tokens {num_draft_tokens}: a budget of {cache.max_length} keys has no room")
        for depth in range(num_draft_tokens):
            positions = state.position[:, None] + depth  # [B, 1]
            hidden = self.target.forward(token, cache=cache, positions=positions, extent=state.extent).post_norm
            token = self.target.logits(hidden).argmax(-1)  # [B, 1]
            tokens.append(token)
        return Proposal(torch.cat(tokens, 1))

    def _read_prompts(self, state: SparseState, read: Reading, whole: SlotCache) -> None:
        """Choose keys: read the prompts' last tokens once more and collect what they attend to."""
        cache, num_queries = state.cache, min(NUM_OBSERVED, read.tokens.shape[1])
        back = torch.arange(num_queries, device=read.start.device) - num_queries
        positions = (read.num_valid[:, None] + back).clamp(min=0)  # [B, W]
        scores, extent = KeyScores(), max(state.extent, cache.max_length)
        where: dict[str, Any] = {"positions": positions, "lengths": read.num_valid, "extent": extent}
        self.target.forward(read.tokens.gather(1, positions), cache=Reread(whole), watch=scores, **where)
        cache.fill(whole, read.num_valid, lambda *which: self._chosen(scores, *which))

    def _chosen(self, scores: KeyScores, layer: int, num_heads: int, latest: Tensor, base: Tensor) -> Tensor:
        """[B, Nkv or 1, C] the ascending positions before base [B] to keep; all of them if there are at most C.

        In sliding layers the latest [B, C]; if the target's attention gives no scores, the sinks and the latest.
        """
        if self.target.window_of(layer) is not None:
            return latest[:, None]
        if layer not in scores.of_layer:
            sinks = torch.arange(NUM_SINKS, device=base.device).expand(len(base), -1)
            return torch.cat([sinks, latest[:, NUM_SINKS:]], 1)[:, None]
        attention = scores.of_layer[layer]  # [B, Nkv, P]
        if attention.shape[1] != num_heads:  # latent attention keeps one key for all heads
            attention = attention.sum(1, keepdim=True)
        positions = torch.arange(attention.shape[-1], device=attention.device)
        attention = attention.masked_fill(positions < NUM_SINKS, torch.inf)
        attention = attention.masked_fill(positions >= base[:, None, None], -torch.inf)
        return attention.topk(latest.shape[1], -1).indices.sort(-1).values
