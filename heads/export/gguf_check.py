"""Checks of a GGUF file for llama-server to draft with: keys, tensors, vocabulary, feature layers.

Sources: the loaders of llama.cpp of November 2026. They refuse a missing tensor, but serve a wrong layer number, a
vocabulary of offsets or a NaN, and then drafts are just not accepted.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..nn.dflash2 import NUM_TAPS
from .block import DFLASH2_KEYS
from .contracts import FEATURE_IDS, Contract, Shapes
from .gguf_file import GgufFile, read_gguf
from .llamacpp import NUM_TAPS as NUM_FEATURES

SIZES = {
    "embedding_length": "D",
    "feed_forward_length": "the MLP's",
    "attention.head_count": "N",
    "attention.head_count_kv": "Nkv",
    "block_count": "the layers'",
    "vocab_size": "V",
}
MASK_TOKEN = "tokenizer.ggml.mask_token_id"
MODULE = ("eh_proj", "enorm", "hnorm")  # each MTP block has these beside its ordinary tensors


def check_file(path: Path, config: Mapping[str, Any] | None = None) -> tuple[str | None, list[str]]:
    """The layout of a GGUF file (None if it cannot be read) and its problems, a line each.

    Args: config: config.json of the folder that the file was made from, to compare with.
    Raises: BadInput if it is not a GGUF file or the package gguf is missing.
    """
    file = read_gguf(path)
    if file.problem:
        return None, [file.problem]
    contract = CONTRACTS.get(file.architecture, language_model)(file)
    tokenizer(file, contract)
    contract.problems += tensor_problems(file, contract)
    if config is not None and file.architecture in TOLD:
        contract.problems += differences(file, config)
    return contract.layout, contract.problems


def vocab_size(file: GgufFile) -> int | None:
    """The target's V: the file's vocab_size, else its number of tokens."""
    return file.lengths.get("tokenizer.ggml.tokens") if file.own("vocab_size") is None else file.own("vocab_size")


def sizes_of(file: GgufFile, contract: Contract) -> dict[str, int] | None:
    """The counts that determine shapes; None, with the problem reported, if one is missing."""
    found = {**{key: file.own(key) for key in SIZES}, "vocab_size": vocab_size(file)}
    for key, value in found.items():
        whose = f"{file.architecture}.{key}: expected a count ({SIZES[key]}), found {value!r}"
        contract.report(type(value) is not int or value < 1, whose)
    return None if contract.problems else found


def eagle3(file: GgufFile) -> Contract:
    """EAGLE-3: fc, one layer that reads twice its width, output norm and output layer; d2t if the vocabulary is cut."""
    contract = Contract("eagle3 (GGUF)")
    sizes = sizes_of(file, contract)
    feature_layers(file, contract, num_features=NUM_FEATURES)
    for key in ("norm_before_residual", "norm_before_fc"):
        flag(file, contract, key, allowed=(True, False, None))
    layer_keys(file, contract, "rope.dimension_count")
    if sizes is None:
        return contract
    contract.report(sizes["block_count"] != 1, f"eagle3.block_count: {sizes['block_count']}, its graph has one layer")
    hidden, wide = sizes["embedding_length"], file.own("target_hidden_size")
    if type(wide) is not int:
        contract.problems.append(f"eagle3.target_hidden_size: expected a count, found {wide!r}")
        return contract
    contract.report(wide != hidden, f"eagle3.target_hidden_size: {wide}, but embeddings, the target's, have {hidden}")
    contract.shapes = layer_shapes(file, sizes, contract, place="blk.0", read=2 * hidden)
    contract.shapes |= {"blk.0.attn_norm_2.weight": (hidden,), "fc.weight": (hidden, NUM_FEATURES * wide)}
    drafted_vocabulary(file, sizes, contract)
    if file.own("norm_before_fc"):
        contract.shapes["enc.output_norm.weight"] = (NUM_FEATURES * wide,)
    return contract


def dflash(file: GgufFile) -> Contract:
    """DFlash, with a Markov head DSpark, with a selector DFlash2: fc and its norm, layers with norms of queries and
    keys, output tensors."""
    rank = file.shapes.get("markov_w1.weight", (0, 0))[-1]
    contract = Contract(f"{'dspark' if rank else 'dflash'} (GGUF)")
    sizes = sizes_of(file, contract)
    feature_layers(file, contract)
    layer_keys(file, contract)
    flag(file, contract, "attention.causal", allowed=(False,))
    if rank:
        flag(file, contract, "sample_from_anchor", allowed=(True, False))
    size = file.own("block_size")
    contract.report(type(size) is not int or size < 1, f"dflash.block_size: expected a count, found {size!r}")
    token, num_tokens = file.keys.get(MASK_TOKEN), file.lengths.get("tokenizer.ggml.tokens", 0)
    outside = type(token) is not int or not 0 <= token < num_tokens
    contract.report(outside, f"{MASK_TOKEN}: {token!r}, expected 0 to {num_tokens - 1}")
    if sizes is None or contract.problems:
        return contract
    hidden, vocab, head_dim = sizes["embedding_length"], sizes["vocab_size"], head_size(file, sizes)
    contract.shapes = {"fc.weight": (hidden, len(file.own("target_layers")) * hidden)}
    contract.shapes["enc.output_norm.weight"] = (hidden,)
    for i in range(sizes["block_count"]):
        contract.shapes |= layer_shapes(file, sizes, contract, place=f"blk.{i}", read=hidden)
        contract.shapes |= {f"blk.{i}.{name}.weight": (head_dim,) for name in ("attn_q_norm", "attn_k_norm")}
    num_drafted = drafted_vocabulary(file, sizes, contract)
    if rank:
        contract.shapes |= {"markov_w1.weight": (vocab, rank), "markov_w2.weight": (num_drafted, rank)}
    if rank and file.own("has_confidence_head"):
        contract.shapes |= {"conf_proj.weight": (1, hidden + rank), "conf_proj.bias": (1,)}
    if any(file.own(key) is not None for key in DFLASH2_KEYS) or "selector_hidden.weight" in file.shapes:
        dflash2(file, sizes, contract)
    return contract


def dflash2(file: GgufFile, sizes: Mapping[str, int], contract: Contract) -> None:
    """Add the convolutions and the selector of DFlash2."""
    found = {key: file.own(key) for key in DFLASH2_KEYS}
    wrong = [key for key, value in found.items() if type(value) is not int]
    if wrong:
        contract.problems += [f"dflash.{key}: expected a count, found {found[key]!r}" for key in wrong]
        return
    hidden, vocab, rank, taps = sizes["embedding_length"], sizes["vocab_size"], found["selector_rank"], NUM_TAPS
    codebooks = dict.fromkeys(("selector_predecessor.weight", "selector_successor.weight"), (vocab, rank))
    contract.shapes |= {**codebooks, "selector_hidden.weight": (rank, hidden)}
    for place in (f"blk.{i}.{kind}_conv" for i in range(sizes["block_count"]) for kind in ("attn", "ffn")):
        contract.shapes[f"{place}_base"] = (2, taps, hidden)
        contract.shapes[f"{place}_proj.weight"] = (2 * taps * hidden // found["conv_group_size"], hidden)


def flag(file: GgufFile, contract: Contract, key: str, *, allowed: tuple[bool | None, ...]) -> None:
    """Check a boolean key; None among `allowed` means that it may be missing."""
    found, wanted = file.own(key), " or ".join(str(value).lower() for value in allowed if value is not None)
    known = found is None or type(found) is bool
    contract.report(not known or found not in allowed, f"{file.architecture}.{key}: expected {wanted}, found {found!r}")


def layer_keys(file: GgufFile, contract: Contract, *further: str) -> None:
    """Report missing keys of a decoder layer."""
    default = "missing; llama.cpp would use a default that is not the target's"
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base", "context_length", *further):
        contract.report(not file.own(key), f"{file.architecture}.{key}: {default}")


def head_size(file: GgufFile, sizes: Mapping[str, int]) -> int:
    """H, the head dimension."""
    return file.own("attention.key_length") or sizes["embedding_length"] // sizes["attention.head_count"]


def layer_shapes(file: GgufFile, sizes: Mapping[str, int], contract: Contract, *, place: str, read: int) -> Shapes:
    """Shapes of a decoder layer whose attention reads `read` channels."""
    hidden, inner, head_dim = sizes["embedding_length"], sizes["feed_forward_length"], head_size(file, sizes)
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
        "rope_freqs.weight": (head_size(file, sizes) // 2,),
    }
    output = contract.shapes if "d2t" in file.shapes else contract.optional
    output["output.weight"] = (num_drafted, hidden)
    if "d2t" in file.shapes:
        contract.optional["d2t"] = (num_drafted,)
        contract.problems += map_problems(file, vocab)
    contract.forbidden["t2d"] = "llama.cpp reads no such map"
    return num_drafted


def feature_layers(file: GgufFile, contract: Contract, *, num_features: int | None = None) -> None:
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


def language_model(file: GgufFile) -> Contract:
    """A draft model, or a target with its MTP modules: no block is missing, nor any tensor of a module."""
    count = file.own("nextn_predict_layers") or 0
    contract = Contract(f"{'mtp' if count else 'draft model'} ({file.architecture}, GGUF)")
    if "general.architecture" not in file.keys:
        contract.problems.append("general.architecture: missing")
        return contract
    num_blocks, hidden = file.own("block_count"), file.own("embedding_length")
    for key, value in (("block_count", num_blocks), ("embedding_length", hidden)):
        wrong = type(value) is not int or value < 1
        contract.report(wrong, f"{file.architecture}.{key}: expected a count, found {value!r}")
    contract.report(count and not count < (num_blocks or 0), f"nextn_predict_layers: {count} of {num_blocks} blocks")
    if contract.problems:
        return contract
    contract.optional = dict(file.shapes)  # the architecture's own tensors, which the loader checks
    vocab = file.lengths.get("tokenizer.ggml.tokens", 0)
    contract.shapes = {"token_embd.weight": (vocab, hidden)}
    if not count or any(name.startswith("blk.0.") for name in file.shapes):  # not a file of modules only
        contract.shapes["output_norm.weight"] = (hidden,)
        for i in range(num_blocks - count):
            there = any(name.startswith(f"blk.{i}.") for name in file.shapes)
            contract.report(not there, f"block {i}: no tensor of it, of {num_blocks - count} layers")
    for i in range(num_blocks - count, num_blocks):
        shapes = dict.fromkeys(MODULE, (hidden,)) | {"eh_proj": (hidden, 2 * hidden)}
        contract.shapes |= {f"blk.{i}.nextn.{name}.weight": shape for name, shape in shapes.items()}
    return contract


# by general.architecture; all others are whole language models. A new kind of head gets a function and a line here
CONTRACTS: dict[str, Callable[[GgufFile], Contract]] = {"eagle3": eagle3, "dflash": dflash}


def tokenizer(file: GgufFile, contract: Contract) -> None:
    """Check the vocabulary, which llama-server compares with the target's."""
    tokens, key = file.lengths.get("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens"
    contract.report(not tokens, f"{key}: missing; llama-server compares it with the target's")
    contract.report(not file.keys.get("tokenizer.ggml.model"), "tokenizer.ggml.model: missing")
    vocab = file.own("vocab_size")
    differs = bool(tokens) and vocab is not None and vocab != tokens
    contract.report(differs, f"{key}: {tokens} tokens, but {file.architecture}.vocab_size {vocab}")


def tensor_problems(file: GgufFile, contract: Contract) -> list[str]:
    """Tensors that are missing, of a wrong shape or type, forbidden, or hold NaN or infinite values."""
    problems = contract.compare(file.shapes, unknown="its graph has none") if contract.shapes else []
    for name, found in file.shapes.items():
        if len(found) == 1 and file.kinds[name] not in ("F32", "I64"):
            problems.append(f"tensor {name}: of type {file.kinds[name]}, norms and biases are F32")
        is_ours = file.architecture in CONTRACTS or ".nextn." in name  # in a whole model, only the head's part
        num_bad = int((~np.isfinite(file.values(name))).sum()) if is_ours and name != "d2t" else 0
        if num_bad:
            problems.append(f"tensor {name}: {num_bad} values are NaN or infinite")
    return problems


# by architecture, keys of the file and the config.json keys that they are converted from
TOLD = {
    "eagle3": {
        "target_layers": FEATURE_IDS,
        "norm_before_residual": "norm_before_residual",
        "norm_before_fc": "norm_before_fc",
        "vocab_size": "vocab_size",
    },
    "dflash": {
        "target_layers": "target_layer_ids",
        "block_size": "block_size",
        "sample_from_anchor": "sample_from_anchor",
        **{key: key for key in DFLASH2_KEYS},
    },
}


def differences(file: GgufFile, config: Mapping[str, Any]) -> list[str]:
    """Differences between a converted file and the config.json of its folder."""
    problems, config = [], {**(config.get("dflash_config") or {}), **config}
    for key, name in TOLD[file.architecture].items():
        wanted = config.get(name)
        if name == "target_layer_ids" and isinstance(wanted, list):
            wanted = [i + 1 for i in wanted]  # this key counts outputs of layers
        if name in config and (file.own(key) or False) != wanted:
            problems.append(f"{file.architecture}.{key}: {file.own(key)}, but config.json has {name} {config[name]}")
    token = config.get("mask_token_id")
    if token is not None and file.keys.get(MASK_TOKEN) != token:
        problems.append(f"{MASK_TOKEN}: {file.keys.get(MASK_TOKEN)}, but config.json has mask_token_id {token}")
    num_drafted = file.shapes.get("d2t", (vocab_size(file),))[0]
    if config.get("draft_vocab_size") not in (None, num_drafted):
        problems.append(f"tensor d2t: {num_drafted} draft tokens, but draft_vocab_size {config['draft_vocab_size']}")
    return problems
