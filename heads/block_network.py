"""The network of a block drafter and what training computes with it; `block` drafts and serves it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..configs.errors import BadInput
from .base import ChainStarts, DraftBatch, DraftHead, HeadConfig
from .loss.calibration import ConfidenceLine
from .loss.chains import drawn_starts
from .loss.functions import LossSpec, output_layer_rows
from .nn.block_layer import BlockLayer, ConfidenceHead, MarkovHead, attend_blocks, with_previous
from .nn.dflash2 import CandidateSelector, only
from .nn.kept import layer_bytes
from .nn.layers import RMSNorm, Rotary, llama_config
from .nn.mask_token import mask_token_of
from .nn.target_output import TargetOutput
from .target import Target

FEWEST_LAYERS = 8  # of a target, for DFlash's choice of feature layers; shallower ones get fewer features


@dataclass(kw_only=True)
class BlockConfig(HeadConfig):
    """A block drafter's keys; feature_layers None: see `default_feature_layers`."""

    type: str = "block"
    num_depths: int = 7  # tokens drafted per block
    depth_weights: str = "exponential"
    depth_decay: float = 4.0
    loss: dict[str, float] = field(default_factory=lambda: {"kl": 1.0})
    num_layers: int = 3  # decoder layers
    sample_from_anchor: bool = True  # the anchor's own slot drafts the token behind it
    markov_rank: int = 256  # rank of the Markov head; 0: none, the slots of a block are drafted independently
    confidence: bool = False  # a confidence head, trained beside `loss` with confidence_weight
    confidence_weight: float = 1.0
    # channels that share a correction of DFlash2's convolutions; None: there are none
    conv_group_size: int | None = None
    selector_rank: int = 0  # rank of DFlash2's selector; 0: none
    selector_top_k: int = 16  # tokens of each slot that it chooses from
    selector_weight: float = 1.0  # of its loss, `selection`, beside `loss`
    has_head_norms: bool = True  # normalise queries and keys of each head, as Qwen3 and the serving engines do
    output: str = "shared"  # shared: the target's output layer, frozen; own: trained, starts as a copy of it
    mask_token_id: int | None = None  # None: see `default_mask_token`
    start: Literal["random", "fitted"] = "random"  # fitted: on the first rows of training, see start/block.py
    sliding_window: int | None = None  # a slot sees this many positions, its own the last of them; None: all before
    num_blocks: int = 512  # blocks that a training step draws per row
    # the share of them that is narrower than num_depths, so that the head also drafts well at a smaller K
    narrow_share: float = 0.0
    architecture: dict[str, Any] = field(default_factory=dict)  # overrides of the target's values; `ARCHITECTURE` keys

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(1, "num_layers", "num_blocks", "conv_group_size", "selector_top_k")
        self.check_least(0, "markov_rank", "narrow_share", "mask_token_id", "confidence_weight", "selector_rank")
        self.check_least(0, "selector_weight")
        num_slots = self.num_depths + (0 if self.sample_from_anchor else 1)
        if self.sliding_window is not None and self.sliding_window < num_slots:
            raise BadInput(f"sliding_window {self.sliding_window}: expected at least the {num_slots} slots of a block")
        if self.narrow_share > 1:
            raise BadInput(f"narrow_share {self.narrow_share}: expected at most 1")
        if self.selector_rank and (self.markov_rank or self.confidence):
            raise BadInput(
                "selector_rank: not together with markov_rank or confidence: both choose by the token before"
            )
        if self.output not in ("own", "shared"):
            raise BadInput(f"output {self.output!r}: expected own or shared")
        if self.draft_vocab_size is not None and self.output == "shared":
            raise BadInput("draft_vocab_size: the shared output layer drafts the whole vocabulary; set output: own")

    def resolved(self, target: Target) -> "BlockConfig":
        layers = default_feature_layers(target.num_layers) if self.feature_layers is None else self.feature_layers
        return replace(self, feature_layers=layers, mask_token_id=mask_token_of(target, self.mask_token_id))


