"""Block drafters: DFlash (Chen et al. 2026, arXiv 2602.06036), DFlash2 and DSpark, which fill K tokens in one pass.

A chain that starts at t follows the anchor x_{t+1}: the token that the target itself produced and has not read yet. The
first slot of its block holds the anchor at its position t + 1; the slots behind it hold a mask token. Of the text, a
block sees the target's fused features at positions <= t (nn/block_layer.py). With `sample_from_anchor` (DSpark) the
anchor's slot drafts depth 0; without it (DFlash) the next slot drafts depth 0 and the anchor's drafts nothing.

DSpark's Markov head adds to each slot's logits a low-rank term that depends on the previous token: after the one pass,
K small products in sequence condition each draft on the one before. Its confidence head estimates acceptance.

DFlash2 (nn/dflash2.py) has convolutions over the slots instead, and a selector that walks through the most probable
tokens of each slot, each chosen behind the one before. LiLiCorr (nn/lilicorr.py) walks by what a small transformer over
all slots' most probable tokens says of pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..targets.caches.attention import grouped_attention
from ..targets.caches.cache import SlotCache
from ..targets.caches.masks import interval_mask
from ..targets.cpu.decoder import CpuLayers
from ..targets.cpu.packing import pack_linears
from .base import DraftBatch
from .block_network import BlockNetwork
from .block_start import fit_block
from .drafting.drafter import Reading
from .drafting.trees import Draws, Proposal, Tree
from .nn.block_layer import with_previous
from .nn.candidates import SlotCandidates, only
from .nn.dflash2 import NUM_TAPS
from .nn.layers import serving_keys, window_keys
from .nn.lilicorr import LILICORR_KEYS, VECTOR_EPS
from .start.closed_form import scale_norm


@dataclass
class BlockState:
    """The state of drafting."""

    cache: SlotCache  # keys and values of the context by position, then of the block's slots
    extent: int  # upper bound on the slots in use
    num_depths: int  # tokens that the next block drafts
    position: Tensor  # [B] the last position that the target has read
    anchor: Tensor  # [B, 1] the token that follows it
    hidden: Tensor  # [B, K, D] the last block's states, input of the output layer
    logits: Tensor  # [B, K, Vd] its logits, before what depends on the token before
    context: Tensor  # [B, D] the target's fused features at `position`
    candidates: SlotCandidates | None = None  # [B, K, ...] that are chosen from


class BlockHead(BlockNetwork):
    """A block drafter with the tensor names that vLLM, SGLang and llama.cpp load: fc, hidden_norm, layers.{i}.*, norm,
    and depending on the config markov_head.*, confidence_head.*, candidate_selector.*, lilicorr.*, lm_head."""

    packed: CpuLayers | None = None  # the layers for drafting in bf16 on a CPU

    def serving_config(self) -> dict[str, Any]:
        config, ids = self.config, [i - 1 for i in self.feature_layers]  # engines count layer outputs here
        served = {
            "model_type": "qwen3",
            **serving_keys(self.llama, num_layers=config.num_layers),
            "layer_types": ["full_attention"] * config.num_layers,
            "use_sliding_window": False,
            **window_keys(config.sliding_window, num_layers=config.num_layers),
            "vocab_size": self.target.vocab_size,
            "draft_vocab_size": config.draft_vocab_size or self.target.vocab_size,
            "num_target_layers": self.target.num_layers,
            "block_size": config.num_depths + self.first_slot,
            "mask_token_id": self.mask_token,
            "target_layer_ids": ids,
            "sample_from_anchor": config.sample_from_anchor,
            "is_causal": False,
        }
        if self.markov_head is None:
            read: dict[str, Any] = {"mask_token_id": self.mask_token, "target_layer_ids": ids, "causal": False}
            if config.conv_group_size is None and self.chooser is None:
                return {"architectures": ["DFlashDraftModel"], **served, "dflash_config": read}
            read["block_size"] = served["block_size"]
            if self.lilicorr is None or config.conv_group_size is not None:
                read |= {"conv_kernel_size": NUM_TAPS, "conv_group_size": config.conv_group_size}
            if self.lilicorr is None:
                read |= {"selector_rank": config.selector_rank, "selector_top_k": config.selector_top_k}
                return {"architectures": ["DFlash2DraftModel"], **served, "dflash_config": read}
            read |= {"lilicorr_enabled": True, "lilicorr_vector_eps": VECTOR_EPS}
            read |= {key: getattr(config, own) for key, (own, _) in LILICORR_KEYS.items()}
            served["has_own_lm_head"] = config.output == "own"
            return {"architectures": ["LiLiCorrDraftModel"], **served, "dflash_config": read}
        return {
            "architectures": ["Qwen3DSparkModel"],
            **served,
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence,
        }

    @property
    def method(self) -> str:
        return "dflash" if self.markov_head is None else "dspark"

    def fit(self, batches: Sequence[DraftBatch]) -> str | None:
        return fit_block(self, batches) if self.config.is_fitted else None

    def scale_outputs(self, factors: Sequence[float]) -> None:
        scale_norm(self.norm, min(factors))

    # drafting

    def pack(self) -> None:
        packed = CpuLayers.of(self.decoder_layers, self.llama)
        self.packed = packed if packed is not None and packed.writes else None
        pack_linears(self, without=self.decoder_layers if self.packed else ())

    def begin(self, *, batch_size: int, max_length: int) -> BlockState:
        cache = self.new_cache(self.config.num_layers, max_length)
        ids = torch.zeros(batch_size, 1, dtype=torch.long, device=self.fc.weight.device)
        nothing = self.fc.weight.new_zeros(batch_size, 0, 0)
        context = self.fc.weight.new_zeros(batch_size, self.target.hidden_size)
        return BlockState(cache, max_length, self.num_depths, ids[:, 0], ids, nothing, nothing, context)

    @torch.no_grad()
    def commit(self, state: BlockState, read: Reading) -> None:
        context, positions = self.features(read.output), read.positions  # [B, Q, D], [B, Q]
        state.extent = read.extent or state.cache.max_length
        state.cache.seek(positions, extent=state.extent)
        self._write_context(context, positions, state.cache)
        state.position = read.start + read.last
        state.anchor = read.next_tokens.gather(1, read.last[:, None])
        state.context = context[torch.arange(len(context), device=context.device), read.last]

    def _write_context(self, context: Tensor, positions: Tensor, cache: SlotCache) -> None:
        """Write each layer's keys and values of the context [B, Q, D] to the cache slots of its positions [B, Q]."""
        if self.packed is not None and self.packed.is_for(context):
            self.packed.write(context, cache, self.rotary.tables(cache.max_length, like=context), positions)
            return
        rotary = self.rotary(positions, like=context, num_positions=cache.max_length)
        for i, layer in enumerate(self.decoder_layers):
            cache.update(*layer.self_attn.keys_values(context, rotary), i)

    @torch.no_grad()
    def propose(self, state: BlockState, *, num_draft_tokens: int) -> Proposal:
        state.num_depths = num_draft_tokens
        chooser, to_target = self.chooser, None if self.vocabulary is None else self.vocabulary.to_target
        if chooser is None:
            return super().propose(state, num_draft_tokens=num_draft_tokens)
        self.fill(state)
        assert state.candidates is not None
        tokens, scores = chooser.chain(state.candidates, state.anchor[:, 0], to_target)
        return Proposal(tokens, logits=list(only(scores, state.candidates.ids, self.num_drafted).unbind(1)))

    @torch.no_grad()
    def propose_tree(self, state: BlockState, tree: Tree, *, draws: Draws | None = None) -> Proposal:
        state.num_depths = tree.depth
        return super().propose_tree(state, tree, draws=draws)

    @torch.no_grad()
    def first_logits(self, state: BlockState) -> Tensor:
        self.fill(state)
        return self.expand(state, state.anchor, None, depth=0)[:, 0]

    def fill(self, state: BlockState) -> None:
        """Fill the slots of a block: its states and logits, before what depends on the token before."""
        hidden = self.slots(state.anchor, state.num_depths)  # [B, W, D]
        positions = state.position[:, None] + 1 + torch.arange(hidden.shape[1], device=hidden.device)  # [B, W]
        state.cache.seek(positions, extent=state.extent)
        hidden = self._through_layers(hidden, positions, state.cache)
        state.hidden = self.norm(hidden)[:, self.first_slot :]  # [B, K, D]
        state.logits = self._output(state.hidden)
        if self.chooser is not None:
            behind = {"anchors": state.anchor[:, 0], "context": state.context}
            state.candidates = self.chooser.best(state.hidden, state.logits, **behind)

    def _through_layers(self, hidden: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """The slots of one block per row [B, W, D] -> [B, W, D]; each sees the context, with a window only as many
        positions as end at its own, and all slots of its block.

        Their keys and values are written to the cache at positions [B, W], until true features overwrite them."""
        last, mask = positions[:, -1:].expand_as(positions), None
        packed = self.packed if self.packed is not None and self.packed.is_for(hidden) else None
        if self.window is not None:
            mask = interval_mask(positions - self.window + 1, last, extent=cache.extent, dtype=hidden.dtype)
        elif packed is None:
            mask = cache.read_mask(last, last, dtype=hidden.dtype)
        if packed is not None:
            tables = self.rotary.tables(cache.max_length, like=hidden)
            return packed(hidden, cache, tables, positions, last=last, mask=mask)
        rotary = self.rotary(positions, like=hidden, num_positions=cache.max_length)
        for i, layer in enumerate(self.decoder_layers):

            def attend(queries: Tensor, keys: Tensor, values: Tensor, i: int = i, module: nn.Module = layer) -> Tensor:
                keys, values = cache.update(keys, values, i)
                return grouped_attention(module, queries, keys, values, mask)[0]

            hidden = layer(hidden, rotary, attend)
        return hidden

    @torch.no_grad()
    def expand(self, state: BlockState, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        logits = state.logits[:, depth : depth + 1]  # [B, 1, Vd]
        if self.markov_head is not None:
            return logits + self.markov_head.markov_w2(self.markov_head.markov_w1(tokens))
        if self.chooser is None or state.candidates is None:
            return logits.expand(-1, tokens.shape[1], -1)
        candidates = state.candidates.at(depth)
        scores = candidates.scores(self.chooser.previous(tokens))
        return only(scores, candidates.ids, self.num_drafted)

    @torch.no_grad()
    def confidence(self, state: BlockState, tokens: Tensor) -> Tensor | None:
        head, before = self.confidence_head, torch.cat([state.anchor, tokens[:, :-1]], 1)  # [B, K]
        return None if head is None else head(with_previous(state.hidden, self.markov_head, before)).float().sigmoid()
