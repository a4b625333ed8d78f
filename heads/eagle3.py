"""EAGLE-3: decoder layers that extrapolate fused target features, trained by their own unrolled drafting (Li 2025).

The first layer reads, at position t, the embedding of x_{t+1} beside a hidden state: at depth 0 the fused low, middle
and high features of the target at t, at depth k > 0 the head's own output of depth k - 1. The last layer's output,
normalised, goes through the head's own output layer over the draft vocabulary.

Training-time test (section 3.2): each chain start t is unrolled num_depths times with gradients through all of them.
How chains are unrolled and drafted is in recurrent.py, which EAGLE shares.

With `parallel` (P-EAGLE) depths k > 0 read a mask token and a learned state instead of the previous depth's token and
output, so that one forward drafts all depths, see parallel.py.

Served conventions (vLLM 0.32, SGLang 0.5): embedding first in the concatenation, positions from 0 (x_{t+1} at rotary
position t), drafted hidden states fed back before the output norm (after it with norm_output, EAGLE 3.1), features in
ascending layer order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from ..base.errors import BadInput
from ..targets.cpu.chains import CpuChains
from ..targets.cpu.products import is_multiplied
from ..targets.layers.rotary import Rotary
from ..targets.layers.target_output import TargetOutput
from ..targets.target import Target
from .base import ChainStarts, DraftBatch
from .drafting.drafter import Reading
from .drafting.trees import Proposal
from .loss.functions import output_layer_rows
from .nn.layers import Attention, RMSNorm, llama_config, serving_keys, window_keys
from .parallel import ParallelConfig, last_and_behind, with_masks_behind
from .recurrent import ChainState, LlamaLayer, RecurrentHead
from .start.closed_form import OUTPUT_GAIN, channel_sizes, input_scales, sensitivity
from .start.eagle3 import fit_start


@dataclass(kw_only=True)
class Eagle3Config(ParallelConfig):
    """An EAGLE-3 head's keys; feature_layers None: see `default_feature_layers`."""

    type: str = "eagle3"
    num_depths: int = 7
    num_layers: int = 1  # decoder layers
    fc_norm: bool = False  # EAGLE 3.1: an RMSNorm on each feature before they are fused
    norm_output: bool = False  # EAGLE 3.1: feed drafted states back after the output norm
    norm_before_fc: bool = False  # one RMSNorm over the concatenated features, before they are fused
    sliding_window: int | None = None  # a token sees this many positions, its own the last of them; None: all before
    train_output: bool = True  # False: the output layer stays as it starts, the target's rows
    # The next two are for imported heads. norm_before_residual: the first layer's residual is the normalised hidden
    # state (the speculators library; SGLang does not serve it)
    norm_before_residual: bool = False
    architecture: dict[str, Any] = field(default_factory=dict)  # overrides of the target's values; `ARCHITECTURE` keys
    # initial weights of the first layer. fitted: by regression on the first rows of training, if these are enough.
    # None: fitted if possible. The logits of all are scaled down where needed
    start: Literal["random", "fitted"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise BadInput("norm_before_fc: not together with fc_norm")
        self.check_least(1, "num_layers", "sliding_window")
        if self.start == "fitted" and not self.can_be_fitted:
            raise BadInput("start fitted: only of one layer, not parallel, without further norms; take start random")

    @property
    def can_be_fitted(self) -> bool:
        """Whether `start: fitted` supports this architecture."""
        more_norms = self.fc_norm or self.norm_before_fc or self.norm_before_residual or self.norm_output
        return not (self.num_layers > 1 or self.parallel or more_norms)

    @property
    def is_fitted(self) -> bool:
        return self.start != "random" and self.can_be_fitted

    def resolved(self, target: Target) -> "Eagle3Config":
        layers = self.layers_on(target, default_feature_layers(target.num_layers))
        return replace(self, feature_layers=layers, mask_token_id=self.mask_token(target))


def default_feature_layers(num_layers: int) -> list[int]:
    """Low, middle and high of n target layers: [2, n/2, n-3], the engines' default; [1, n/2, n-1] if n is small."""
    usual = [2, num_layers // 2, num_layers - 3]
    return usual if usual == sorted(set(usual)) else sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1})


