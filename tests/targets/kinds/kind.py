"""A kind of target: one architecture of transformers at a tiny size, and what sets it apart from the others."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from headstart.targets.loading import quiet_loading
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 512
WINDOW = 16
TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES: dict[str, Any] = {  # each where a config has such a key that is set by default
    **dict(vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4),
    **dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=WINDOW),
    # experts
    **dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    **dict(n_shared_experts=1, num_shared_experts=1, shared_intermediate_size=32, shared_expert_intermediate_size=32),
    **dict(n_group=1, topk_group=1, first_k_dense_replace=1),
    # latent attention
    **dict(kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16),
    # linear attention and state spaces
    **dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16),
    **dict(mamba_d_state=16, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_chunk_size=32, mamba_expand=2),
}
# standard deviations of the entries of matrices, and of a table that is the output layer too, which would only ever
# repeat its input if it were larger: texts then neither repeat a token nor depend on rounding
SPREADS = 0.3, 0.02


@dataclass(frozen=True)
class Kind:
    """One row of the tables; `kind` and `wrapper` make them."""

    why: str  # what of the architecture it exercises
    model_type: str  # transformers' word; "": the kind's own name
    changes: dict[str, Any]  # of its config, from the tiny sizes; `...`: the config's own default
    text: "Kind | None" = None  # of a model with several modalities: its language model
    part: str = ""  # the submodule to compare with, where transformers fails on the whole
    # of the weights, where these write texts of few different tokens, or texts that depend on rounding
    seed: int = 0
    spreads: tuple[float, float] = SPREADS
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)

    @property
    def auto_class(self) -> Any:
        """The class that transformers loads it by."""
        return AutoModelForCausalLM if self.text is None else AutoModelForImageTextToText

    def config(self) -> PreTrainedConfig:
        """Raises KeyError if the installed transformers has no such type."""
        if self.text is None:
            return tiny_config(self.model_type, self.changes, self.sizes)
        make: Any = CONFIG_MAPPING[self.model_type]
        return make(text_config=self.text.config().to_dict(), **self.changes)

    def model(self) -> PreTrainedModel:
        """A random model, in fp32."""
        torch.manual_seed(self.seed)
        with quietly():
            model = self.auto_class.from_config(self.config()).eval()
        draw_weights(model, torch.Generator().manual_seed(self.seed), *self.spreads)
        return model


def kind(
    why: str, model_type: str = "", *, seed: int = 0, spreads: tuple[float, float] = SPREADS, **changes: Any
) -> Kind:
    return Kind(why, model_type, changes, seed=seed, spreads=spreads)


def wrapper(why: str, model_type: str, text: Kind, *, seed: int = 0, part: str = "", **changes: Any) -> Kind:
    """A model with several modalities around the language model `text`, saved and loaded as the whole."""
    return Kind(why, model_type, changes, text=text, seed=seed, part=part)


@contextmanager
def quietly() -> Iterator[None]:
    """Without the advice that libraries have for configs of such sizes."""
    with quiet_loading(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tiny_config(model_type: str, changes: dict[str, Any], given: dict[str, Any]) -> PreTrainedConfig:
    make = CONFIG_MAPPING[model_type]
    with quietly():
        defaults, names = make().to_dict(), make.attribute_map
        sizes = {names.get(key, key): value for key, value in given.items()}
        sizes = {key: value for key, value in sizes.items() if defaults.get(key) is not None}
        tokens = {key: value for key, value in TOKENS.items() if key in defaults}
        return make(**{key: value for key, value in {**sizes, **tokens, **changes}.items() if value is not ...})


@torch.no_grad()
def draw_weights(model: PreTrainedModel, source: torch.Generator, spread: float, tied_spread: float) -> None:
    """Weights under which every part has an effect on the text; decay rates of recurrent layers stay as they are."""
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = output is not None and output.weight is table.weight
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=source)
        if parameter is table.weight:
            parameter.copy_(noise * (tied_spread if is_tied else 1.0))
        elif "A_log" in name or "dt_bias" in name:
            continue
        elif parameter.ndim >= 2:
            parameter.copy_(noise * spread)
        else:
            parameter.add_(0.15 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("_bias"):  # by which routers choose experts
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=source))
