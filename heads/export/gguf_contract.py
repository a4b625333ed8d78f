"""What GGUF files of several architectures must hold alike: sizes, decoder layers, output layer, feature layers."""

from collections.abc import Mapping

import numpy as np

from .contracts import Contract, Shapes
from .gguf_file import GgufFile

SIZES = {
    "embedding_length": "D",
    "feed_forward_length": "the MLP's",
    "attention.head_count": "N",
    "attention.head_count_kv": "Nkv",
    "block_count": "the layers'",
    "vocab_size": "V",
}
MASK_TOKEN = "tokenizer.ggml.mask_token_id"


def vocab_size(file: GgufFile) -> int | None:
    """The target's V: the file's vocab_size, else its number of tokens."""
    return file.lengths.get("tokenizer.ggml.tokens") if file.own("vocab_size") is None else file.own("vocab_size")


def gguf_sizes(file: GgufFile, contract: Contract) -> dict[str, int] | None:
    """The counts that determine shapes; None, with the problem reported, if one is missing."""
    sizes = {**{key: file.own(key) for key in SIZES}, "vocab_size": vocab_size(file)}
    for key, value in sizes.items():
        whose = f"{file.architecture}.{key}: expected a count ({SIZES[key]}), found {value!r}"
        contract.report(type(value) is not int or value < 1, whose)
    return None if contract.problems else sizes


def flag(file: GgufFile, contract: Contract, key: str, *, allowed: tuple[bool | None, ...]) -> None:
    """Check a boolean key; None among `allowed` means that it may be missing."""
    given, wanted = file.own(key), " or ".join(str(value).lower() for value in allowed if value is not None)
    known = given is None or type(given) is bool
    contract.report(not known or given not in allowed, f"{file.architecture}.{key}: expected {wanted}, found {given!r}")


def layer_keys(file: GgufFile, contract: Contract, *further: str) -> None:
    """Report missing keys of a decoder layer."""
    default = "missing; llama.cpp would use a default that is not the target's"
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base", "context_length", *further):
        contract.report(not file.own(key), f"{file.architecture}.{key}: {default}")


def head_dim_of(file: GgufFile, sizes: Mapping[str, int]) -> int:
    """H, the head dimension."""
    return file.own("attention.key_length") or sizes["embedding_length"] // sizes["attention.head_count"]


def layer_shapes(file: GgufFile, sizes: Mapping[str, int], contract: Contract, *, place: str, read: int) -> Shapes:
    """Shapes of a decoder layer whose attention reads `read` channels."""
    hidden, inner, head_dim = sizes["embedding_length"], sizes["feed_forward_length"], head_dim_of(file, sizes)
    wide, narrow = (sizes[f"attention.{key}"] * head_dim for key in ("head_count", "head_count_kv"))
    turned, key = file.own("rope.dimension_count"), f"{file.architecture}.rope.dimension_count"
    if place == "blk.0":
        contract.report(turned not in (None, head_dim), f"{key}: {turned}, heads are {head_dim} wide")
    shapes = {
        "attn_norm": (hidden,),
        "attn_q": (wide, read),
        "attn_k": (narrow, read),
        "attn_v": (narrow, read),
        "attn_output": (hidden, wide),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    return {f"{place}.{name}.weight": shape for name, shape in shapes.items()}


def drafted_vocabulary(file: GgufFile, sizes: Mapping[str, int], contract: Contract) -> int:
    """Add the tensors after the last layer to the contract; returns Vd."""
    hidden, vocab = sizes["embedding_length"], sizes["vocab_size"]
    num_drafted = file.shapes["d2t"][0] if "d2t" in file.shapes else vocab
    contract.shapes["output_norm.weight"] = (hidden,)
    contract.optional |= {
        "token_embd.weight": (vocab, hidden),
        "rope_freqs.weight": (head_dim_of(file, sizes) // 2,),
    }
    output = contract.shapes if "d2t" in file.shapes else contract.optional
    output["output.weight"] = (num_drafted, hidden)
    if "d2t" in file.shapes:
        contract.optional["d2t"] = (num_drafted,)
        contract.problems += map_problems(file, vocab)
    contract.forbidden["t2d"] = "llama.cpp reads no such map"
    return num_drafted


def check_target_layers(file: GgufFile, contract: Contract, *, num_features: int | None = None) -> None:
    """Check target_layers, which count inputs of layers: HF's hidden_states[i], as vLLM counts."""
    ids, key = file.own("target_layers"), f"{file.architecture}.target_layers"
    is_short = not isinstance(ids, list) or len(ids) != (num_features or len(ids) or 1)
    if is_short or any(type(i) is not int for i in ids):
        contract.problems.append(f"{key}: expected {num_features or 'ascending'} layer numbers, found {ids!r}")
    elif ids != sorted(set(ids)) or ids[0] < 0:
        contract.problems.append(f"{key}: {ids} do not ascend from 0 on; fc reads features in that order")


def map_problems(file: GgufFile, vocab: int) -> list[str]:
    """d2t holds absolute ids: draft token i is target token d2t[i]."""
    if file.kinds["d2t"] != "I64":
        return [f"tensor d2t: of type {file.kinds['d2t']}, expected I64"]
    ids = file.values("d2t").reshape(-1)
    if len(set(ids.tolist())) < len(ids):
        return ["tensor d2t: target tokens repeat: it holds absolute ids here, not offsets"]
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(outside):
        return [f"tensor d2t: draft token {outside[0]} is target token {ids[outside[0]]}, outside 0..{vocab - 1}"]
    return []
