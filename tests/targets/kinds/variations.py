"""Kinds of other sizes: hidden 96, six heads on three, head width 20, five layers, window 11, a vocabulary of 509.

What two sizes hide, such as a head's width that is the hidden size by the number of heads, a third one shows. Beside
these are what published models have and the usual tiny config has not.
"""

from dataclasses import replace
from typing import Any

from dense import GRANITE, MINISTRAL3, rope
from kind import SIZES, Kind, kind, wrapper

ODD: dict[str, Any] = {
    **SIZES,
    **dict(vocab_size=509, hidden_size=96, intermediate_size=120, num_hidden_layers=5, num_attention_heads=6),
    **dict(num_key_value_heads=3, head_dim=20, sliding_window=11, moe_intermediate_size=40),
}
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
NOT_LAST = ["full_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
CHUNKED = ["chunked_attention", "full_attention", "chunked_attention", "chunked_attention", "full_attention"]
LINEAR = ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]
SCALED = rope("llama3", factor=3.0, low_freq_factor=1.5, high_freq_factor=3.0, original_max_position_embeddings=24)
YARN = rope("yarn", factor=3.0, original_max_position_embeddings=24, beta_fast=20.0, mscale=1.2)

CASES: dict[str, Kind] = {
    "llama_linear": kind("", "llama", rope_parameters=rope("linear", factor=3.0)),
    "llama_yarn": kind("", "llama", rope_parameters=YARN, attention_bias=True),
    "llama_scaled": kind("", "llama", rope_parameters=SCALED, tie_word_embeddings=True),
    "mistral": kind("", "mistral"),
    "ministral": kind("", "ministral", head_dim=20, layer_types=MIXED),
    "ministral3_scaled": kind("", "ministral3", seed=1, rope_parameters=MINISTRAL3),
    "qwen2_late_window": kind("", "qwen2", use_sliding_window=True, max_window_layers=3),
    "qwen3_mixed": kind("", "qwen3", use_sliding_window=True, layer_types=NOT_LAST),
    "gemma2": kind("", "gemma2", query_pre_attn_scalar=20, layer_types=MIXED),
    "gemma3_text": kind("", "gemma3_text", seed=2, query_pre_attn_scalar=20, layer_types=NOT_LAST),
    "phi3": kind("", "phi3", seed=1, original_max_position_embeddings=256),
    "phi_partial": kind("", "phi", rope_parameters=rope(partial_rotary_factor=0.25)),
    "glm4_partial": kind("", "glm4", rope_parameters=rope(partial_rotary_factor=0.6)),
    "granite": kind("", "granite", **GRANITE),
    "olmo2": kind("", "olmo2"),
    "olmo3": kind("", "olmo3", layer_types=MIXED),
    "smollm3": kind("", "smollm3", no_rope_layers=[1, 0, 1, 1, 0]),
    "cohere2": kind("", "cohere2", layer_types=NOT_LAST),
    "exaone4": kind("", "exaone4", layer_types=MIXED),
    "seed_oss": kind("", "seed_oss"),
    "starcoder2": kind("", "starcoder2", seed=1, bos_token_id=1, eos_token_id=2),
    "gpt_neox_partial": kind("", "gpt_neox", rope_parameters=rope(partial_rotary_factor=0.5)),
    "stablelm": kind("", "stablelm", rope_parameters=rope(partial_rotary_factor=0.4), qk_layernorm=True),
    "nemotron": kind("", "nemotron", head_dim=20, num_key_value_heads=3),
    "qwen3_moe_sparse_step": kind("", "qwen3_moe", decoder_sparse_step=2),
    "mixtral_window": kind("", "mixtral", sliding_window=11),
    "gpt_oss": kind("", "gpt_oss", seed=1, layer_types=MIXED),
    "deepseek_v3": kind("", "deepseek_v3", num_key_value_heads=6, head_dim=8),
    "qwen3_5_text": kind("", "qwen3_5_text", layer_types=LINEAR),
    "lfm2": kind("", "lfm2", layer_types=["conv", "conv", "full_attention", "conv", "full_attention"]),
    # as published: with what the usual tiny config leaves out
    "llama4_temperature": kind(
        "", "llama4_text", attention_chunk_size=11, layer_types=CHUNKED, no_rope_layers=[1, 0, 1, 1, 0], floor_scale=9
    ),
    "lfm3_window": kind("", "lfm3", layer_types=["conv", "sliding_attention", "conv", "full_attention", "conv"]),
    "doge_experts": kind("", "doge", is_moe=True, num_experts=16, num_experts_per_tok=4),
    "opt_projected": kind("", "opt", ffn_dim=96, word_embed_proj_dim=48),
}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MLLAMA = wrapper(
    "",
    "mllama",
    kind("", "mllama_text_model", cross_attention_layers=[2, 4], num_hidden_layers=6),
    vision_config={
        **VISION,
        "num_global_layers": 1,
        "image_size": 28,
        "patch_size": 14,
        "intermediate_layers_indices": [0],
    },
)
VARIATIONS = {**{name: replace(case, sizes=ODD) for name, case in CASES.items()}, "mllama": MLLAMA}
VARIATIONS |= {
    name: wrapper(
        "",
        "paligemma",
        replace(text, model_type=name.partition("_")[2]),
        vision_config={**VISION, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        projection_dim=64,
    )
    for name, text in (
        ("paligemma_gemma", kind("")),
        ("paligemma_gemma2", kind("", query_pre_attn_scalar=16)),
    )
}
# a line of each that is refused, at the first step that is
REFUSED = {
    "opt_projected": ("load", "heads cannot use its output layer, as it reads states of 48 channels"),
    "paligemma_gemma": ("load", "the states of a text change with what follows it"),
    "doge_experts": ("load", "the states of a text change with what follows it"),
}
