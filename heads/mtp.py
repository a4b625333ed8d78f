"""Multi-token prediction modules: a decoder layer of the target's own kind that extrapolates its last state.

A module (DeepSeek-V3, arXiv 2412.19437, section 2.2) reads, at position t, the embedding of a later token beside a
hidden state, both normalised, through one projection, a decoder layer and a norm; the target's embedding and output
layer are shared and frozen. The hidden state of depth 0 is the target's after its final norm, as in engines.

Recursive (FastMTP): one module for every depth. At depth k it reads x_{t+1+k} at position t + k beside its own output
of depth k - 1, and attends to keys of true features at positions <= t and to the keys of its own drafts after them.

Independent (equations 21 to 25): module k reads x_{j+1+k} at position j beside the output of module k - 1 there, and
attends to its own keys at positions <= j. In training each module is one causal pass over the text. In decoding every
new token advances all modules by one position, and module k (lane k) is k positions behind the text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..configs.errors import BadInput
from .base import ChainStarts, DraftBatch, DraftHead, HeadConfig
from .decoders.cache import SlotCache, in_steps, newest_slots, seen_by_children
from .drafter import Reading
from .export.mtp import MtpServing, module_layout
from .importing.mtp_checkpoint import LAYOUTS, Layout, check_modules, count_key, read_modules, serve_names
from .loss.chains import chain_starts
from .nn.decoder_layer import ChainKeys, LayerCache, LayerDriver
from .nn.kept import layer_bytes
from .nn.layers import llama_config
from .start.closed_form import FITTED_DEPTHS, linear_map, scale_norm
from .target import Target

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
    independent: bool = False  # one module per depth instead of one for all
    init: str = "last_layer"  # copy the target's; or `random`; or `checkpoint`: the MTP weights in the target's folder
    feedback: str = "post_norm"  # the next depth reads a module's output after its norm, as engines do; or `pre_norm`

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = {"init": INITS, "feedback": ("post_norm", "pre_norm")}
        if self.layout is not None:
            choices["layout"] = tuple(LAYOUTS)
        for key, known in choices.items():
            if getattr(self, key) not in known:
                raise BadInput(f"{key} {getattr(self, key)!r}: expected one of {', '.join(known)}")
        if self.feature_layers:
            raise BadInput("feature_layers: mtp reads the state after the final norm only")
        if self.independent and self.layout is not None and not LAYOUTS[self.layout].has_many:
            raise BadInput(f"independent: the layout {self.layout} names one projection only; use another layout")

    @property
    def reads_layers(self) -> bool:
        return True  # to check that a layer can be driven alone

    def resolved(self, target: Target) -> "MtpConfig":
        """With the layout filled in. Raises BadInput if a file of the target's folder cannot be read."""
        served = self.layout or module_layout(target.name, target.config.model_type)
        return replace(self, layout=served or "deepseek_v3")  # where engines load none, the one with most of them


