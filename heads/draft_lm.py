"""A small language model of the target's family, fine-tuned on the target's own text (DistillSpec, Zhou et al. 2024).

It reads tokens only. Token x_p lies at position p and in slot p of its cache, and its state there predicts x_{p+1}. So
depth k of a chain that starts at t is scored by the state at t + 1 + k given the data's tokens: one forward serves all
depths. In decoding it reads x_0..x_{t+1}: the target's reading of positions p.. says x_p and x_{p+1}.., and x_p once
more writes what slot p holds already, so every round has one shape and the first needs no other.

What is saved is a plain Hugging Face model: served as a draft model by any engine, and evaluated as one here too.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..configs.errors import BadInput, first_line
from .adapters import add_adapters
from .base import ChainStarts, DraftBatch, DraftHead, HeadConfig
from .drafter import Reading
from .loading import quiet_loading
from .nn.cache import SlotCache, tree_mask
from .target import Target

PADDING = 0.01  # sizes of one family's vocabularies differ by this share at most, for padding


@dataclass(kw_only=True)
class DraftLMConfig(HeadConfig):
    """path: local folder or hub id of a causal language model with the target's vocabulary; None: a fresh one of the
    target's architecture, with num_layers layers and, where given, another hidden_size and intermediate_size (None: the
    target's, the latter in proportion), whose embedding and output layer start as the target's where sizes match.
    lora_rank: above 0, train low-rank adapters of all linear layers but the output's, scaled by lora_alpha / lora_rank
    (Hu et al. 2022), and save the model with them merged in. architecture: its Hugging Face config, in saved heads."""

    type: str = "draft_lm"
    num_depths: int = 5
    path: str | None = None
    num_layers: int = 2
    hidden_size: int | None = None
    intermediate_size: int | None = None
    lora_rank: int = 0
    lora_alpha: float = 32.0
    architecture: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_size is not None:
            raise BadInput("draft_vocab_size: draft_lm drafts the target's whole vocabulary")
        if self.feature_layers:
            raise BadInput("feature_layers: draft_lm reads tokens only")
        if self.lora_rank < 0:
            raise BadInput(f"lora_rank {self.lora_rank}: expected 0, for none, or more")
        if self.lora_rank and self.path is None:
            raise BadInput(f"lora_rank {self.lora_rank}: adapters need a trained model, so head.path is required")


@dataclass
class DraftLMState:
    """cache: what was read, then drafted tokens. extent: slots that are read. position [B]: of the pending token.

    hidden [B, F, D]: the last state at the pending token (F is 1), then of the last expansion. seen [B, F, drafted]
    bool: which drafted slots each of those attends to. drafted [B, drafted]: the positions of a tree's nodes.
    """

    cache: SlotCache
    extent: int
    position: Tensor
    hidden: Tensor
    seen: Tensor
    drafted: Tensor


class DraftLMHead(DraftHead):
    """A causal language model whose modules are the head's own, so that its tensors have Hugging Face's names."""

    config_class = DraftLMConfig

    def __init__(self, config: DraftLMConfig, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, target, draft_token_ids)
        model = build_model(config, target)
        self.reader = Target(model, name=config.path or "draft_lm", fingerprint="")  # how a model is read over a cache
        architecture = json.loads(model.config.to_json_string(use_diff=False))
        if config.lora_rank and config.architecture is None:
            how: dict[str, Any] = {"vocab_size": target.vocab_size, "key": "head.lora_rank"}
            add_adapters(model, rank=config.lora_rank, alpha=config.lora_alpha, **how)
        else:
            model.requires_grad_(True)
        self.config: DraftLMConfig = replace(config, architecture=architecture)
        for name, module in model.named_children():
            self.add_module(name, module)
        mixes = [config.loss, *(config.loss_by_depth or ())]
        if self.reader.hidden_size != target.hidden_size and any("feature" in mix for mix in mixes):
            sizes = f"{self.reader.hidden_size} against {target.hidden_size}"
            raise BadInput(f"head.loss.feature: the draft model's states have another size than the target's: {sizes}")

    @property
    def reads_post_norm(self) -> bool:
        return False

    def serving_config(self) -> dict[str, Any]:
        architecture = self.config.architecture or {}
        return {**architecture, "architectures": [type(self.reader.model).__name__]}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Tensors under Hugging Face's names; a tied output layer is stored once."""
        tied = self._tied()
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name not in tied}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        own = super().state_dict()
        tied = {name: own[name] for name in self._tied()}  # the very storage that its other name loads into
        return super().load_state_dict({**tied, **state_dict}, strict=strict, assign=assign)

    # training

    @property
    def has_one_output(self) -> bool:
        return True

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        hidden = self.reader.forward(batch.input_ids, documents=batch.documents).post_norm  # [B, T, D]
        for depth in range(starts.num_depths):
            yield starts.take(hidden, offset=depth + 1)

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.reader.logits(hidden)

    # drafting

    def begin(self, *, batch_size: int, max_length: int) -> DraftLMState:
        nothing = torch.zeros(batch_size, 1, 0, dtype=torch.long, device=self.reader.device)
        cache = self.reader.new_cache(max_length)
        return DraftLMState(cache, max_length, nothing[:, 0], nothing, nothing.bool(), nothing[:, 0])

    @torch.no_grad()
    def commit(self, state: DraftLMState, read: Reading) -> None:
        tokens = torch.cat([read.tokens[:, :1], read.next_tokens], 1)  # [B, Q + 1] x_p, x_{p+1}, ...
        positions = read.start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        state.extent = read.extent or state.cache.max_length
        hidden = self._read(state, tokens, positions)  # [B, Q + 1, D]
        pending = read.last + 1
        state.hidden = hidden[torch.arange(len(hidden), device=hidden.device), pending][:, None]  # [B, 1, D]
        state.position = read.start + pending
        state.seen, state.drafted = state.seen[:, :1, :0], state.drafted[:, :0]

    @torch.no_grad()
    def first_logits(self, state: DraftLMState) -> Tensor:
        return self.draft_logits(state.hidden[:, 0], 0)

    @torch.no_grad()
    def expand(self, state: DraftLMState, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        positions = (state.position + depth)[:, None].expand_as(tokens)  # [B, F]
        if parents is None:  # a chain: slots and positions are the same, and all before is seen
            state.hidden = self._read(state, tokens, positions)
        else:
            rows = torch.arange(len(tokens), device=tokens.device)[:, None]
            itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
            state.seen = torch.cat([state.seen[rows, parents], itself], -1)  # [B, F, drafted]
            state.drafted = torch.cat([state.drafted, positions], 1)
            state.hidden = self._read_nodes(state, tokens, positions)
        return self.draft_logits(state.hidden, depth)

    def _read(self, state: DraftLMState, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens [B, Q] that follow each other -> [B, Q, D]."""
        return self.reader.forward(tokens, cache=state.cache, positions=positions, extent=state.extent).post_norm

    def _read_nodes(self, state: DraftLMState, tokens: Tensor, positions: Tensor) -> Tensor:
        """The newest nodes [B, F] of a tree, each in the next free slot -> [B, F, D]."""
        num_before = state.drafted.shape[1] - tokens.shape[1]
        slots = state.position[:, None] + 1 + num_before + torch.arange(tokens.shape[1], device=tokens.device)
        state.cache.seek(slots, extent=state.extent)

        def mask(window: int | None) -> Tensor:
            how: dict[str, Any] = {"window": window, "positions": positions, "drafted_positions": state.drafted}
            extent, dtype = state.cache.extent, self.reader.dtype
            return tree_mask(state.position, state.seen, extent=extent, dtype=dtype, **how)

        config = self.reader.config
        types = getattr(config, "layer_types", None)
        has_window = types is None or "sliding_attention" in types
        window = mask(getattr(config, "sliding_window", None) if has_window else None)
        return self.reader.base(
            input_ids=tokens,
            position_ids=positions.clamp(max=self.reader.max_positions - 1),
            attention_mask={"full_attention": mask(None), "sliding_attention": window} if types else window,
            past_key_values=state.cache,
            use_cache=True,
        ).last_hidden_state

    def _tied(self) -> set[str]:
        """Further names of parameters that have one already."""
        names = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        return names - {name for name, _ in self.named_parameters()}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Casts and moves weights; rotary frequencies are moved only, since bf16 would bend them."""
        exact = [(m, n, b) for m in self.modules() for n, b in m.named_buffers(recurse=False) if b.is_floating_point()]
        super()._apply(fn, recurse)
        for module, name, buffer in exact:
            setattr(module, name, buffer.to(getattr(module, name).device))
        return self


def build_model(config: DraftLMConfig, target: Target) -> Any:
    """The language model, in fp32: as saved (without its weights), fresh, or loaded from config.path."""
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
        model.resize_token_embeddings(target.vocab_size, mean_resizing=False)  # padding, or what is never read
    return model


def fresh_model(config: DraftLMConfig, target: Target) -> Any:
    """An untrained model of the target's architecture. Raises BadInput on sizes that it cannot have."""
    if not 1 <= config.num_layers <= target.num_layers:
        raise BadInput(f"head.num_layers {config.num_layers}: expected 1 to {target.num_layers}, the target's")
    raw = target.config.to_dict()
    size = config.hidden_size or target.hidden_size
    given: dict[str, Any] = {"num_hidden_layers": config.num_layers, "hidden_size": size}
    if raw.get("intermediate_size"):
        in_proportion = round(raw["intermediate_size"] * size / target.hidden_size)
        given["intermediate_size"] = config.intermediate_size or in_proportion
    for key, value in raw.items():  # layer_types and the like have an entry per layer
        if "layer" in key and isinstance(value, list) and len(value) == target.num_layers:
            given[key] = value[: config.num_layers]
    try:
        made = type(target.config).from_dict({**raw, **given})
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    except Exception as error:  # a config class of its own kind, with what is wrong as the cause
        raise BadInput(f"head.hidden_size {size}: {first_line(error.__cause__ or error)}") from error
    pairs = [
        (model.get_input_embeddings(), target.input_embedding),
        (model.get_output_embeddings(), target.output_layer),
    ]
    for ours, theirs in pairs:
        if ours.weight.shape == theirs.weight.shape:
            ours.load_state_dict(theirs.state_dict())
    return model


def check_vocabulary(path: str, target: Target) -> None:
    """Raises BadInput where a model's tokens cannot be the target's, before its weights are loaded."""
    try:
        with quiet_loading():
            size = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    except Exception as error:  # as in Target.load: every library's own
        raise BadInput(f"head.path {path}: {first_line(error)}") from error
    sizes = f"{size} tokens, those of {target.name} {target.vocab_size}"
    if abs(size - target.vocab_size) > PADDING * max(size, target.vocab_size):
        raise BadInput(f"head.path {path}: its vocabulary has {sizes}: expected the same, but for padding")
    if not comes_with_tokenizer(path):  # its size must do
        return
    try:
        words: Mapping[str, int] = AutoTokenizer.from_pretrained(path).get_vocab()
    except Exception as error:
        raise BadInput(f"head.path {path}: its tokenizer: {first_line(error)}") from error
    theirs: Mapping[str, int] = target.tokenizer.get_vocab()
    wrong = differing_word(words, theirs)
    if wrong is not None:
        ids = [one.get(wrong, "absent") for one in (words, theirs)]
        raise BadInput(
            f"head.path {path}: its vocabulary ({sizes}) is another: {wrong!r} is {ids[0]} there and {ids[1]} here"
        )


def comes_with_tokenizer(path: str) -> bool:
    """Whether a model's folder holds a tokenizer: for some families transformers makes an empty one up where not."""
    patterns = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
    return not Path(path).is_dir() or any(any(Path(path).glob(pattern)) for pattern in patterns)


def differing_word(words: Mapping[str, int], others: Mapping[str, int]) -> str | None:
    """A token of the smaller vocabulary that is not the same in the other; None: one of them holds the other."""
    few, many = sorted((words, others), key=len)
    return next((word for word, i in few.items() if many.get(word) != i), None)
