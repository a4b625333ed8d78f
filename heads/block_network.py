"""The network of a block drafter and what training computes with it; `block` drafts and serves it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..base.errors import BadInput
from ..targets.layers.rotary import Rotary
from ..targets.layers.target_output import TargetOutput
from ..targets.target import Target
from .base import ChainStarts, DraftBatch, DraftHead, HeadConfig
from .drafting.windowed import Windowed
from .loss.calibration import ConfidenceLine
from .loss.chains import drawn_starts
from .loss.chunked import chunk_size
from .loss.functions import LossSpec, output_layer_rows
from .nn.block_layer import BlockLayer, ConfidenceHead, MarkovHead, attend_blocks, with_previous
from .nn.candidates import Chooser, only
from .nn.dflash2 import CandidateSelector
from .nn.kept import layer_bytes
from .nn.layers import RMSNorm, llama_config
from .nn.lilicorr import CandidateLattice
from .nn.mask_token import mask_token_of
from .start.closed_form import channel_sizes, input_scales

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
    selector_rank: int = 0  # rank by which DFlash2's selector or LiLiCorr's lattice scores pairs of tokens; 0: neither
    selector_top_k: int = 16  # tokens of each slot that it chooses from, by the loss `selection` beside `loss`
    lattice_layers: int = 0  # of LiLiCorr's lattice; 0: the selector is DFlash2's
    lattice_size: int = 128  # of these layers; that of the target's states: embeddings are read as they are
    lattice_heads: int = 4
    lattice_mlp_ratio: float = 2.0  # of the MLP's channels to lattice_size
    lattice_scale: float = 10.0  # logits are the cosines of vectors times this
    output: str = "shared"  # shared: the target's output layer, frozen; own: trained, starts as a copy of it
    mask_token_id: int | None = None  # None: see `default_mask_token`
    start: Literal["random", "fitted"] = "random"  # fitted: on the first rows of training, see block_start.py
    sliding_window: int | None = None  # a slot sees this many positions, its own the last of them; None: all before
    blocks_per_row: int = 512  # that a training step draws
    architecture: dict[str, Any] = field(default_factory=dict)  # overrides of the target's values; `ARCHITECTURE` keys

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(1, "num_layers", "blocks_per_row", "conv_group_size", "selector_top_k")
        self.check_least(0, "markov_rank", "mask_token_id", "confidence_weight", "selector_rank")
        self.check_least(0, "lattice_layers")
        self.check_least(1, "lattice_size", "lattice_heads", "lattice_mlp_ratio")
        num_slots = self.num_depths + (0 if self.sample_from_anchor else 1)
        if self.sliding_window is not None and self.sliding_window < num_slots:
            raise BadInput(f"sliding_window {self.sliding_window}: expected at least the {num_slots} slots of a block")
        if self.selector_rank and (self.markov_rank or self.confidence):
            raise BadInput(
                "selector_rank: not together with markov_rank or confidence: both choose by the token before"
            )
        if self.lattice_layers and not self.selector_rank:
            raise BadInput(f"lattice_layers {self.lattice_layers}: needs selector_rank, by which they score pairs")
        if self.lattice_size % self.lattice_heads:
            raise BadInput(f"lattice_heads {self.lattice_heads}: does not divide lattice_size {self.lattice_size}")
        if self.output not in ("own", "shared"):
            raise BadInput(f"output {self.output!r}: expected own or shared")
        if self.draft_vocab_size is not None and self.output == "shared":
            raise BadInput("draft_vocab_size: the shared output layer drafts the whole vocabulary; set output: own")

    @property
    def is_fitted(self) -> bool:
        return self.start == "fitted"

    def resolved(self, target: Target) -> "BlockConfig":
        layers = self.layers_on(target, default_feature_layers(target.num_layers))
        return replace(self, feature_layers=layers, mask_token_id=mask_token_of(target, self.mask_token_id))


def default_feature_layers(num_layers: int) -> list[int]:
    """DFlash's choice for n target layers: five `hidden_states` indices spread evenly from 2 to n - 2."""
    if num_layers < FEWEST_LAYERS:
        return sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1})
    return sorted({round(2 + i * (num_layers - 4) / 4) for i in range(5)})


