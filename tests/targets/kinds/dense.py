"""Dense decoder layers: rotary positions and their scalings, windows, scales and caps; learned positions and ALiBi."""

from typing import Any

from kind import VOCAB_SIZE, WINDOW, kind

ALTERNATING = ["sliding_attention", "full_attention"] * 2


def rope(rope_type: str = "default", **changes: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 500.0, **changes}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
LONGROPE = rope("longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=32)
MINISTRAL3 = rope(
    "yarn", factor=16.0, original_max_position_embeddings=24, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1
)
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
PER_LAYER: dict[str, Any] = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
NOT_PER_LAYER: dict[str, Any] = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}

ROTARY = {
    "llama": kind("RMSNorm, rotary positions, grouped queries: the plain case"),
    "llama_rope_llama3": kind("rotary frequencies scaled by wavelength", "llama", rope_parameters=LLAMA3),
    "llama_rope_yarn": kind("YaRN: scaled frequencies and attention", "llama", rope_parameters=YARN),
    "llama_rope_dynamic": kind(
        "rotary base that grows with the longest position of a forward",
        "llama",
        rope_parameters=rope("dynamic", factor=4.0),
        max_position_embeddings=32,
    ),
    "llama_bias": kind("biases in attention and MLP", "llama", attention_bias=True, mlp_bias=True),
    "llama_tied": kind("one table for input and output", "llama", tie_word_embeddings=True),
    "llama_head_dim": kind("heads wider than hidden size / heads", "llama", head_dim=24),
    "llama_padded_vocab": kind("more rows in the table than the tokenizer has tokens", "llama", vocab_size=576),
    "mistral": kind("a sliding window in every layer"),
    "mistral_nowindow": kind("the same without a window, as published since v0.2", "mistral", sliding_window=None),
    "ministral": kind("windows in some layers, by layer_types", head_dim=16, layer_types=ALTERNATING),
    "ministral3": kind("queries scaled by position", seed=1, rope_parameters=MINISTRAL3),
    "qwen2": kind("biased queries, keys and values; tied table", seed=2, tie_word_embeddings=True),
    "qwen2_window": kind(
        "windows from a certain layer on", "qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": kind("normed queries and keys"),
    "gemma": kind("embeddings scaled by sqrt(hidden), norms that store gain - 1", seed=1),
    "gemma2": kind("capped attention scores and logits, norms on both sides", query_pre_attn_scalar=16),
    "gemma2_softcap_low": kind(
        "caps low enough to change most values",
        "gemma2",
        seed=1,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3_text": kind("a rotary base per kind of layer", query_pre_attn_scalar=16, layer_types=ALTERNATING),
    "gemma3n_text": kind(
        "several residual streams, shared keys and values, an embedding per layer",
        layer_types=ALTERNATING,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
        **PER_LAYER,
    ),
    "gemma4_text": kind("head sizes per kind of layer", layer_types=ALTERNATING, **NOT_PER_LAYER),
    "gemma4_text_ple_shared": kind(
        "and an embedding per layer, keys and values shared by layers",
        "gemma4_text",
        seed=1,
        layer_types=ALTERNATING,
        **PER_LAYER,
    ),
    "gemma4_unified_text": kind(
        "Gemma 4's text model of the unified release", layer_types=ALTERNATING, **NOT_PER_LAYER
    ),
    "vaultgemma": kind("Gemma 2 without the norms behind attention and MLP"),
    "phi": kind("parallel attention and MLP, rotary in a part of each head, LayerNorm, biased output"),
    "phi3": kind("joined projections, a window", seed=1, original_max_position_embeddings=256),
    "phi3_longrope": kind(
        "rotary factors that switch behind the original context, where ours ends",
        "phi3",
        original_max_position_embeddings=32,
        rope_parameters=LONGROPE,
    ),
    "phi4mini_partial": kind(
        "Phi-4-mini: rotary in half of each head, tied table",
        "phi3",
        original_max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_parameters=rope(partial_rotary_factor=0.5),
        sliding_window=None,
    ),
    "glm": kind("interleaved rotary in half of each head"),
    "glm4": kind("and norms behind attention and MLP"),
    "granite": kind("scaled embeddings, residuals, scores and logits", **GRANITE),
    "granite_rope_bias": kind(
        "Granite with biases", "granite", seed=1, attention_bias=True, mlp_bias=True, logits_scaling=8.0
    ),
    "granite_swa": kind("Granite with windows and sinks"),
    "olmo": kind("LayerNorm without weights, clipped projections"),
    "olmo2": kind("norms behind attention and MLP only"),
    "olmo3": kind("and windows in three of four layers"),
    "smollm3": kind("some layers without positions"),
    "cohere": kind("parallel layers, multiplied logits, interleaved rotary"),
    "cohere2": kind("and windows; layers with full attention have no positions"),
    "cohere_compass_text": kind(
        "Cohere 2 with a rotary per kind of layer, or none",
        layer_types=ALTERNATING,
        rope_parameters={"sliding_attention": rope(), "full_attention": None},
    ),
    "exaone": kind("Llama under EXAONE's name"),
    "exaone4": kind("windowed rotary and full layers without positions, norms behind", sliding_window=WINDOW),
    "ernie4_5": kind("interleaved rotary, tied table"),
    "hunyuan_v1_dense": kind("queries and keys normed behind the rotary", head_dim=16),
    "seed_oss": kind("biased projections, output unbiased"),
    "nemotron": kind("LayerNorm that stores gain - 1, squared ReLU", head_dim=16, num_key_value_heads=2),
    "starcoder2": kind("LayerNorm, plain MLP with biases", seed=1, bos_token_id=1, eos_token_id=2),
    "starcoder2_window": kind("and a window in every layer", "starcoder2", sliding_window=WINDOW),
    "gpt_neox": kind("parallel layers, joined projection, LayerNorm"),
    "gptj": kind("interleaved rotary in a part, parallel layers, biased output", seed=1, rotary_dim=8),
    "codegen": kind("GPT-J with a joined projection in a shuffled order", rotary_dim=8),
    "stablelm": kind("LayerNorm, rotary in a part of each head"),
    "persimmon": kind("squared ReLU, joined projection, normed queries and keys"),
    "apertus": kind("an activation with learned slopes (xIELU)"),
    "arcee": kind("squared ReLU MLP without a gate"),
    "helium": kind("interleaved rotary"),
    "nanochat": kind("norms without weights, also behind the embedding; capped logits"),
    "cwm": kind("Llama's scaled rotary with windows"),
    "hyperclovax": kind("Granite's scales, norms behind attention and MLP"),
    "bitnet": kind("norms inside attention and MLP"),
    "internlm3": kind("Llama under InternLM's name"),
    "iquestcoder": kind("Llama under IQuest-Coder's name"),
    "jais2": kind("LayerNorm, squared ReLU, biases"),
    "diffllama": kind("the difference of two attentions"),
    "doge": kind("a mask made from the values, which keeps 16 keys", keep_window_size=WINDOW),
    "modernbert-decoder": kind("an encoder's layers, causal, with local attention"),
    "hrm_text": kind("two stacks that are applied several times", spreads=(0.2, 0.02)),
    "minicpm3": kind("latent attention with scaled embeddings, residuals, logits", num_key_value_heads=4, head_dim=8),
}
NOT_ROTARY = {
    "gpt2": kind("learned positions, transposed projections, tied table"),
    "gpt_bigcode": kind("one key head for all queries, learned positions"),
    "gpt_neo": kind(
        "learned positions, local layers, unscaled attention",
        attention_types=[[["global", "local"], 2]],
        window_size=WINDOW,
    ),
    "opt": kind("learned positions with an offset, ReLU", ffn_dim=96, word_embed_proj_dim=64),
    "xglm": kind("sinusoidal positions with an offset", seed=2, spreads=(0.8, 0.1), ffn_dim=96),
    "biogpt": kind("learned positions with an offset, scaled embeddings"),
    "bloom": kind("ALiBi from the mask, a norm behind the embedding", seed=3, spreads=(1.0, 1.0)),
    "mpt": kind("ALiBi by distance to the last key, no biases", max_seq_len=256),
    "falcon": kind("parallel attention and MLP, rotary", num_kv_heads=2, new_decoder_architecture=True),
    "falcon_alibi": kind("Falcon with ALiBi", "falcon", seed=1, alibi=True),
}
