"""Layers that keep a state instead of keys and values: linear attention, state spaces, convolutions; and hybrids."""

from typing import Any

from kind import WINDOW, kind
from latent import EVERY_HEAD

CONVOLUTIONS = ["conv", "full_attention"] * 2
LINEAR: dict[str, Any] = {"num_experts_per_token": 2, "linear_head_dim": 16, "linear_num_heads": 4, **EVERY_HEAD}
# weights this small leave time steps above the least one, to which transformers raises them in a whole forward only
STEADY = 0.1, 0.02
SCALED: dict[str, Any] = {"embedding_multiplier": 6.0, "logits_scaling": 4.0}

HYBRID = {
    "qwen3_next": kind("gated delta rule in three of four layers, gated attention, experts", seed=2, num_experts=4),
    "qwen3_5_text": kind("gated delta rule and gated attention, dense"),
    "qwen3_5_moe_text": kind("and experts", seed=3),
    "nemotron_h": kind(
        "Mamba-2, experts, attention and MLP as layers of their own",
        seed=2,
        spreads=STEADY,
        num_hidden_layers=...,
        layers_block_type=["mamba", "moe", "attention", "mlp"],
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=1,
        chunk_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "falcon_h1": kind("Mamba-2 and attention side by side in each layer", mamba_d_ssm=128),
    "falcon_h1_multipliers": kind(
        "and scaled embeddings, keys, outputs and logits",
        "falcon_h1",
        mamba_d_ssm=128,
        lm_head_multiplier=0.5,
        embedding_multiplier=3.0,
        key_multiplier=0.7,
        attention_out_multiplier=0.9,
    ),
    "bamba": kind("Mamba-2 with a few layers of attention", attn_layer_indices=[1, 3]),
    "jamba": kind(
        "Mamba with attention and experts",
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "granitemoehybrid": kind(
        "Mamba-2 and attention with experts and Granite's scales",
        layer_types=["mamba", "mamba", "attention", "mamba"],
        **SCALED,
    ),
    "granitemoehybrid_attention": kind(
        "the same with attention only", "granitemoehybrid", layer_types=["attention"] * 4, **SCALED
    ),
    "olmo_hybrid": kind("gated delta rule with OLMo's attention"),
    "lfm2": kind("short convolutions and attention", layer_types=CONVOLUTIONS, full_attn_idxs=[1, 3]),
    "lfm2_moe": kind("and experts", layer_types=CONVOLUTIONS),
    "lfm3": kind("short convolutions, attention with a rotary per kind of layer"),
    "kimi_linear": kind(
        "Kimi delta attention and latent attention, experts",
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        **LINEAR,
    ),
    "bailing_hybrid": kind(
        "the same, by groups of layers", num_expert_group=1, topk_group=1, layer_group_size=4, **LINEAR
    ),
    "zamba2": kind(
        "Mamba-2, and one attention block that several layers share",
        seed=2,
        spreads=STEADY,
        num_key_value_heads=4,
        num_query_groups=...,
        layers_block_type=["mamba", "hybrid"] * 2,
        mamba_ngroups=1,
        n_mamba_heads=8,
        chunk_size=32,
        attention_head_dim=32,
        use_mem_rope=True,
        use_mamba_kernels=False,
        adapter_rank=8,
    ),
    "minimax": kind("lightning attention, whose state decays by head, and softmax attention"),
    "recurrent_gemma": kind("gated linear recurrence and windowed attention"),
    "zaya": kind(
        "convolutions over the queries and keys of each attention",
        spreads=(1.0, 1.0),
        layer_types=["hybrid"] * 4,
        router_hidden_size=32,
        num_experts_per_tok=1,
    ),
    "inkling_text": kind(
        "relative positions and short convolutions in each attention",
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=WINDOW,
        rel_extent=32,
        d_rel=4,
        layer_types=["hybrid_sliding", "hybrid"] * 2,
    ),
}
STATES_ONLY = {
    "mamba": kind("selective state spaces, no attention"),
    "mamba2": kind(
        "state spaces with scalar decay", num_heads=8, head_dim=16, state_size=16, n_groups=1, chunk_size=32
    ),
    "falcon_mamba": kind("Mamba with normed states"),
    "rwkv": kind("a weighted average with learned decay"),
    "xlstm": kind("matrix memories", seed=1, num_heads=4, embedding_dim=64, num_blocks=4, qk_dim_factor=1.0),
}
