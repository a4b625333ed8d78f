"""One decoder layer of the target's own class, run alone: in decoding over a cache, in training over draft chains.

The layer's code runs unchanged, whether it has query and key norms, biases, experts or latent attention. Only the
attention function is ours: transformers calls it with the keys that the cache returned, and with `chains` it also
attends to each query's own drafted keys.
"""

import copy
import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ...base.errors import BadInput, first_line
from ...targets.caches.attention import grouped_attention
from ...targets.caches.cache import SlotCache, cache_argument
from ...targets.target import Target
from ..loss.sight import Sight, blocks_of
from .chain_attention import attend_chains, laid_out

NAME = "headstart_chains"


class ChainKeys:
    """Replaces one layer's cache in training. The first write holds the keys of all positions of the text, which all
    queries share as `sight` says; each later write holds one drafted key per query, which only that query sees."""

    def __init__(self, *, window: int | None, sight: Sight | None):
        """Args: window: sliding window in tokens; None: no limit. sight: of the next queries; None: causal."""
        self.window, self.sight = window, sight
        self.written: list[tuple[Tensor, Tensor]] = []  # [B, Nkv, T, H] each, then per depth [B, Nkv, S, H]
        self.joined: Tensor | None = None  # the keys that the last `update` returned

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values concatenated, [B, Nkv, T + depths * S, H], as the layer may still transform them."""
        self.written.append((laid_out(keys), laid_out(values)) if self.written else (keys, values))
        self.joined, values = (torch.cat(part, 2) for part in zip(*self.in_window, strict=True))
        return self.joined, values

    @property
    def in_window(self) -> list[tuple[Tensor, Tensor]]:
        """The keys and values written, without drafted ones outside the window."""
        drafted = self.written[1:] if self.window is None else self.written[1:][-self.window :]
        return [self.written[0], *drafted]

    def parts(self, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Split what the layer made of `update`'s result: the shared keys and values, then those of each depth."""
        if key is self.joined:  # unchanged, so return the originals and keep no copies of earlier depths
            return self.in_window
        sizes = [keys.shape[2] for keys, _ in self.in_window]
        return list(zip(key.split(sizes, 2), value.split(sizes, 2), strict=True))


def chain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    chains: ChainKeys | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with one softmax over the shared keys and each query's own drafted keys.

    Args: query [B, N, S, H]; key, value [B, Nkv, T + depths * S, H]; attention_mask: without chains, [B, 1, Q, P].
    Returns: [B, S, N, H]. Raises: ValueError on soft-capped scores or attention sinks, which are not supported.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("attention with soft-capped scores or sinks")
    if chains is None or chains.sight is None:
        return grouped_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    (key, value), *drafted = chains.parts(key, value)
    mixed = attend_chains(query, key, value, chains.sight, drafted=drafted, scale=scaling)
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, chain_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


LayerCache = SlotCache | ChainKeys | None


