"""EAGLE-1, EAGLE-2 and HASS: decoder layers that extrapolate the target's own last state (Li et al. 2024; Zhang 2024).

The head reads, at position t, the embedding of x_{t+1} beside a feature: at depth 0 the target's post-norm state at t,
at depth k > 0 its own output of depth k - 1. Its output estimates the target's post-norm state at the next position,
from which the target's own frozen output layer makes logits.

EAGLE-1 (num_depths 1) trains one step from true features, with noise in place of the head's own errors. HASS
(num_depths 3) trains as in decoding: the chain at start t is unrolled on the head's own features, without gradients
between depths (section 3.2). EAGLE-2 drafts dynamic trees with the same weights.

Served conventions (vLLM 0.32, SGLang 0.5): the feature is the state AFTER the target's final norm; embedding first in
the concatenation; positions from 0 (x_{t+1} at rotary position t); no input norm in layer 0 and none after the last;
embedding and output layer are the target's. With a cut draft vocabulary only its rows of that layer are computed
here; engines draft the whole vocabulary. SGLang needs fc.bias and vLLM ignores it: without `bias`, zeros are saved; a
head with a trained bias is served correctly by SGLang only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..base.errors import BadInput
from ..targets.layers.rotary import Rotary
from ..targets.layers.target_output import TargetOutput
from ..targets.target import Target
from .base import ChainStarts, DraftBatch, HeadConfig
from .nn.layers import llama_config, serving_keys
from .recurrent import LlamaLayer, RecurrentHead
from .start.closed_form import next_state_map


@dataclass(kw_only=True)
class EagleConfig(HeadConfig):
    """An EAGLE head's keys."""

    type: str = "eagle"
    num_depths: int = 5  # 1: EAGLE-1, 3: HASS; the default is the length of the chains that it drafts
    loss: dict[str, float] = field(default_factory=lambda: {"feature": 1.0, "soft_ce": 0.1})
    num_layers: int = 1  # decoder layers
    bias: bool = False  # whether `fc` has a trained bias
    # width of the uniform noise on the target's features in training, U(-noise/2, noise/2) in feature units. The papers
    # take 0.2; their code also scales it by 512 / tokens of the row, which we do not, as rows are padded
    noise: float = 0.0
    # overrides of the target's values (keys: `layers.ARCHITECTURE`), for imported heads
    architecture: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(1, "num_layers")
        self.check_least(0, "noise")
        if self.feature_layers:
            raise BadInput("feature_layers: eagle reads the state after the final norm only")


class EagleHead(RecurrentHead):
    """EAGLE with the tensor names that vLLM and SGLang load: fc, layers.{i}.*; no embedding, norm or lm_head."""

    config_class, title = EagleConfig, "EAGLE"

    def __init__(self, config: EagleConfig, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, target, draft_token_ids)
        self.config: EagleConfig = config
        self.llama = llama_config(target.config, config.architecture)
        size = target.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.bias)
        if not config.bias:  # zeros in the file, which SGLang would otherwise leave at random values
            del self.fc.bias
            self.fc.register_buffer("bias", torch.zeros(size))
        self.layers = nn.ModuleList(LlamaLayer(self.llama, normalises_input=i > 0) for i in range(config.num_layers))
        self.rotary = Rotary(self.llama)

    def serving_config(self) -> dict[str, Any]:
        return {
            # SGLang reads the first; vLLM, told `method: eagle`, finds the second
            "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"],
            "model_type": "llama",
            **serving_keys(self.llama, num_layers=self.config.num_layers),
            "vocab_size": self.target.vocab_size,
        }

    @property
    def decoder_layers(self) -> list[LlamaLayer]:
        return cast(list[LlamaLayer], list(self.layers))

    @torch.no_grad()
    def fit(self, batches: Sequence[DraftBatch]) -> None:
        """Fit `fc` to map the embedding and the previous state, the target's or the head's own estimate, onto the
        target's next state. The layers add nothing at first."""
        found = next_state_map(self.target, batches)
        if found is None:
            return
        self.fc.weight.copy_(found[0].T)
        self.fc.bias.zero_()
        for layer in self.decoder_layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)

    def scale_outputs(self, factors: Sequence[float]) -> None:
        """Scale the state, as it goes into the target's output layer without a norm."""
        for layer in (self.fc, *(p for x in self.decoder_layers for p in (x.self_attn.o_proj, x.mlp.down_proj))):
            layer.weight.mul_(factors[0])
        self.fc.bias.mul_(factors[0])

    @property
    def is_noisy(self) -> bool:
        return self.config.noise > 0

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        if self.training and self.is_noisy:
            features = self.features(batch.output)
            features = features + (torch.rand_like(features) - 0.5) * self.config.noise
            batch = replace(batch, output=replace(batch.output, post_norm=features))
        return super().unroll(batch, starts)

    def features(self, output: TargetOutput) -> Tensor:
        return output.post_norm.to(self.fc.weight.dtype)

    def fed_back(self, hidden: Tensor) -> Tensor:
        return hidden.detach()

    def read(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        fused = self.fc(torch.cat([self.target.embed(token_ids).to(hidden.dtype), hidden], -1))  # [B, Q, D]
        return fused, fused

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.restricted_logits(hidden)
