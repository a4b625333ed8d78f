"""Multi-token prediction modules: a decoder layer of the target's own kind that extrapolates its last state.

A module (DeepSeek-V3, arXiv 2412.19437, section 2.2) reads, at position t, the embedding of a later token beside a
hidden state, both normalised, through one projection, a decoder layer and a norm; the target's embedding and output
layer are shared and frozen. The hidden state of depth 0 is the target's after its final norm, as in engines.

One module serves every depth (FastMTP): at depth k it reads x_{t+1+k} at position t + k beside its own output of depth
k - 1, and attends to keys of true features at positions <= t and to the keys of its own drafts after them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..base.errors import BadInput
from ..targets.layers.target_output import TargetOutput
from ..targets.target import Target
from ..targets.weights.mtp_checkpoint import (
    LAYOUTS,
    Layout,
    check_modules,
    count_key,
    module_layout,
    read_modules,
    serve_names,
)
from .base import ChainStarts, DraftBatch, HeadConfig
from .loss.chains import chain_starts
from .nn.decoder_layer import ChainKeys, LayerCache, LayerDriver
from .nn.kept import layer_bytes
from .nn.layers import llama_config
from .recurrent import ChainState, OwnOutputReader
from .start.closed_form import FITTED_DEPTHS, linear_map, scale_norm

INITS = ("last_layer", "random", "checkpoint")


@dataclass(kw_only=True)
class MtpConfig(HeadConfig):
    """An MTP head's keys."""

    type: str = "mtp"
    num_depths: int = 3
    depth_weights: str = "normalised"
    depth_decay: float = 0.6
    loss: dict[str, float] = field(default_factory=lambda: {"hard_ce": 1.0})
    # whose conventions and tensor names, see `LAYOUTS`; None: the ones with which engines load modules of this target
    layout: str | None = None
    init: str = "last_layer"  # copy the target's; or `random`; or `checkpoint`: the MTP weights in the target's folder

    def __post_init__(self) -> None:
        super().__post_init__()
        choices: dict[str, tuple[str, ...]] = {"init": INITS}
        if self.layout is not None:
            choices["layout"] = tuple(LAYOUTS)
        for key, known in choices.items():
            if getattr(self, key) not in known:
                raise BadInput(f"{key} {getattr(self, key)!r}: expected one of {', '.join(known)}")
        if self.feature_layers:
            raise BadInput("feature_layers: mtp reads the state after the final norm only")

    @property
    def reads_layers(self) -> bool:
        return True  # to check that a layer can be driven alone

    def resolved(self, target: Target) -> "MtpConfig":
        """With the layout filled in. Raises BadInput if a file of the target's folder cannot be read."""
        served = self.layout or module_layout(target.name, target.config.model_type)
        return replace(self, layout=served or "deepseek_v3")  # where engines load none, the one with most of them