class LayerDriver:
    """Creates and runs layers of the class of the target's last attention layer, or of its first."""

    def __init__(self, target: Target, *, is_first: bool = False):
        """Raises BadInput if a layer run alone does not compute what it does within the target."""
        self.target = target
        self.config = copy.deepcopy(target.config)
        self.config._attn_implementation = NAME
        types = target.layer_types or ["sliding_attention"] * target.num_layers
        attends = [i for i, kind in enumerate(types) if kind in ("full_attention", "sliding_attention")]
        self.rotary: Any = getattr(target.base, "rotary_emb", None)
        gain = getattr(target.final_norm, "weight", None)
        parts = {
            "full attention": attends,
            "rotary positions": self.rotary,
            "a final norm with a gain": gain is not None,
        }
        for name, part in parts.items():
            if not part:
                raise BadInput(f"target {target.name}: mtp needs a decoder with {name}, which it has not")
        self.final_norm = cast(nn.Module, target.final_norm)
        self.index = attends[0 if is_first else -1]
        self.kind = types[self.index]
        is_sliding = self.kind == "sliding_attention"
        self.window: int | None = getattr(self.config, "sliding_window", None) if is_sliding else None
        self.cache_name = cache_argument(target.layers[self.index])
        takes_kind = "layer_type" in inspect.signature(type(self.rotary).forward).parameters
        self.rotary_kind = {"layer_type": self.kind} if takes_kind else {}
        name = type(target.layers[self.index]).__name__
        self.refusal = f"target {target.name}: mtp cannot drive its layer {self.index} ({name}) alone"
        try:
            self._check_shapes()
            if target.device.type != "meta":  # shapes without weights: nothing to compute
                self._check()
        except BadInput:
            raise
        except Exception as error:  # the code of an unknown layer may raise anything
            raise BadInput(f"{self.refusal}: {first_line(error)}") from error

    def new_layer(self) -> nn.Module:
        """A layer with its family's random weights, which writes its keys to the first layer of a cache. Without the
        dropout that some families train with: what a head computes is what it drafts by."""
        layer = type(self.target.layers[self.index])(self.config, layer_idx=self.index)
        with torch.no_grad():
            layer.apply(self.target.base._init_weights)
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                cast(Any, module).layer_idx = 0
        return layer.eval()

    def new_norm(self) -> nn.Module:
        """A norm of the target's kind, with its family's initial weights."""
        norm = copy.deepcopy(self.final_norm).float().requires_grad_(True)
        with torch.no_grad():
            self.target.base._init_weights(norm)
        return norm

    def __call__(
        self, layer: nn.Module, x: Tensor, positions: Tensor, mask: Tensor | None, cache: LayerCache
    ) -> Tensor:
        """x [B, Q, D] at positions [B, Q] -> [B, Q, D]. mask: [B, 1, Q, P] additive; None: causal."""
        known = positions.clamp(max=self.target.num_positions - 1)  # the target's own rotary must not grow beyond
        embeddings = self.rotary(x, known, **self.rotary_kind)
        out = layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=embeddings,
            chains=cache if isinstance(cache, ChainKeys) else None,
            **{self.cache_name: cache},
        )
        return out[0] if isinstance(out, tuple) else out

    def _check_shapes(self) -> None:
        """Compare the tensors of a new layer with those of the target's."""
        layers = self.target.layers[self.index], self.new_layer()
        theirs, ours = ({name: x.shape for name, x in layer.state_dict().items()} for layer in layers)
        if ours != theirs:
            name = sorted(ours.items() ^ theirs.items())[0][0]
            raise BadInput(f"{self.refusal}: made anew it has other tensors, as {name}")

    @torch.no_grad()
    def _check(self) -> None:
        """Compare the layer run alone, over three tokens of text and a fourth as draft, with its run in the target."""
        captured: list[Tensor] = []

        def keep(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            captured.append(args[0] if args else kwargs["hidden_states"])
            captured.append(output[0] if isinstance(output, tuple) else output)

        original = self.target.layers[self.index]
        handle = original.register_forward_hook(keep, with_kwargs=True)
        ids = torch.arange(1, 5, device=self.target.device)[None] % self.target.vocab_size  # [1, 4]
        try:
            self.target.forward(ids)
        finally:
            handle.remove()
        x, wanted = captured
        layer = self.new_layer().to(x)
        layer.load_state_dict(original.state_dict())
        positions = torch.arange(4, device=x.device)[None]
        cache = ChainKeys(window=self.window, sight=None)
        if self.window is not None:
            cache.sight = Sight(positions[:, :3], blocks_of(range(3), x.device), window=self.window)
        text = self(layer, x[:, :3], positions[:, :3], None, cache)
        cache.sight = Sight(positions[:, 2:3], blocks_of([2], x.device), window=self.window).behind(1)
        drafted = self(layer, x[:, 3:], positions[:, 3:], None, cache)
        got = torch.cat([text, drafted], 1).float() - x.float()  # without the residual, which would hide errors
        wanted = wanted.float() - x.float()
        error = ((got - wanted).norm() / wanted.norm()).item()
        if len(cache.written) != 2 or not error < 0.1:
            raise BadInput(f"{self.refusal}: its output differs by {error:.0%}")