class BlockNetwork(Windowed, DraftHead):
    """Layers that fill the slots of blocks, and the heads that make a draft depend on the token before it."""

    config_class, title = BlockConfig, "block head"
    has_one_output = True

    def __init__(self, config: BlockConfig, target: Target, draft_token_ids: Tensor | None = None):
        config = config.resolved(target)
        super().__init__(config, target, draft_token_ids)
        self.config: BlockConfig = config
        self.mask_token, self.window = cast(int, config.mask_token_id), config.sliding_window
        self.max_draft_tokens = self.default_draft_tokens = config.num_depths
        self.first_slot = 0 if config.sample_from_anchor else 1  # the one that drafts depth 0
        self.llama = llama_config(target.config, config.architecture)
        size, eps = target.hidden_size, self.llama.rms_norm_eps
        self.fc = nn.Linear(len(self.ascending_layers()) * size, size, bias=False)
        self.input_sizes: Tensor | None = None  # [L * D] of what `fc` reads, once rows are measured
        self.hidden_norm = RMSNorm(size, eps=eps)
        group = config.conv_group_size
        if group is not None and size % group:
            raise BadInput(f"head.conv_group_size {group}: does not divide the hidden size {size}")
        self.layers = nn.ModuleList(BlockLayer(self.llama, conv_group_size=group) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, eps=eps)
        self.rotary = Rotary(self.llama)
        rank = config.markov_rank
        self.markov_head = MarkovHead(target.vocab_size, self.num_drafted, rank=rank) if rank else None
        self.confidence_head = ConfidenceHead(size + rank) if config.confidence else None
        self.candidate_selector = self.lilicorr = None
        top_k = min(config.selector_top_k, self.num_drafted)
        if config.lattice_layers:
            self.lilicorr = CandidateLattice(
                size,
                num_slots=config.num_depths,
                top_k=top_k,
                rank=config.selector_rank,
                num_layers=config.lattice_layers,
                size=config.lattice_size,
                num_heads=config.lattice_heads,
                mlp_ratio=config.lattice_mlp_ratio,
                scale=config.lattice_scale,
                eps=eps,
                embed=target.embed,
                to_target=self.to_target,
            )
        elif rank := config.selector_rank:
            sizes = target.vocab_size, self.num_drafted, size
            self.candidate_selector = CandidateSelector(*sizes, rank=rank, top_k=top_k)
        with torch.no_grad():
            self.norm.weight.copy_(target.final_norm_scale())
            if config.output == "own":
                self.lm_head = nn.Linear(size, self.num_drafted, bias=False)
                self.lm_head.weight.copy_(output_layer_rows(target.output_layer, self.vocabulary)["weight"])

    def vocabulary_matrices(self) -> list[Tensor]:
        """Those over the drafted vocabulary. Where that is cut, first factors, which are over the target's, stay with
        Muon: they learn faster so (docs/log/training_losses.md)."""
        markov, selector = self.markov_head, self.candidate_selector
        of_markov = [] if markov is None else [markov.markov_w2.weight]  # markov_w1 is an embedding
        of_selector = [] if selector is None else [selector.predecessor_codebook, selector.successor_codebook]
        found = [*super().vocabulary_matrices(), *of_markov, *of_selector]
        return [matrix for matrix in found if self.num_drafted in matrix.shape]

    def measure(self, batches: Iterable[DraftBatch]) -> None:
        self.input_sizes = channel_sizes(batches, lambda features: features.flatten(2))

    def matrix_scales(self) -> dict[str, Tensor]:
        return {} if self.input_sizes is None else {"fc.weight": input_scales(self.fc, self.input_sizes)}

    @property
    def chooser(self) -> Chooser[Any] | None:
        """What chooses drafts among the most probable tokens of each slot."""
        return self.candidate_selector or self.lilicorr

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
        return drawn_starts(super().training_starts(loss_mask), most=self.config.blocks_per_row)

    def kept_bytes(self, num_chains: int, *, itemsize: int, num_depths: int) -> int:
        config, lattice = self.config, self.lilicorr
        num_positions = num_chains * (num_depths + self.first_slot) * config.num_layers
        of_layers = layer_bytes(self.llama, num_positions=num_positions, itemsize=itemsize)
        if lattice is None:
            return of_layers
        num_candidates = num_chains * num_depths * lattice.top_k
        channels = (12 + 2 * config.lattice_mlp_ratio) * config.lattice_size + 2 * config.selector_rank
        scores = 2 * config.lattice_heads * num_depths * lattice.top_k
        return of_layers + int(num_candidates * (1 + config.lattice_layers) * (channels + scores) * itemsize)

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        num_slots = starts.num_depths + self.first_slot
        limit = batch.input_ids.shape[1] + num_slots
        context = self.features(batch.output)  # [B, T, D]
        of_context = self.rotary(batch.positions, like=context, num_positions=limit)
        offsets = torch.arange(num_slots, device=context.device)
        positions = 1 + starts.take(batch.positions)[:, None] + offsets[:, None]  # [B, W, S]
        hidden = self.slots(starts.take(batch.input_ids, offset=1), starts.num_depths)  # [B, W * S, D]
        of_slots = self.rotary(positions.flatten(1), like=context, num_positions=limit)  # autocast may have 16 bits
        sight, num_blocks = batch.sight(starts, window=self.window), starts.positions.shape[1]

        def mixed(layer: BlockLayer, hidden: Tensor, context: Tensor) -> Tensor:
            keys_values = layer.self_attn.keys_values(context, of_context)
            attend = partial(attend_blocks, context=keys_values, sight=sight)
            return layer.mixed(hidden, of_slots, attend, num_blocks=num_blocks)

        run = self.runner(starts, like=context)  # of half a layer at a time
        for layer in self.decoder_layers:
            hidden = run(layer.fed_forward, run(mixed, layer, hidden, context), num_blocks=num_blocks)
        hidden = self.norm(hidden).unflatten(1, (num_slots, -1))  # [B, W, S, D]
        before = [starts.take(batch.input_ids, offset=depth + 1) for depth in range(starts.num_depths)]  # [B, S] each
        hidden, pairs = hidden[:, self.first_slot :], self.markov_head or self.candidate_selector
        choices = None
        if self.lilicorr is not None:
            choices = self.choices(hidden, torch.stack(before, 1), starts.take(context), starts)
        for depth, tokens in enumerate(before):
            states = with_previous(hidden[:, depth], pairs, tokens)  # [B, S, D + rank]
            yield states if choices is None else torch.cat([states, choices[:, depth]], -1)

    def choices(self, hidden: Tensor, before: Tensor, context: Tensor, starts: ChainStarts) -> Tensor:
        """[B, K, S, 2 * top_k] fp32: the lattice's logits of each slot's candidates, and their draft ids.

        Args: hidden: [B, K, S, D] the slots' states. before: [B, K, S] the tokens before them. context: [B, S, D] the
        target's fused features where the chains start.
        """
        lattice, shape = cast(CandidateLattice, self.lilicorr), before.shape

        def chosen(states: Tensor, tokens: Tensor, context: Tensor) -> Tensor:
            with torch.no_grad():
                ids, log_probs = lattice.most_probable(self._output(states))
            read = lattice.read(states, ids, log_probs, anchors=tokens[:, 0], context=context)
            return torch.cat([read.scores(tokens), ids.float()], -1)  # [n, K, 2 * top_k]

        size, run = chunk_size(shape[1] * self.num_drafted, hidden.device), self.runner(starts, like=hidden)
        blocks = [x.transpose(1, 2).flatten(0, 1).split(size) for x in (hidden, before)]
        parts = [run(chosen, *some) for some in zip(*blocks, context.flatten(0, 1).split(size), strict=True)]
        return torch.cat(parts).unflatten(0, (shape[0], -1)).transpose(1, 2)

    def predicted_state(self, hidden: Tensor, depth: int) -> Tensor:
        return hidden[..., : self.target.hidden_size]

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        logits = self.slot_logits(hidden)
        if self.chooser is None:
            return logits
        ids = self.candidates(hidden, logits)
        return only(self.select(hidden, logits.gather(-1, ids), ids), ids, self.num_drafted)

    def parts(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """What `unroll` yields of slots, apart: states [..., D], the token before as read, the lattice's choice."""
        num_chosen = 2 * self.lilicorr.top_k if self.lilicorr is not None else 0
        return hidden.tensor_split([self.target.hidden_size, hidden.shape[-1] - num_chosen], -1)

    def slot_logits(self, hidden: Tensor) -> Tensor:
        """What `unroll` yields -> [..., Vd] with the Markov head's term, before a choice among candidates."""
        states, before, _ = self.parts(hidden)
        logits = self._output(states)
        return logits if self.markov_head is None else logits + self.markov_head.markov_w2(before)

    def candidates(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """[..., top_k] draft ids of the tokens among which drafting chooses, of what `unroll` yields and its logits."""
        if self.lilicorr is not None:
            return self.parts(hidden)[2][..., self.lilicorr.top_k :].long()
        return logits.topk(cast(CandidateSelector, self.candidate_selector).top_k, -1).indices

    def select(self, hidden: Tensor, unary: Tensor, ids: Tensor) -> Tensor:
        """[..., top_k] the candidates' logits by which drafting chooses."""
        states, before, choice = self.parts(hidden)
        if self.lilicorr is not None:
            return choice[..., : self.lilicorr.top_k]
        return cast(CandidateSelector, self.candidate_selector).read(states, unary, ids).scores(before)

    def loss_spec(self, depth: int) -> LossSpec:
        spec, config = replace(super().loss_spec(depth), draft_logits=self.slot_logits), self.config
        if self.confidence_head is not None:
            mix = {**spec.mix, "confidence": config.confidence_weight}
            spec = replace(spec, mix=mix, confidence=self.confidence_head)
        if self.chooser is not None:
            mix = {**spec.mix, "selection": 1.0}
            spec = replace(spec, mix=mix, select=self.select, candidates=self.candidates)
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
