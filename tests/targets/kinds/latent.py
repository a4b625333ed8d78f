"""Latent attention (MLA): keys and values from a low-rank state, heads of two parts; index-sparse attention over it."""

from typing import Any

from dense import rope
from kind import kind

EVERY_HEAD: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
INDEX: dict[str, Any] = {
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
}  # of fewer heads many scores would tie at zero
DEEPSEEK_YARN = rope(
    "yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=32, beta_fast=32, beta_slow=1
)
MISTRAL4: dict[str, Any] = {
    "num_key_value_heads": 4,
    "rope_parameters": rope(llama_4_scaling_beta=0.1, original_max_position_embeddings=32),
}

LATENT = {
    "deepseek_v2": kind("latent attention, softmax routing in groups", num_experts_per_tok=2, **EVERY_HEAD),
    "deepseek_v3": kind("sigmoid routing with a correction bias", **EVERY_HEAD),
    "deepseek_v3_yarn": kind(
        "and YaRN, which scales the scores too",
        "deepseek_v3",
        max_position_embeddings=1280,
        rope_parameters=DEEPSEEK_YARN,
        **EVERY_HEAD,
    ),
    "deepseek_v32": kind("an index that chooses keys, not yet active in short texts", **EVERY_HEAD),
    "deepseek_v32_topk": kind("and active: it keeps 8 keys", "deepseek_v32", **EVERY_HEAD, **INDEX),
    "deepseek_v4": kind("four residual streams, compressed attention"),
    "glm4_moe_lite": kind("GLM 4's experts behind latent attention", **EVERY_HEAD),
    "glm_moe_dsa": kind("GLM 5: an index that chooses keys, not yet active", **EVERY_HEAD),
    "glm_moe_dsa_topk": kind("and active: it keeps 8 keys", "glm_moe_dsa", **EVERY_HEAD, **INDEX),
    "longcat_flash": kind(
        "two attentions a layer, experts that pass their input on",
        num_layers=2,
        ffn_hidden_size=96,
        moe_topk=2,
        zero_expert_num=2,
        expert_ffn_hidden_size=32,
        **EVERY_HEAD,
    ),
    "youtu": kind("latent attention, dense", **EVERY_HEAD),
    "axk1": kind("DeepSeek-V3's layers with a norm behind the MLP", **EVERY_HEAD),
    "hy_v4": kind("four residual streams, an index that chooses keys"),
}
