"""What EAGLE and EAGLE-3 share: Llama layers that read their own output, trained on unrolled chains.

In decoding, a chain that starts at t sees keys of true features at positions <= t, then the keys of its own drafts. So
in training a query of the chain at start t attends to the shared keys at positions <= t and, at depth k, to its own
keys of depths 1..k, one per depth: the diagonal of the attention (EAGLE-3, section 3.2; HASS, section 3.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from ..targets.caches.attention import grouped_attention
from ..targets.caches.cache import SlotCache, newest_slots, placed, seen_by_children
from ..targets.cpu.decoder import CpuLayers
from ..targets.cpu.packing import pack_linears
from ..targets.cpu.products import TILE
from ..targets.layers.rotary import Rotary
from ..targets.layers.target_output import TargetOutput
from .base import ChainStarts, DraftBatch, DraftHead
from .drafting.drafter import Reading
from .drafting.windowed import Windowed
from .loss.sight import Sight
from .nn.chain_attention import attend_chains, laid_out
from .nn.kept import layer_bytes
from .nn.layers import Attention, RMSNorm

KeysValues = tuple[Tensor, Tensor]  # [B, Nkv, P, H] each


@dataclass(frozen=True)
class Context:
    """What the queries of one layer call may attend to."""

    keys: Tensor  # [B, Nkv, P, H]
    values: Tensor  # [B, Nkv, P, H]
    # in decoding an additive mask [B, 1, Q, P]; in training what depth 0 of the queries' chains sees
    seen: Tensor | Sight
    drafted: tuple[KeysValues, ...] = ()  # in training: per depth the queries' own keys and values [B, Nkv, Q, H]


def attend(attention: Attention, x: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
    """[B, Q, in] -> [B, Q, D]: attention over a context, with its output projection."""
    queries = attention.queries(x, rotary)  # [B, N, Q, H]
    keys, values, seen, drafted = context.keys, context.values, context.seen, context.drafted
    if isinstance(seen, Tensor):
        mixed, _ = grouped_attention(attention, queries, keys, values, seen.to(x.dtype))  # [B, Q, N, H]
    else:
        own = drafted if seen.window is None else drafted[-seen.window :]
        mixed = attend_chains(queries, keys, values, seen.behind(len(drafted)), drafted=own).transpose(1, 2)
    return attention.o_proj(mixed.flatten(2))


class LlamaLayer(nn.Module):
    """A Llama decoder layer over a context; its attention may read another input than the residual stream."""

    def __init__(self, config: LlamaConfig, *, normalises_input: bool = True):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps) if normalises_input else nn.Identity()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)

    def normalised(self, x: Tensor) -> Tensor:
        """The input of the projections."""
        return self.input_layernorm(x)

    def residual(self, hidden: Tensor) -> Tensor:
        """The residual stream that the layer adds to."""
        return hidden

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> KeysValues:
        """[B, Q, in] -> two of [B, Nkv, Q, H]."""
        return self.self_attn.keys_values(self.normalised(x), rotary)

    def forward(self, x: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """x [B, Q, in], which attention reads, and the residual stream [B, Q, D] -> [B, Q, D]."""
        hidden = self.residual(hidden) + attend(self.self_attn, self.normalised(x), rotary, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass
class ChainState:
    """The state of drafting. F: tokens of the last expansion: the last committed token, then a level of drafts."""

    cache: SlotCache  # keys and values of the positions read, then of drafted tokens
    extent: int  # upper bound on the slots in use
    position: Tensor  # [B] the last committed position
    hidden: Tensor  # [B, F, D] the head's output for the last expansion
    seen: Tensor  # [B, F, n] bool, which of n drafted nodes each token of the last expansion attends to
    depths: Tensor  # [n] of these nodes, from 1 on
    shift: Tensor | None = None  # as in `Reading`

    @classmethod
    def of(cls, cache: SlotCache, *, batch_size: int, like: Tensor) -> "ChainState":
        """Before anything is read. Args: like: a weight of the head."""
        nothing = like.new_zeros(batch_size, 1, 0)
        position = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return cls(cache, cache.max_length, position, nothing, nothing.bool(), position[:0])

    def seek(self, positions: Tensor, *, in_tree: bool, dtype: torch.dtype, window: int | None) -> Tensor:
        """Point the cache at the slots of tokens at `positions` [B, Q], those of a tree the nodes drafted last; returns
        their mask."""
        if not in_tree:  # each slot is the token's position
            self.cache.seek(positions, extent=self.extent)
            return self.cache.mask(positions, dtype=dtype, window=window)
        root = self.position
        self.cache.seek(newest_slots(root, self.seen), extent=self.extent)
        drafted = root[:, None] + self.depths
        return self.cache.tree_mask(positions, root, self.seen, dtype=dtype, window=window, drafted=drafted)


class OwnOutputReader(Windowed, DraftHead):
    """A head whose depths read the token and the output of the one before."""

    def fed_back(self, hidden: Tensor) -> Tensor:
        """[B, Q, D] a depth's output in the form that the next depth reads."""
        return hidden

    def features(self, output: TargetOutput) -> Tensor:
        """[B, T, D] the hidden states that depth 0 reads beside the embeddings."""
        raise NotImplementedError

    def _last_output(self, state: ChainState, read: Reading) -> Tensor:
        """Write keys and values of all positions; returns the output at each row's last committed one [B, 1, D]."""
        hidden = self._decode(state, read.next_tokens, self.features(read.output), read.positions)
        return hidden[torch.arange(len(hidden), device=hidden.device), read.last][:, None]

    def _decode(
        self, state: ChainState, token_ids: Tensor, hidden: Tensor, positions: Tensor, *, in_tree: bool = False
    ) -> Tensor:
        """One forward over the cache. token_ids, positions [B, Q]; hidden [B, Q, D] -> [B, Q, D]."""
        raise NotImplementedError

    @torch.no_grad()
    def commit(self, state: ChainState, read: Reading) -> None:
        state.extent, state.shift = read.extent or state.cache.max_length, read.shift
        state.hidden = self._last_output(state, read)  # [B, 1, D]
        state.position = read.start + read.last
        state.seen, state.depths = state.seen[:, :1, :0], state.depths[:0]

    @torch.no_grad()
    def first_logits(self, state: ChainState) -> Tensor:
        return self.draft_logits(state.hidden[:, 0], 0)

    @torch.no_grad()
    def expand(self, state: ChainState, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        positions, hidden = (state.position + depth)[:, None].expand_as(tokens), state.hidden  # [B, F]
        if parents is not None:
            hidden = hidden[torch.arange(len(tokens), device=tokens.device)[:, None], parents]
            state.seen = seen_by_children(state.seen, parents)
            state.depths = torch.cat([state.depths, torch.full_like(tokens[0], depth)])
        state.hidden = self._decode(state, tokens, self.fed_back(hidden), positions, in_tree=parents is not None)
        return self.draft_logits(state.hidden, depth)  # of [B, F, D]


class RecurrentHead(OwnOutputReader):
    """Llama layers that read the target's features, and then their own output, beside the embedding of the next token.

    A family builds the layers and implements the methods that raise NotImplementedError here.
    """

    has_one_output = True
    fc: nn.Linear  # fuses the input of the layers
    llama: LlamaConfig
    rotary: Rotary
    packed: CpuLayers | None = None  # the layers for drafting in bf16 on a CPU

    @property
    def decoder_layers(self) -> list[LlamaLayer]:
        raise NotImplementedError

    def drafted_tokens(self, tokens: Tensor) -> Tensor:
        """[B, S] the tokens that depths after the first read, given the data's tokens there."""
        return tokens

    def read(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """token_ids [B, Q], hidden [B, Q, D] -> the first layer's attention input [B, Q, in] and residual [B, Q, D]."""
        raise NotImplementedError

    # training

    def kept_bytes(self, num_chains: int, *, itemsize: int, num_depths: int) -> int:
        num_positions = num_chains * num_depths * len(self.decoder_layers)
        return layer_bytes(self.llama, num_positions=num_positions, itemsize=itemsize)

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        limit = batch.input_ids.shape[1] + starts.num_depths
        read, stream = self.read(batch.input_ids.roll(-1, 1), self.features(batch.output))  # x_{t+1}; [B, T, ...]
        contexts = self._contexts(read, stream, batch, starts, limit)
        x = starts.take(read)  # [B, S, in]; the last position, whose x_{t+1} is not known, is never supervised
        hidden = x if stream is read else starts.take(stream)  # [B, S, D]
        for depth in range(starts.num_depths):
            run = self.runner(starts, like=x, depth=depth)
            rotary = self.rotary(starts.take(batch.places) + depth, like=x, num_positions=limit)
            if depth == 0:
                hidden, contexts = run(self._step, hidden, x, rotary, contexts)  # [B, S, D]
            else:
                tokens = self.drafted_tokens(starts.take(batch.input_ids, offset=depth + 1))
                hidden, contexts = run(self._draft, hidden, tokens, rotary, contexts)
            yield hidden

    def _contexts(self, x: Tensor, hidden: Tensor, batch: DraftBatch, starts: ChainStarts, limit: int) -> list[Context]:
        """For each layer, keys and values of true features at all positions [B, T], seen up to each chain's start."""
        rotary = self.rotary(batch.places, like=hidden, num_positions=limit)
        seen = batch.sight(starts, window=self.window)
        first, *further = self.decoder_layers
        contexts, last = [Context(*first.keys_values(x, rotary), seen)], first
        for layer in further:
            text = Context(contexts[-1].keys, contexts[-1].values, batch.sight(window=self.window))
            hidden = x = last(x, hidden, rotary, text)
            contexts.append(Context(*layer.keys_values(x, rotary), seen))
            last = layer
        return contexts

    def _draft(
        self, hidden: Tensor, tokens: Tensor, rotary: tuple[Tensor, Tensor], contexts: list[Context]
    ) -> tuple[Tensor, list[Context]]:
        """`_step` of a depth after the first: reads tokens [B, S] beside the previous depth's output [B, S, D]."""
        x, hidden = self.read(tokens, self.fed_back(hidden))
        return self._step(hidden, x, rotary, contexts, is_drafted=True)

    def _step(
        self,
        hidden: Tensor,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        contexts: list[Context],
        is_drafted: bool = False,
    ) -> tuple[Tensor, list[Context]]:
        """x [B, S, in] and the residual stream [B, S, D] through all layers: the output [B, S, D], and what the layers'
        queries have attended to. is_drafted: this includes their own position."""
        attended = list[Context]()
        for layer, context in zip(self.decoder_layers, contexts, strict=True):
            if is_drafted:
                keys, values = layer.keys_values(x, rotary)
                context = replace(context, drafted=(*context.drafted, (laid_out(keys), laid_out(values))))
            hidden = x = layer(x, hidden, rotary, context)
            attended.append(context)
        return hidden, attended

    # drafting

    def pack(self) -> None:
        self.packed = CpuLayers.of(self.decoder_layers, self.llama)
        pack_linears(self, without=self.decoder_layers if self.packed else ())

    def begin(self, *, batch_size: int, max_length: int) -> ChainState:
        cache = self.new_cache(len(self.decoder_layers), max_length)
        return ChainState.of(cache, batch_size=batch_size, like=self.fc.weight)

    def _last_output(self, state: ChainState, read: Reading) -> Tensor:
        positions = read.positions  # [B, Q]
        packed = self.packed if len(self.decoder_layers) == 1 and positions.shape[1] > 2 * TILE else None
        if packed is None or not (packed.writes and packed.is_for(read.output.post_norm)):
            return super()._last_output(state, read)
        # of many positions, as of a prompt, the layer's output is wanted at one alone
        rows, last = torch.arange(len(positions), device=positions.device)[:, None], read.last[:, None]
        x, hidden = self.read(read.next_tokens, self.features(read.output))
        state.cache.seek(positions, extent=state.extent)
        tables = self.rotary.tables(state.cache.max_length, like=x)
        places = placed(positions, state.shift)
        packed.write(self.decoder_layers[0].normalised(x), state.cache, tables, places)
        return self._through(state, x[rows, last], hidden[rows, last], positions[rows, last])

    def _decode(
        self, state: ChainState, token_ids: Tensor, hidden: Tensor, positions: Tensor, *, in_tree: bool = False
    ) -> Tensor:
        return self._through(state, *self.read(token_ids, hidden), positions, in_tree=in_tree)

    def _through(
        self, state: ChainState, x: Tensor, hidden: Tensor, positions: Tensor, *, in_tree: bool = False
    ) -> Tensor:
        """Through the layers: what `read` gives, x [B, Q, in] and hidden [B, Q, D] -> [B, Q, D]."""
        cache, layers, packed = state.cache, self.decoder_layers, self.packed
        packed = packed if packed is not None and packed.is_for(hidden) else None
        places = placed(positions, state.shift)
        if packed is None or in_tree or self.window is not None:
            mask = state.seek(positions, in_tree=in_tree, dtype=hidden.dtype, window=self.window)
        else:
            mask = None
            cache.seek(positions, extent=state.extent)
        if packed is not None:
            tables, read = self.rotary.tables(cache.max_length, like=x), layers[0].normalised(x)
            return packed(layers[0].residual(hidden), cache, tables, places, mask=mask, read=read)
        assert mask is not None
        rotary = self.rotary(places, like=x, num_positions=cache.max_length)
        for i, layer in enumerate(layers):
            keys, values = cache.update(*layer.keys_values(x, rotary), i)
            hidden = x = layer(x, hidden, rotary, Context(keys, values, mask))
        return hidden
