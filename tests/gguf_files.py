"""Small GGUF files as llama.cpp's converter writes them, from plain dicts, so that tests can damage what they like."""

import numpy as np

D, MLP, N, NKV, H, V, VD = 32, 48, 4, 2, 8, 61, 24
IDS = np.arange(3, 51, 2, dtype=np.int64)


def weights(*shape):
    return np.random.default_rng(sum(shape)).normal(0, 0.1, shape).astype(np.float32)


def model_keys(architecture, num_blocks):
    return {
        "general.architecture": architecture,
        f"{architecture}.block_count": num_blocks,
        f"{architecture}.context_length": 256,
        f"{architecture}.embedding_length": D,
        f"{architecture}.feed_forward_length": MLP,
        f"{architecture}.attention.head_count": N,
        f"{architecture}.attention.head_count_kv": NKV,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.rope.freq_base": 500.0,
        f"{architecture}.rope.dimension_count": H,
        f"{architecture}.vocab_size": V,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"w{i}" for i in range(V)],
    }


def block(place, read):
    return {
        f"{place}.attn_norm.weight": weights(D),
        f"{place}.attn_q.weight": weights(N * H, read),
        f"{place}.attn_k.weight": weights(NKV * H, read),
        f"{place}.attn_v.weight": weights(NKV * H, read),
        f"{place}.attn_output.weight": weights(D, N * H),
        f"{place}.ffn_norm.weight": weights(D),
        f"{place}.ffn_gate.weight": weights(MLP, D),
        f"{place}.ffn_up.weight": weights(MLP, D),
        f"{place}.ffn_down.weight": weights(D, MLP),
    }


def eagle3():
    """The keys and tensors of a sound EAGLE-3 head with a cut vocabulary."""
    keys = model_keys("eagle3", 1) | {
        "eagle3.target_layers": [1, 2, 3],
        "eagle3.target_hidden_size": D,
        "eagle3.norm_before_residual": False,
        "eagle3.norm_before_fc": False,
    }
    tensors = block("blk.0", 2 * D) | {
        "blk.0.attn_norm_2.weight": weights(D),
        "fc.weight": weights(D, 3 * D),
        "output_norm.weight": weights(D),
        "output.weight": weights(VD, D),
        "d2t": IDS.copy(),
    }
    return keys, tensors


def dspark():
    """Of a sound DSpark head of two layers with a cut vocabulary and a confidence head."""
    keys = model_keys("dflash", 2) | {
        "dflash.target_layers": [1, 2, 3],
        "dflash.block_size": 3,
        "dflash.attention.causal": False,
        "dflash.sample_from_anchor": True,
        "dflash.has_confidence_head": True,
        "tokenizer.ggml.mask_token_id": 60,
    }
    del keys["dflash.vocab_size"], keys["dflash.rope.dimension_count"]  # the converter writes neither
    tensors = {
        "fc.weight": weights(D, 3 * D),
        "enc.output_norm.weight": weights(D),
        "output_norm.weight": weights(D),
        "output.weight": weights(VD, D),
        "d2t": IDS.copy(),
        "markov_w1.weight": weights(V, 8),
        "markov_w2.weight": weights(VD, 8),
        "conf_proj.weight": weights(1, D + 8),
        "conf_proj.bias": weights(1),
    }
    for i in range(2):
        norms = {f"blk.{i}.attn_{name}_norm.weight": weights(H) for name in "qk"}
        tensors |= block(f"blk.{i}", D) | norms
    return keys, tensors


def draft_model():
    """Of a Llama of two layers."""
    tensors = {"token_embd.weight": weights(V, D), "output_norm.weight": weights(D)}
    return model_keys("llama", 2), tensors | block("blk.0", D) | block("blk.1", D)


def with_modules():
    """Of a target with one MTP module behind its two layers."""
    keys = model_keys("qwen3next", 3) | {"qwen3next.nextn_predict_layers": 1}
    tensors = {"token_embd.weight": weights(V, D), "output_norm.weight": weights(D)}
    for i in range(3):
        tensors |= block(f"blk.{i}", D)
    place = "blk.2.nextn"
    tensors |= {f"{place}.eh_proj.weight": weights(D, 2 * D), f"{place}.enorm.weight": weights(D)}
    return keys, tensors | {f"{place}.hnorm.weight": weights(D), f"{place}.shared_head_norm.weight": weights(D)}


def write(path, keys, tensors, *, is_quantised=False):
    """Writes them; integers as 32 bits, lists as arrays. is_quantised: matrices of whole blocks in 8 bits."""
    import gguf

    writer = gguf.GGUFWriter(path, keys.get("general.architecture", "none"))
    if "general.architecture" not in keys:
        for part in writer.kv_data:
            part.pop("general.architecture", None)
    kinds = {bool: writer.add_bool, int: writer.add_int32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        if key != "general.architecture":
            (writer.add_array if isinstance(value, list) else kinds[type(value)])(key, value)
    for name, value in tensors.items():
        if is_quantised and value.ndim == 2 and value.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