class MtpModule(nn.Module):
    """norm(block(eh_proj [enorm(embedding), hnorm(hidden)])); layouts with `hidden_first` swap the two halves."""

    def __init__(self, driver: LayerDriver, *, layout: Layout):
        super().__init__()
        size = driver.target.hidden_size
        self.driver = driver
        self.hidden_first = layout.hidden_first
        self.enorm, self.hnorm, self.norm = (driver.new_norm() for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = driver.new_layer()

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: LayerCache
    ) -> Tensor:
        """embedded, hidden [B, Q, D] at positions [B, Q] -> [B, Q, D] before the norm; mask, cache: see LayerDriver."""
        x = self.eh_proj(self.halves(embedded, hidden))  # [B, Q, 2D] -> [B, Q, D]
        return self.driver(self.block, x, positions, mask, cache)

    def halves(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        halves = [self.enorm(embedded), self.hnorm(hidden)]
        return torch.cat(halves[::-1] if self.hidden_first else halves, -1)

    @torch.no_grad()
    def start_from_target(self) -> None:
        """Copy the target's last layer and final norm, and let the projection add both halves. hnorm divides by the
        gain of the final norm, so that the layer reads the direction of the residual stream, as it does there."""
        target = self.driver.target
        self.block.load_state_dict(target.layers[self.driver.index].state_dict())
        self.norm.load_state_dict(self.driver.final_norm.state_dict())
        gain = target.final_norm_scale()  # [D]
        smallest = 0.1 * gain.abs().mean()  # do not blow up channels that the final norm nearly removes
        inverse = 1 / torch.where(gain.abs() < smallest, smallest, gain)
        cast(Tensor, self.hnorm.weight).add_(inverse - 1)  # a fresh gain of 1 is stored as 1 or, by some families, as 0
        self.eh_proj.weight.copy_(torch.eye(len(inverse)).repeat(1, 2))


class MtpHead(OwnOutputReader):
    """An MTP module under the tensor names of a family of checkpoints (`layout`)."""

    config_class, title = MtpConfig, "MTP"
    has_one_output = True
    default_draft_tokens = 3

    def __init__(self, config: MtpConfig, target: Target, draft_token_ids: Tensor | None = None):
        config = config.resolved(target)
        assert config.layout is not None
        super().__init__(config, target, draft_token_ids)
        self.config: MtpConfig = config
        self.layout = LAYOUTS[config.layout]
        if config.init == "checkpoint":
            check_modules(target.name, config.layout)
        self.driver = LayerDriver(target, is_first=target.config.model_type in self.layout.first)
        self.window = self.driver.window
        self.module = MtpModule(self.driver, layout=self.layout)
        serve_names(self)
        if config.init == "checkpoint":
            self.load_state_dict(read_modules(target.name, self.state_dict()))
        elif config.init == "last_layer":
            self.module.start_from_target()

    def serving_config(self) -> dict[str, Any]:
        """The target's config plus the number of modules: engines load them as part of its checkpoint."""
        config = self.target.config
        return {**config.to_dict(), count_key(config.model_type): 1}

    # training

    @torch.no_grad()
    def fit(self, batches: Sequence[DraftBatch]) -> None:
        """Fit `eh_proj` to map its inputs, own outputs included, onto the copied layer's input at the next position."""
        if self.config.init != "last_layer":
            return
        read, layers = self.target.forward, (self.driver.index,)
        entering = [read(b.input_ids, feature_layers=layers).features[:, :, 0] for b in batches]
        pairs = list[tuple[Tensor, Tensor]]()
        for depth in range(FITTED_DEPTHS):
            pairs += [self._fitted(batch, states, depth) for batch, states in zip(batches, entering, strict=True)]
            weight = linear_map(*map(torch.cat, zip(*pairs, strict=True)), keeps_size=True)
            if weight is not None:
                self.module.eh_proj.weight.copy_(weight.T)

    def _fitted(self, batch: DraftBatch, entering: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """[n, 2D] and [n, D]: what `eh_proj` reads at a depth, and of states entering the copied layer [B, T, D] those
        that it is to give."""
        starts = chain_starts(batch.loss_mask, depth + 1)
        hidden, at = starts.take(self.features(batch.output)), starts.valid[..., depth]
        *_, hidden = hidden, *islice(self.unroll(batch, starts), depth)  # the previous depth's output
        embedded = self._cast(self.target.embed(starts.take(batch.input_ids, offset=depth + 1)))
        return self.module.halves(embedded, hidden)[at], starts.take(entering, offset=depth + 1)[at]

    def scale_outputs(self, factors: Sequence[float]) -> None:
        if self.config.init != "checkpoint":
            scale_norm(self.module.norm, factors[0])

    def kept_bytes(self, num_chains: int, *, itemsize: int, num_depths: int) -> int:
        num_positions = num_chains * (num_depths - 1)
        return layer_bytes(llama_config(self.target.config), num_positions=num_positions, itemsize=itemsize)

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        ids, hidden = batch.input_ids, self.features(batch.output)  # [B, T], [B, T, D]
        positions = batch.positions  # [B, T]
        window = self.driver.window
        keys = ChainKeys(window=window, sight=None if window is None else batch.sight(window=window))
        hidden = starts.take(self._step(ids.roll(-1, 1), hidden, positions, None, keys))  # [B, S, D]
        yield hidden
        sight = batch.sight(starts, window=window)

        def step(depth: int, hidden: Tensor, tokens: Tensor, drafted: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            own = ChainKeys(window=window, sight=sight.behind(depth))
            own.written = keys.written[:depth]  # when backward computes this depth again, it holds later ones too
            return self._step(tokens, hidden, drafted, None, own), own.written[-1]

        for depth in range(1, starts.num_depths):
            run = self.runner(starts, like=hidden, depth=depth)
            tokens, drafted = starts.take(ids, offset=depth + 1), starts.take(positions) + depth  # [B, S]
            hidden, added = run(step, depth, hidden, tokens, drafted)
            keys.written.append(added)
            yield hidden

    def features(self, output: TargetOutput) -> Tensor:
        return self._cast(output.post_norm)

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.restricted_logits(hidden)

    # drafting

    def begin(self, *, batch_size: int, max_length: int) -> ChainState:
        return ChainState.of(self.new_cache(1, max_length), batch_size=batch_size, like=self.module.eh_proj.weight)

    def _cast(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.module.eh_proj.weight.dtype)

    def _step(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: LayerCache
    ) -> Tensor:
        """The module over tokens and positions [B, Q] and hidden [B, Q, D]: its output [B, Q, D], after its norm, as
        engines feed it back."""
        embedded = self._cast(self.target.embed(token_ids))  # [B, Q, D]
        if self.layout.masks_first:
            embedded = embedded.masked_fill((positions == 0)[..., None], 0)
        return self.module.norm(self.module(embedded, hidden, positions, mask, cache))

    def _decode(
        self, state: ChainState, token_ids: Tensor, hidden: Tensor, positions: Tensor, *, in_tree: bool = False
    ) -> Tensor:
        mask = state.seek(positions, in_tree=in_tree, dtype=hidden.dtype, window=self.driver.window)
        return self._step(token_ids, hidden, positions, mask, state.cache)