class Eagle3Layer(LlamaLayer):
    """The first layer: its attention reads [embedding, hidden], both normalised; the residual is the raw hidden."""

    def __init__(self, config: LlamaConfig):
        nn.Module.__init__(self)  # not LlamaLayer's: one more norm and wider projections
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.hidden_norm = RMSNorm(size, eps=eps)
        self.self_attn = Attention(config, in_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)

    def both(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings and hidden states [B, Q, D] -> [B, Q, 2D], normalised: the input of the projections."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)

    def normalised(self, x: Tensor) -> Tensor:
        return x


class NormedResidualLayer(Eagle3Layer):
    """The residual is the hidden state after `hidden_norm`."""

    def residual(self, hidden: Tensor) -> Tensor:
        return self.hidden_norm(hidden)


class Eagle3Head(RecurrentHead):
    """EAGLE-3 with the tensor names that vLLM, SGLang and TensorRT-LLM load: fc, midlayer.*, norm, lm_head; with
    several layers layers.{i}.*; with fc_norm, fc_norm.{i}; with norm_before_fc, input_norm."""

    config_class, title = Eagle3Config, "EAGLE-3"
    chains: CpuChains | None = None  # for drafting chains in bf16 on a CPU

    def __init__(self, config: Eagle3Config, target: Target, draft_token_ids: Tensor | None = None):
        config = config.resolved(target)
        super().__init__(config, target, draft_token_ids)
        self.config: Eagle3Config = config
        layers = self.ascending_layers()
        self.llama = llama_config(target.config, config.architecture)
        size, eps, num_features = target.hidden_size, self.llama.rms_norm_eps, len(layers)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps=eps) for _ in range(num_features))
        self.fc = nn.Linear(num_features * size, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_features * size, eps=eps)
        first_class = NormedResidualLayer if config.norm_before_residual else Eagle3Layer
        first, more = first_class(self.llama), range(config.num_layers - 1)
        if config.num_layers == 1:
            self.midlayer = first
        else:
            self.layers = nn.ModuleList([first, *(LlamaLayer(self.llama) for _ in more)])
        self.mask_token, self.window = config.mask_token_id, config.sliding_window
        if config.parallel:
            self.max_draft_tokens = self.default_draft_tokens = config.num_depths
            self.mask_hidden = nn.Parameter(0.02 * torch.randn(1, 1, num_features * size))
        self.norm = RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or target.vocab_size, bias=False)
        self.rotary = Rotary(self.llama)
        self.input_sizes: Tensor | None = None  # [L * D] of what `fc` reads, once rows are measured
        with torch.no_grad():  # start from the target's own output: final norm gain and the drafted rows of lm_head
            self.norm.weight.copy_(target.final_norm_scale())
            self.lm_head.weight.copy_(output_layer_rows(target.output_layer, self.vocabulary)["weight"])
        self.lm_head.requires_grad_(config.train_output)

    @property
    def method(self) -> str:
        return "eagle3" if self.mask_token is None else "p-eagle"

    def measure(self, batches: Iterable[DraftBatch]) -> None:
        self.input_sizes = channel_sizes(batches, self.normed)

    @torch.no_grad()
    def fit(self, batches: Sequence[DraftBatch]) -> str | None:
        if not self.config.is_fitted:
            return None
        device = self.fc.weight.device
        lacking = fit_start(self.cpu(), batches)
        self.to(device)
        return lacking

    def matrix_scales(self) -> dict[str, Tensor]:
        sensitive = sensitivity(self.target)
        outputs = (sensitive.median() / sensitive).clamp_max(1)[:, None]  # [D, 1]
        layers = [name for name, module in self.named_modules() if isinstance(module, LlamaLayer)]
        written = {
            f"{name}.{part}.weight": outputs for name in layers for part in ("self_attn.o_proj", "mlp.down_proj")
        }
        return written | {
            "fc.weight": outputs if self.input_sizes is None else outputs * input_scales(self.fc, self.input_sizes)
        }

    def scale_outputs(self, factors: Sequence[float]) -> None:
        if factors[0] < 1:
            self.norm.weight.mul_(OUTPUT_GAIN)
            self.lm_head.weight.mul_(factors[0] / OUTPUT_GAIN)

    def serving_config(self) -> dict[str, Any]:
        layers = self.feature_layers
        keys = () if self.mask_token is None else ("mask_token_id", "pard_token", "ptd_token_id")
        return {
            **dict.fromkeys(keys, self.mask_token),
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **serving_keys(self.llama, num_layers=self.config.num_layers),
            **window_keys(self.window, num_layers=self.config.num_layers),
            "vocab_size": self.target.vocab_size,
            "draft_vocab_size": self.lm_head.out_features,
            "num_aux_hidden_states": len(layers),
            "norm_before_residual": self.config.norm_before_residual,
            "norm_before_fc": self.config.norm_before_fc,
            "fc_norm": self.config.fc_norm,
            "norm_output": self.config.norm_output,
            # vLLM counts layer inputs, as HF hidden_states does; SGLang counts layer outputs
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [i - 1 for i in layers],
                "use_aux_hidden_state": True,
                "norm_before_fc": self.config.norm_before_fc,
            },
        }

    @property
    def decoder_layers(self) -> list[LlamaLayer]:
        return [self.midlayer] if self.config.num_layers == 1 else cast(list[LlamaLayer], list(self.layers))

    def features(self, output: TargetOutput) -> Tensor:
        """The target's features [B, T, L, D] fused: [B, T, D]."""
        return self.fused(output.features.to(self.fc.weight.dtype))

    def fused(self, features: Tensor) -> Tensor:
        """[B, T, L, D] -> [B, T, D]."""
        return self.fc(self.normed(features))

    def normed(self, features: Tensor) -> Tensor:
        """[B, T, L, D] -> [B, T, L * D] what `fc` reads."""
        if self.config.fc_norm:
            features = torch.stack([norm(features[:, :, i]) for i, norm in enumerate(self.fc_norm)], 2)
        flat = features.flatten(2)
        return self.input_norm(flat) if self.config.norm_before_fc else flat

    def masked(self) -> Tensor:
        """[1, 1, D] the learned state that replaces the features of tokens that are not drafted yet."""
        return self.fused(self.mask_hidden.unflatten(-1, (len(self.feature_layers), -1)))

    def fed_back(self, hidden: Tensor) -> Tensor:
        if self.config.parallel:
            return self.masked().expand_as(hidden)
        return self.norm(hidden) if self.config.norm_output else hidden

    def training_starts(self, loss_mask: Tensor) -> ChainStarts:
        return self.config.drawn(super().training_starts(loss_mask))

    def drafted_tokens(self, tokens: Tensor) -> Tensor:
        return tokens if self.mask_token is None else torch.full_like(tokens, self.mask_token)

    @torch.no_grad()
    def commit(self, state: ChainState, read: Reading) -> None:
        if self.mask_token is None:
            super().commit(state, read)
            return
        num_more = self.num_depths - 1
        state.extent, state.shift = read.extent or state.cache.max_length, read.shift
        tokens, is_read = with_masks_behind(  # [B, Q + K - 1]
            read.next_tokens, read.last + 1, num_more=num_more, mask_token=self.mask_token
        )
        features = F.pad(self.features(read.output), (0, 0, 0, num_more))
        features = torch.where(is_read[..., None], features, self.masked())
        positions = read.start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        positions = positions.clamp(max=state.extent - 1)  # those beyond belong to depths that were not requested
        out = self._decode(state, tokens, features, positions)
        state.hidden = last_and_behind(out, read.last, self.num_depths)  # [B, K, D]

    @torch.no_grad()
    def expand(self, state: ChainState, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        if self.mask_token is None:
            return super().expand(state, tokens, parents, depth=depth)
        return self.draft_logits(state.hidden[:, depth : depth + 1], depth).expand(-1, tokens.shape[1], -1)

    def pack(self) -> None:
        super().pack()
        first, embedding = self.decoder_layers[0], self.target.input_embedding
        is_plain = self.config.num_layers == 1 and self.mask_token is None and not self.config.norm_output
        is_plain = is_plain and self.window is None  # the kernel's chains see all positions
        if self.packed is None or not is_plain or type(first) is not Eagle3Layer or type(embedding) is not nn.Embedding:
            return  # a subclass of nn.Embedding may scale, as Gemma's does
        if not is_multiplied(embedding.weight):
            return
        self.chains = CpuChains(
            self.packed,
            embedding=embedding.weight,
            embedding_norm=first.input_layernorm.weight,
            hidden_norm=first.hidden_norm.weight,
            output_norm=self.norm.weight,
            output=self.lm_head.weight,
            to_target=None if self.vocabulary is None else self.vocabulary.to_target,
        )

    @torch.no_grad()
    def propose(self, state: ChainState, *, num_draft_tokens: int) -> Proposal:
        chains = self.chains
        if chains is None or state.shift is not None or not chains.layers.is_for(state.hidden):
            return super().propose(state, num_draft_tokens=num_draft_tokens)
        tables = self.rotary.tables(state.cache.max_length, like=state.hidden)
        drafted = chains.draft(state.hidden, state.cache, tables, state.position, num_tokens=num_draft_tokens)
        return Proposal(drafted.tokens, logits=list(drafted.logits), confidence=drafted.probabilities)

    def read(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        first = cast(Eagle3Layer, self.decoder_layers[0])
        return first.both(self.target.embed(token_ids).to(hidden.dtype), hidden), hidden

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def predicted_state(self, hidden: Tensor, depth: int) -> Tensor:
        return self.norm(hidden)