def default_feature_layers(num_layers: int) -> list[int]:
    """DFlash's choice for n target layers: five `hidden_states` indices spread evenly from 2 to n - 2."""
    if num_layers < FEWEST_LAYERS:
        return sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1})
    return sorted({round(2 + i * (num_layers - 4) / 4) for i in range(5)})


class BlockNetwork(DraftHead):
    """Layers that fill the slots of blocks, and the heads that make a draft depend on the token before it."""

    config_class = BlockConfig
    has_one_output = True

    def __init__(self, config: BlockConfig, target: Target, draft_token_ids: Tensor | None = None):
        config = config.resolved(target)
        super().__init__(config, target, draft_token_ids)
        self.config: BlockConfig = config
        self.mask_token = cast(int, config.mask_token_id)
        self.max_draft_tokens = self.default_draft_tokens = config.num_depths
        self.first_slot = 0 if config.sample_from_anchor else 1  # the one that drafts depth 0
        self.llama = llama_config(target.config, config.architecture)
        size, eps = target.hidden_size, self.llama.rms_norm_eps
        self.fc = nn.Linear(len(self.ascending_layers()) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps=eps)
        group = config.conv_group_size
        if group is not None and size % group:
            raise BadInput(f"head.conv_group_size {group}: does not divide the hidden size {size}")
        how: dict[str, Any] = {"has_head_norms": config.has_head_norms, "conv_group_size": group}
        self.layers = nn.ModuleList(BlockLayer(self.llama, **how) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, eps=eps)
        self.rotary = Rotary(self.llama)
        rank = config.markov_rank
        self.markov_head = MarkovHead(target.vocab_size, self.num_drafted, rank=rank) if rank else None
        self.confidence_head = ConfidenceHead(size + rank) if config.confidence else None
        self.candidate_selector = None
        if rank := config.selector_rank:
            sizes = target.vocab_size, self.num_drafted, size
            self.candidate_selector = CandidateSelector(*sizes, rank=rank, top_k=config.selector_top_k)
        with torch.no_grad():
            self.norm.weight.copy_(target.final_norm_scale())
            if config.output == "own":
                self.lm_head = nn.Linear(size, self.num_drafted, bias=False)
                self.lm_head.weight.copy_(output_layer_rows(target.output_layer, self.vocabulary)["weight"])

    @property
    def pairs(self) -> MarkovHead | CandidateSelector | None:
        """What makes a draft depend on the token before it."""
        return self.markov_head or self.candidate_selector

    @property
    def decoder_layers(self) -> list[BlockLayer]:
        return cast(list[BlockLayer], list(self.layers))

    def features(self, output: TargetOutput) -> Tensor:
        """[B, T, D] the target's features [B, T, L, D] fused: the context that all layers attend to."""
        return self.hidden_norm(self.fc(output.features.to(self.fc.weight.dtype).flatten(2)))

    def slots(self, anchors: Tensor, num_depths: int) -> Tensor:
        """[B, W * S, D] the embedded slots of blocks with anchors [B, S]: slot 0 of all blocks, then slot 1, ..."""
        masks = torch.full_like(anchors, self.mask_token).repeat(1, num_depths + self.first_slot - 1)
        return self.target.embed(torch.cat([anchors, masks], 1)).to(self.fc.weight.dtype)

    def output_rows(self) -> Tensor:
        """[Vd, D] weights of the output layer."""
        return (self.target.output_layer if self.config.output == "shared" else self.lm_head).weight

    def training_starts(self, loss_mask: Tensor) -> ChainStarts:
        every, config = super().training_starts(loss_mask), self.config
        return drawn_starts(every, most=config.num_blocks, narrow_share=config.narrow_share)

    def kept_bytes(self, num_chains: int, *, itemsize: int, num_depths: int) -> int:
        num_positions = num_chains * (num_depths + self.first_slot) * self.config.num_layers
        return layer_bytes(self.llama, num_positions=num_positions, itemsize=itemsize)

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        num_slots = starts.num_depths + self.first_slot
        limit = batch.input_ids.shape[1] + num_slots
        context = self.features(batch.output)  # [B, T, D]
        of_context = self.rotary(batch.positions, like=context, num_positions=limit)
        offsets = torch.arange(num_slots, device=context.device)
        positions = 1 + starts.take(batch.positions)[:, None] + offsets[:, None]  # [B, W, S]
        hidden = self.slots(starts.take(batch.input_ids, offset=1), starts.num_depths)  # [B, W * S, D]
        of_slots = self.rotary(positions.flatten(1), like=context, num_positions=limit)  # autocast may have 16 bits
        sees_slots = None if starts.widths is None else offsets < starts.widths[..., None] + self.first_slot
        sight, num_blocks = batch.sight(starts, window=self.config.sliding_window), starts.positions.shape[1]

        def mixed(layer: BlockLayer, hidden: Tensor, context: Tensor) -> Tensor:
            keys_values = layer.self_attn.keys_values(context, of_context)
            attend = partial(attend_blocks, context=keys_values, sight=sight, sees_slots=sees_slots)
            return layer.mixed(hidden, of_slots, attend, num_blocks=num_blocks)

        run = self.runner(starts, like=context)  # of half a layer at a time
        for layer in self.decoder_layers:
            hidden = run(layer.fed_forward, run(mixed, layer, hidden, context), num_blocks=num_blocks)
        hidden = self.norm(hidden).unflatten(1, (num_slots, -1))  # [B, W, S, D]
        for depth in range(starts.num_depths):
            before = starts.take(batch.input_ids, offset=depth + 1)
            yield with_previous(hidden[:, depth + self.first_slot], self.pairs, before)

    def predicted_state(self, hidden: Tensor, depth: int) -> Tensor:
        return hidden[..., : self.target.hidden_size]

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        logits = self.slot_logits(hidden)
        if self.candidate_selector is None:
            return logits
        unary, ids = logits.topk(self.candidate_selector.top_k, -1)
        return only(self.select(hidden, unary, ids), ids, self.num_drafted)

    def slot_logits(self, hidden: Tensor) -> Tensor:
        """[..., D + rank] -> [..., Vd] with the Markov head's term, before the selector's choice."""
        states, before = hidden.tensor_split([self.target.hidden_size], -1)
        logits = self._output(states)
        return logits if self.markov_head is None else logits + self.markov_head.markov_w2(before)

    def select(self, hidden: Tensor, unary: Tensor, ids: Tensor) -> Tensor:
        """[..., top_k] the candidates' logits of [..., D + rank]."""
        states, before = hidden.tensor_split([self.target.hidden_size], -1)
        return cast(CandidateSelector, self.candidate_selector).read(states, unary, ids).scores(before)

    def loss_spec(self, depth: int) -> LossSpec:
        spec, config = replace(super().loss_spec(depth), draft_logits=self.slot_logits), self.config
        if self.confidence_head is not None:
            mix = {**spec.mix, "confidence": config.confidence_weight}
            spec = replace(spec, mix=mix, confidence=self.confidence_head)
        if self.candidate_selector is not None:
            mix = {**spec.mix, "selection": config.selector_weight}
            spec = replace(spec, mix=mix, select=self.select, num_candidates=self.candidate_selector.top_k)
        return spec

    def taught_confidence(self, batch: DraftBatch, starts: ChainStarts) -> Tensor | None:
        head = self.confidence_head
        return None if head is None else torch.stack([head(states) for states in self.unroll(batch, starts)], 2)

    def calibrated(self, tensors: dict[str, Tensor], line: ConfidenceLine) -> dict[str, Tensor]:
        weight, bias = "confidence_head.proj.weight", "confidence_head.proj.bias"
        moved = {weight: tensors[weight] * line.scale, bias: tensors[bias] * line.scale + line.shift}
        return {**tensors, **moved}

    def _output(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden) if self.config.output == "shared" else self.lm_head(hidden)
