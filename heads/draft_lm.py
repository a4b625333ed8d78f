"""A small language model of the target's family, fine-tuned on the target's own text (DistillSpec, Zhou et al. 2024).

It reads tokens only. Token x_p is at position p and in slot p of its cache, and its state there predicts x_{p+1}. So in
training, depth k of a chain that starts at t is scored at position t + 1 + k, and one forward serves all depths. In
decoding it reads x_0..x_{t+1}. A `Reading` from position p has x_p, x_{p+1}, ...; x_p was read before, and reading it
again writes the same values to slot p, so that all rounds have the same shape.

With `parallel` (PARD) all depths of a chain are drafted in one pass, with mask tokens behind x_{t+1}: parallel.py.

It is saved as a plain Hugging Face model, which any engine serves as a draft model.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ..base.errors import BadInput, first_line
from ..base.files import LocalPath
from ..targets.caches.cache import SlotCache, newest_slots, seen_by_children
from ..targets.caches.state_cache import StateCache
from ..targets.prefill import read_prompts
from ..targets.same_vocabulary import check_vocabulary
from ..targets.target import Target
from .base import ChainStarts, DraftBatch, DraftHead
from .drafting.drafter import Reading
from .drafting.trees import Proposal
from .parallel import ParallelConfig, last_and_behind, with_masks, with_masks_behind
from .start.closed_form import copy_layers, scale_norm


@dataclass(kw_only=True)
class DraftLMConfig(ParallelConfig):
    """A draft model's keys."""

    type: str = "draft_lm"
    num_depths: int = 5
    # local folder or hub id of a causal language model with the target's vocabulary. None: a new one of the target's
    # architecture, initialised from those of the target's weights whose sizes match
    path: LocalPath | None = None
    num_layers: int = 2  # of a new model
    hidden_size: int | None = None  # of a new model, whose MLPs are in proportion; None: the target's
    architecture: dict[str, Any] | None = None  # the model's Hugging Face config; set in saved heads

    @property
    def reads_layers(self) -> bool:
        return self.path is None and self.architecture is None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_size is not None:
            raise BadInput("draft_vocab_size: draft_lm drafts the target's whole vocabulary")
        if self.feature_layers:
            raise BadInput("feature_layers: draft_lm reads tokens only")


@dataclass
class DraftLMState:
    """The state of drafting. F: tokens of the last expansion, which is the pending token (the last committed one, not
    read by the target yet; F is 1) and then each level of drafts."""

    cache: SlotCache  # keys and values of the tokens read, then of drafted ones
    extent: int  # upper bound on the slots in use
    position: Tensor  # [B] position of the pending token
    hidden: Tensor  # [B, F, D] final states of the last expansion; with `parallel` of all depths, [B, K, D]
    seen: Tensor  # [B, F, n] bool, which of n drafted nodes each token of the last expansion attends to
    drafted: Tensor  # [B, n] positions of a tree's nodes


