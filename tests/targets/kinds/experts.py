"""Mixtures of experts behind ordinary attention."""

from typing import Any

from dense import ALTERNATING, GRANITE, NOT_PER_LAYER
from kind import WINDOW, kind

DOTS: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
SPARSE: dict[str, Any] = {"rotary_dim": 8, "dense_intermediate_size": 96}
FLOOR = 9  # tokens from which on Llama 4 scales queries

EXPERTS = {
    "mixtral": kind("softmax over the chosen experts"),
    "mixtral_window": kind("and a window in every layer", "mixtral", sliding_window=WINDOW),
    "qwen2_moe": kind("a gated shared expert"),
    "qwen3_moe": kind("normed queries and keys, many small experts"),
    "phimoe": kind("routing by SparseMixer, LayerNorm"),
    "phimoe_bias": kind(
        "and biases and a window", "phimoe", lm_head_bias=True, attention_bias=True, sliding_window=WINDOW
    ),
    "gpt_oss": kind("attention sinks, windows in every other layer, clamped gates", seed=1, layer_types=ALTERNATING),
    "glm4_moe": kind("sigmoid routing with a correction bias, dense first layers"),
    "granitemoe": kind("Granite's scales over experts", **GRANITE),
    "granitemoeshared": kind("and a shared expert", seed=1, embedding_multiplier=6.0, logits_scaling=4.0),
    "olmoe": kind("norms over all of the queries and keys"),
    "flex_olmo": kind("OLMo 2's norms over experts"),
    "cohere2_moe": kind("Cohere 2's parallel layers with experts"),
    "exaone_moe": kind("EXAONE 4 with experts"),
    "ernie4_5_moe": kind("shared experts, a correction bias"),
    "hunyuan_v1_moe": kind("Hunyuan's late norms with experts", head_dim=16),
    "minimax_m2": kind("sigmoid routing, norms over all of the queries and keys"),
    "minimax_m3_vl_text": kind("MiniMax M3's text model, dense attention", **SPARSE),
    "minimax_m3_vl_sparse": kind(
        "and attention to blocks that an index chooses",
        "minimax_m3_vl_text",
        layer_types=["full_attention", "minimax_m3_sparse"] * 2,
        index_head_dim=16,
        index_n_heads=2,
        index_block_size=8,
        index_topk_blocks=2,
        **SPARSE,
    ),
    "gemma4_text_moe": kind(
        "experts beside a dense MLP, keys that are values",
        "gemma4_text",
        seed=1,
        layer_types=ALTERNATING,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        attention_k_eq_v=True,
        **NOT_PER_LAYER,
    ),
    "dbrx": kind(
        "clipped joined projection, LayerNorm",
        max_seq_len=256,
        attn_config={"kv_n_heads": 2, "rope_theta": 500.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    ),
    "dots1": kind("DeepSeek's experts behind Qwen 3's attention", max_window_layers=4, **DOTS),
    "dots1_window": kind("and windows in every other layer", "dots1", layer_types=ALTERNATING, **DOTS),
    "afmoe": kind("gated attention, full layers without positions"),
    "mimo_v2_flash": kind("sinks and more key heads in windowed layers, keys wider than values"),
    "jetmoe": kind("experts in attention too"),
    "laguna": kind("gated attention, a rotary per kind of layer", layer_types=ALTERNATING),
    "mellum": kind("Qwen 3's experts with windows", layer_types=ALTERNATING),
    "solar_open": kind("GLM 4's experts without a dense layer"),
    "hy_v3": kind("Hunyuan 3: sigmoid routing, a dense first layer"),
    "aria_text": kind("Aria's text model: shared experts in Llama layers", seed=1),
    "sarvam_moe": kind("GLM 4's experts under Sarvam's name"),
    "llama4_text": kind(
        "chunked attention, layers without positions, where queries are scaled by position, experts",
        attention_chunk_size=WINDOW,
        floor_scale=FLOOR,
    ),
    "llama4_text_short": kind(
        "texts within one attention chunk", "llama4_text", attention_chunk_size=256, floor_scale=FLOOR
    ),
}