class MtpModule(nn.Module):
    """norm(block(eh_proj [enorm(embedding), hnorm(hidden)])); layouts with `hidden_first` swap the two halves."""

    def __init__(self, driver: LayerDriver, *, layout: Layout, slot: int):
        super().__init__()
        size = driver.target.hidden_size
        self.driver = driver
        self.hidden_first = layout.hidden_first
        self.enorm, self.hnorm, self.norm = (driver.new_norm() for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = driver.new_layer(slot)

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


@dataclass
class MtpState:
    """The state of drafting. F: tokens of the last expansion: the last committed token, then a level of drafts."""

    cache: SlotCache  # one layer per lane
    extent: int  # upper bound on the slots in use
    root: Tensor  # [B] the last committed position
    # [lanes, B, R, D] ring buffer: row p % R has a lane's fed-back output at position p, for the last two committed
    # positions; R exceeds the positions of any round
    committed: Tensor
    hidden: list[Tensor]  # per lane [B, F, D] its fed-back output for the last expansion
    seen: Tensor  # [B, F, n] bool, which of n drafted nodes each token of the last expansion attends to
    depths: Tensor  # [n] distance of those nodes from the root


class MtpHead(DraftHead):
    """MTP modules under the tensor names of a family of checkpoints (`layout`)."""

    config_class = MtpConfig
    serving = MtpServing()
    default_draft_tokens = 3

    def __init__(self, config: MtpConfig, target: Target, draft_token_ids: Tensor | None = None):
        config = config.resolved(target)
        assert config.layout is not None
        super().__init__(config, target, draft_token_ids)
        self.config: MtpConfig = config
        self.max_draft_tokens = config.num_depths if config.independent else None
        self.has_one_output = not config.independent or config.feedback == "post_norm"
        self.layout = LAYOUTS[config.layout]
        if config.init == "checkpoint":
            check_modules(target.name, config.layout)
        self.driver = driver = LayerDriver(target)
        num_modules = config.num_depths if config.independent else 1
        self.lanes = nn.ModuleList(MtpModule(driver, layout=self.layout, slot=k) for k in range(num_modules))
        serve_names(self)
        if config.init == "checkpoint":
            self.load_state_dict(read_modules(target.name, self.state_dict()))
        elif config.init == "last_layer":
            for k in range(num_modules):
                self._lane(k).start_from_target()

    def serving_config(self) -> dict[str, Any]:
        """The target's config plus the number of modules: engines load them as part of its checkpoint."""
        config = self.target.config
        return {**config.to_dict(), count_key(config.model_type): len(self.lanes)}

    # training

    @torch.no_grad()
    def fit(self, batches: Sequence[DraftBatch]) -> None:
        """Fit `eh_proj` to map its inputs, own outputs included, onto the copied layer's input at the next position."""
        if self.config.init != "last_layer":
            return
        is_many, read, layers = self.config.independent, self.target.forward, (self.driver.index,)
        entering = [read(b.input_ids, feature_layers=layers, documents=b.documents).features[:, :, 0] for b in batches]
        pairs = list[tuple[Tensor, Tensor]]()
        for depth in range(len(self.lanes) if is_many else FITTED_DEPTHS):
            of_depth = [self._fitted(batch, states, depth) for batch, states in zip(batches, entering, strict=True)]
            pairs = of_depth if is_many else pairs + of_depth  # one module for every depth learns from all of them
            inputs, wanted = map(torch.cat, zip(*pairs, strict=True))
            weight = linear_map(inputs, wanted, keeps_size=True)
            if weight is not None:  # deeper modules have it too, should they have too few rows of their own
                for lane in range(depth if is_many else 0, len(self.lanes)):
                    self._lane(lane).eh_proj.weight.copy_(weight.T)

    def _fitted(self, batch: DraftBatch, entering: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """[n, 2D] and [n, D]: what `eh_proj` reads at a depth, and of states entering the copied layer [B, T, D] those
        that it is to give."""
        starts = chain_starts(batch.loss_mask, depth + 1)
        hidden, at = starts.take(self._cast(batch.output.post_norm)), starts.valid[..., depth]
        *_, hidden = hidden, *islice(self.unroll(batch, starts), depth)  # the previous depth's output
        embedded = self._cast(self.target.embed(starts.take(batch.input_ids, offset=depth + 1)))
        reads = self._lane(0).halves(embedded, hidden)  # norms are the same in all
        return reads[at], starts.take(entering, offset=depth + 1)[at]

    def scale_outputs(self, factors: Sequence[float]) -> None:
        for k, factor in enumerate(factors[: len(self.lanes)] if self.config.init != "checkpoint" else []):
            scale_norm(self._lane(k).norm, factor)

    def kept_bytes(self, num_chains: int, *, itemsize: int, num_depths: int) -> int:
        num_positions = 0 if self.config.independent else num_chains * (num_depths - 1)
        return layer_bytes(llama_config(self.target.config), num_positions=num_positions, itemsize=itemsize)

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        ids, hidden = batch.input_ids, self._cast(batch.output.post_norm)  # [B, T], [B, T, D]
        positions = batch.positions  # [B, T]
        window, is_plain = self.driver.window, self.driver.window is None and batch.documents is None
        if self.config.independent:
            mask = None if is_plain else batch.visibility(batch.row_positions, dtype=hidden.dtype, window=window)
            for k in range(starts.num_depths):  # x_{j+1+k}; those rolled around the end are never supervised
                hidden = self._step(k, ids.roll(-1 - k, 1), hidden, positions, mask, None)  # [B, T, D]
                yield starts.take(hidden)
            return
        keys = ChainKeys(window=window, sight=None if is_plain else batch.sight(window=window))
        hidden = starts.take(self._step(0, ids.roll(-1, 1), hidden, positions, None, keys))  # [B, S, D]
        yield hidden
        sight = batch.sight(starts, window=window)

        def step(depth: int, hidden: Tensor, tokens: Tensor, drafted: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            own = ChainKeys(window=window, sight=sight.behind(depth))
            own.written = keys.written[:depth]  # when backward computes this depth again, it holds later ones too
            return self._step(0, tokens, hidden, drafted, None, own), own.written[-1]

        run = self.runner(starts, like=hidden)
        for depth in range(1, starts.num_depths):
            tokens, drafted = starts.take(ids, offset=depth + 1), starts.take(positions) + depth  # [B, S]
            hidden, added = run(step, depth, hidden, tokens, drafted)
            keys.written.append(added)
            yield hidden

    def predicted_state(self, hidden: Tensor, depth: int) -> Tensor:
        if self.config.feedback == "post_norm":
            return hidden
        return self._lane(depth if self.config.independent else 0).norm(hidden)

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.restricted_logits(self.predicted_state(hidden, depth))

    # drafting

    def begin(self, *, batch_size: int, max_length: int) -> MtpState:
        num_lanes, weight = len(self.lanes), self._lane(0).eh_proj.weight
        num_slots = in_steps(max_length + num_lanes - 1)
        cache = SlotCache(num_layers=num_lanes, max_length=num_slots)
        committed = weight.new_zeros(num_lanes, batch_size, self.num_depths + 2, len(weight))
        root = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        return MtpState(cache, num_slots, root, committed, [], root[:, None, None].bool()[..., :0], root[:0])

    @torch.no_grad()
    def commit(self, state: MtpState, read: Reading) -> None:
        positions = read.positions  # [B, Q]
        rows, num_kept = torch.arange(len(positions), device=positions.device), state.committed.shape[2]
        state.root = read.start + read.last
        state.extent = read.extent + len(self.lanes) - 1 if read.extent else state.cache.max_length
        state.seen, state.depths, state.hidden = state.seen[:, :1, :0], state.depths[:0], []
        hidden, earlier = self._cast(read.output.post_norm), []
        for k in range(len(self.lanes)):
            if k > 0:  # what lane k - 1 fed back one token before: in the round before, then in this one
                before = state.committed[k - 1][rows, (read.start - 1) % num_kept]  # [B, D]
                hidden = torch.cat([before[:, None], hidden[:, :-1]], 1)
            hidden = self._decode(state, k, read.next_tokens, hidden, positions - k)
            state.hidden.append(hidden[rows, read.last][:, None])  # [B, 1, D]
            earlier.append(hidden[rows, (read.last - 1).clamp(min=0)])  # [B, D]
        if len(self.lanes) == 1:
            return
        # two positions, since the first round reads a prompt's last one again; rows that have ended keep theirs
        for fed_back, back in ((earlier, 1), ([last[:, 0] for last in state.hidden], 0)):
            at, is_new = (state.root - back) % num_kept, (read.num_valid > back)[:, None]
            for committed, fed in zip(state.committed, fed_back, strict=True):
                committed[rows, at] = torch.where(is_new, fed, committed[rows, at])

    @torch.no_grad()
    def first_logits(self, state: MtpState) -> Tensor:
        return self.draft_logits(state.hidden[0][:, 0], 0)

    @torch.no_grad()
    def expand(self, state: MtpState, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        """Every lane that a later depth needs reads the tokens; lane `depth` (recursive: the only one) scores them."""
        before = state.hidden
        if parents is not None:
            rows = torch.arange(len(tokens), device=tokens.device)[:, None]
            before = [hidden[rows, parents] for hidden in before]  # [B, F, D] each
            state.seen = seen_by_children(state.seen, parents)
            state.depths = torch.cat([state.depths, torch.full_like(tokens[0], depth)])
        state.hidden = list(before)
        for k in range(depth, len(self.lanes)) if self.config.independent else (0,):
            positions = (state.root + depth - k)[:, None].expand_as(tokens)  # [B, F]
            hidden = before[max(k - 1, 0)]
            state.hidden[k] = self._decode(state, k, tokens, hidden, positions, in_tree=parents is not None)
        return self.draft_logits(state.hidden[depth if self.config.independent else 0], depth)

    def _lane(self, k: int) -> MtpModule:
        return cast(MtpModule, self.lanes[k])

    def _cast(self, hidden: Tensor) -> Tensor:
        return hidden.to(self._lane(0).eh_proj.weight.dtype)

    def _step(
        self, k: int, token_ids: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: LayerCache
    ) -> Tensor:
        """Module k over tokens and positions [B, Q] and hidden [B, Q, D]: its fed-back output [B, Q, D]."""
        embedded = self._cast(self.target.embed(token_ids))  # [B, Q, D]
        if self.layout.masks_first:
            embedded = embedded.masked_fill((positions == 0)[..., None], 0)
        out = self._lane(k)(embedded, hidden, positions, mask, cache)
        return out if self.config.feedback == "pre_norm" else self._lane(k).norm(out)

    def _decode(
        self, state: MtpState, k: int, token_ids: Tensor, hidden: Tensor, positions: Tensor, *, in_tree: bool = False
    ) -> Tensor:
        """One forward of lane k over its cache. token_ids, positions [B, Q]; hidden [B, Q, D] -> [B, Q, D]."""
        # slots are shifted, as lane k starts at position -k: no query sees slots of positions before the text
        shift = len(self.lanes) - 1
        shifted, root = positions + shift, state.root - k + shift  # [B, Q], [B]
        dtype, window = hidden.dtype, self.driver.window
        if in_tree:
            state.cache.seek(newest_slots(root, state.seen), extent=state.extent)
            drafted = root[:, None] + state.depths  # [B, n]
            seen = state.seen & (drafted >= shift)[:, None]
            mask = state.cache.tree_mask(shifted, root, seen, dtype=dtype, window=window, drafted=drafted)
        else:  # slots in the order of positions
            state.cache.seek(shifted, extent=state.extent)
            mask = state.cache.mask(shifted, dtype=dtype, window=window)
        mask[..., :shift].fill_(torch.finfo(mask.dtype).min)
        return self._step(k, token_ids, hidden, positions, mask, state.cache)