class DraftLMHead(DraftHead):
    """A causal language model, registered module by module so that its tensors keep Hugging Face's names."""

    config_class, title = DraftLMConfig, "draft model"
    has_one_output = True

    def __init__(self, config: DraftLMConfig, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, target, draft_token_ids)
        self.reads_post_norm = False
        model = build_model(config, target)
        self.reader = Target.of(model, name=config.path or "draft_lm", fingerprint="")  # reads the model over a cache
        architecture = json.loads(model.config.to_json_string(use_diff=False))
        architecture.pop("quantization_config", None)  # the target's, or that of `path`: these weights are plain
        model.requires_grad_(True)
        self.mask_token = config.mask_token(target)
        self.drafts_trees = self.reader.decodes_trees
        if config.parallel:
            self.max_draft_tokens = self.default_draft_tokens = config.num_depths
        self.config: DraftLMConfig = replace(config, architecture=architecture, mask_token_id=self.mask_token)
        for name, module in model.named_children():
            self.add_module(name, module)
        if self.reader.hidden_size != target.hidden_size and "feature" in config.loss:
            sizes = f"{self.reader.hidden_size} against {target.hidden_size}"
            raise BadInput(f"head.loss.feature: the draft model's states have another size than the target's: {sizes}")

    @property
    def method(self) -> str:
        return "draft_lm" if self.mask_token is None else "pard"

    def serving_config(self) -> dict[str, Any]:
        architecture = self.config.architecture or {}
        served = {**architecture, "architectures": [type(self.reader.model).__name__]}
        return served if self.mask_token is None else {**served, "pard_token": self.mask_token}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Tensors under Hugging Face's names; a tied output layer is stored once."""
        tied = self._tied()
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name not in tied}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        own = super().state_dict()
        tied = {name: own[name] for name in self._tied()}  # shares storage with the parameter that is loaded
        return super().load_state_dict({**tied, **state_dict}, strict=strict, assign=assign)

    # training

    def training_starts(self, loss_mask: Tensor) -> ChainStarts:
        return self.config.drawn(super().training_starts(loss_mask))

    def vocabulary_matrices(self) -> list[Tensor]:
        return [*super().vocabulary_matrices(), self.reader.output_layer.weight]

    def scale_outputs(self, factors: Sequence[float]) -> None:
        norm = self.reader.final_norm
        if norm is not None and self.config.path is None:
            scale_norm(norm, factors[0])

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        if self.mask_token is not None:
            # all chains have many times the mask tokens of those that a step draws
            size = len(batch.input_ids) if starts.has_gaps else 1
            rows = zip(*(x.split(size) for x in (batch.input_ids, starts.positions, starts.valid)), strict=True)
            parts = [self._behind_masks(ids, ChainStarts(*chains)) for ids, *chains in rows]
            yield from torch.cat(parts).unbind(2)
            return
        hidden = self.reader.forward(batch.input_ids).post_norm  # [B, T, D]
        for depth in range(starts.num_depths):
            yield starts.take(hidden, offset=depth + 1)

    def _behind_masks(self, input_ids: Tensor, starts: ChainStarts) -> Tensor:
        """[B, S, K, D] the states that draft each depth of chains, of rows [B, T] with mask tokens behind them."""
        assert self.mask_token is not None
        ids, apart, where = with_masks(input_ids, starts, mask_token=self.mask_token)
        hidden = self.reader.forward(ids, documents=apart).post_norm  # [B, T + M, D]
        return hidden[torch.arange(len(ids), device=ids.device)[:, None, None], where]

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.reader.logits(hidden)

    # drafting

    def begin(self, *, batch_size: int, max_length: int) -> DraftLMState:
        nothing = torch.zeros(batch_size, 1, 0, dtype=torch.long, device=self.reader.device)
        cache = self.reader.new_cache(max_length, num_rows=batch_size)
        return DraftLMState(cache, max_length, nothing[:, 0], nothing, nothing.bool(), nothing[:, 0])

    @torch.no_grad()
    def commit_prompts(self, state: DraftLMState, read: Reading, *, most: int) -> None:
        if isinstance(state.cache, StateCache):  # which needs to know where a prompt ends
            num = read.num_valid - 1  # the first round reads the last token, from the states before it
            read_prompts(self.reader, read.tokens, num.clamp(min=0), state.cache)
        else:
            super().commit_prompts(state, read, most=most)

    @torch.no_grad()
    def commit(self, state: DraftLMState, read: Reading) -> None:
        tokens = torch.cat([read.tokens[:, :1], read.next_tokens], 1)  # [B, Q + 1] x_p, x_{p+1}, ...
        state.extent, pending, num = read.extent or state.cache.max_length, read.last + 1, 1
        if self.mask_token is not None:  # mask tokens replace rejected tokens and follow the accepted ones
            num = self.config.num_depths
            tokens, _ = with_masks_behind(tokens, pending + 1, num_more=num - 1, mask_token=self.mask_token)
        positions = read.start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        # positions beyond belong to depths that were not requested
        positions = positions if num == 1 else positions.clamp(max=state.extent - 1)
        hidden = self._read(state, tokens, positions)  # [B, Q + num, D]
        state.hidden = last_and_behind(hidden, pending, num)
        state.position = read.start + pending
        state.seen, state.drafted = state.seen[:, :1, :0], state.drafted[:, :0]

    @torch.no_grad()
    def propose(self, state: DraftLMState, *, num_draft_tokens: int) -> Proposal:
        with state.cache.ahead(state.position + 1):
            return super().propose(state, num_draft_tokens=num_draft_tokens)

    @torch.no_grad()
    def first_logits(self, state: DraftLMState) -> Tensor:
        return self.draft_logits(state.hidden[:, 0], 0)

    @torch.no_grad()
    def expand(self, state: DraftLMState, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        if self.mask_token is not None:
            return self.draft_logits(state.hidden[:, depth : depth + 1], depth).expand(-1, tokens.shape[1], -1)
        positions = (state.position + depth)[:, None].expand_as(tokens)  # [B, F]
        if parents is None:  # a chain: each slot is the token's position, and a token sees all before it
            state.hidden = self._read(state, tokens, positions)
        else:
            state.seen = seen_by_children(state.seen, parents)
            state.drafted = torch.cat([state.drafted, positions], 1)
            state.hidden = self._read_nodes(state, tokens, positions)
        return self.draft_logits(state.hidden, depth)

    def _read(self, state: DraftLMState, tokens: Tensor, positions: Tensor) -> Tensor:
        """Consecutive tokens [B, Q] -> states [B, Q, D]."""
        return self.reader.forward(tokens, cache=state.cache, positions=positions, extent=state.extent).post_norm

    def _read_nodes(self, state: DraftLMState, tokens: Tensor, positions: Tensor) -> Tensor:
        """The newest nodes [B, F] of a tree, each in the next free slot -> states [B, F, D]."""
        state.cache.seek(newest_slots(state.position, state.seen), extent=state.extent)

        sees = state.position, state.seen
        mask = partial(state.cache.tree_mask, positions, *sees, dtype=self.reader.dtype, drafted=state.drafted)
        places = state.cache.places(state.position, state.drafted)
        return self.reader.read_slots(tokens, positions, state.cache, mask, places=places)

    def _tied(self) -> set[str]:
        """Second names of parameters that are registered under two."""
        names = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        return names - {name for name, _ in self.named_parameters()}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Cast and move weights, but only move rotary frequencies, which bf16 would round."""
        exact = [(m, n, b) for m in self.modules() for n, b in m.named_buffers(recurse=False) if b.is_floating_point()]
        super()._apply(fn, recurse)
        for module, name, buffer in exact:
            setattr(module, name, buffer.to(getattr(module, name).device))
        return self


def build_model(config: DraftLMConfig, target: Target) -> Any:
    """The language model in fp32: of config.architecture with random weights (a saved head's are loaded later), new, or
    loaded from config.path. Raises BadInput as `fresh_model`, `check_vocabulary` and `Target.load`."""
    if config.architecture is not None:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.architecture), dtype=torch.float32)
    if config.path is None:
        return fresh_model(config, target)
    check_vocabulary(config.path, target)
    try:
        model = Target.load(config.path, dtype="float32").model
    except BadInput as error:
        raise BadInput(f"head.path: {error}") from error
    if model.get_output_embeddings().weight.shape[0] != target.vocab_size:
        model.resize_token_embeddings(target.vocab_size, mean_resizing=False)  # adds or removes rows of padding
    return model


def fresh_model(config: DraftLMConfig, target: Target) -> Any:
    """A new model of the target's architecture and smaller sizes. Raises BadInput if transformers refuses these."""
    if not 1 <= config.num_layers <= target.num_layers:
        raise BadInput(f"head.num_layers {config.num_layers}: expected 1 to {target.num_layers}, the target's")
    raw = target.config.to_dict()
    size = config.hidden_size or target.hidden_size
    given: dict[str, Any] = {"num_hidden_layers": config.num_layers, "hidden_size": size}
    if raw.get("intermediate_size"):
        given["intermediate_size"] = round(raw["intermediate_size"] * size / target.hidden_size)
    for key, value in raw.items():  # layer_types and the like have an entry per layer
        if "layer" in key and isinstance(value, list) and len(value) == target.num_layers:
            given[key] = value[: config.num_layers]
        elif "layer" in key and isinstance(value, dict):  # by the layer's number
            given[key] = {number: what for number, what in value.items() if int(number) < config.num_layers}
    try:
        made = type(target.config).from_dict({**raw, **given})
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    except Exception as error:  # transformers' validation error has the reason as its cause
        raise BadInput(f"head.hidden_size {size}: {first_line(error.__cause__ or error)}") from error
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for ours, theirs in zip(ends, (target.input_embedding, target.output_layer), strict=True):
        if ours.weight.shape == theirs.weight.shape:
            ours.load_state_dict(theirs.state_dict())
    if size == target.hidden_size:
        copy_layers(Target.of(model, name="draft_lm", fingerprint=""), target)
    return model
