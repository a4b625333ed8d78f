"""Checks of a GGUF file for llama-server to draft with, for what its loaders take without a word.

Sources: the loaders of llama.cpp of November 2026. They refuse a tensor that is missing, too many or of another shape,
and a missing size, but serve a wrong layer number, a vocabulary of offsets or a NaN, and then drafts are just not
accepted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .families.table import SERVINGS
from .layouts.gguf_file import GgufFile, read_gguf
from .layouts.serving import GgufLayout

MASK_TOKEN = "tokenizer.ggml.mask_token_id"


def check_file(path: Path, config: Mapping[str, Any] | None = None) -> tuple[str | None, list[str]]:
    """What a GGUF file holds (None if it cannot be read) and its problems, a line each.

    Args: config: config.json of the folder that the file was made from, to compare with.
    Raises: BadInput if it is not a GGUF file or the package gguf is missing.
    """
    file = read_gguf(path)
    if file.problem:
        return None, [file.problem]
    layouts = {name: layout for serving in SERVINGS.values() for name, layout in serving.gguf.items()}
    layout = layouts.get(file.architecture)  # None: a whole language model
    problems = [*tokenizer_problems(file), *value_problems(file, is_head=layout is not None)]
    if layout is not None:
        problems += head_problems(file, layout)
    if config is not None and layout is not None:
        problems += differences(file, config, layout)
    return f"{next(filter(None, (serving.method_of(file) for serving in SERVINGS.values())))} (GGUF)", problems


def tokenizer_problems(file: GgufFile) -> list[str]:
    """Those of the vocabulary, which llama-server compares with the target's."""
    tokens, key, vocab = file.lengths.get("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens", file.own("vocab_size")
    if not tokens:
        return [f"{key}: missing; llama-server compares it with the target's"]
    differs = vocab not in (None, tokens)
    return [f"{key}: {tokens} tokens, but {file.architecture}.vocab_size {vocab}"] if differs else []


def value_problems(file: GgufFile, *, is_head: bool) -> list[str]:
    """Tensors of the head with NaN or infinite values."""
    problems = []
    for name in file.shapes:
        is_ours = is_head or ".nextn." in name  # in a whole model, only the head's part
        num_bad = int((~np.isfinite(file.values(name))).sum()) if is_ours and name != "d2t" else 0
        if num_bad:
            problems.append(f"tensor {name}: {num_bad} values are NaN or infinite")
    return problems


def head_problems(file: GgufFile, layout: GgufLayout) -> list[str]:
    """Those of the keys for which llama.cpp has a default, or takes any value, and of d2t."""
    own, problems = file.architecture, layout.problems(file)
    if not file.own("rope.freq_base"):
        problems.append(f"{own}.rope.freq_base: missing; llama.cpp would use a default that is not the target's")
    ids = file.own("target_layers")
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        problems.append(f"{own}.target_layers: expected ascending layer numbers, found {ids!r}")
    elif ids != sorted(set(ids)) or ids[:1] < [0]:  # they count inputs of layers: HF's hidden_states[i], as vLLM counts
        problems.append(f"{own}.target_layers: {ids} do not ascend from 0 on; fc reads features in that order")
    token, num_tokens = file.keys.get(MASK_TOKEN), file.lengths.get("tokenizer.ggml.tokens", 0)
    if layout.has_mask and (type(token) is not int or not 0 <= token < num_tokens):
        problems.append(f"{MASK_TOKEN}: {token!r}, expected 0 to {num_tokens - 1}")
    return problems + (map_problems(file) if "d2t" in file.shapes else [])


def map_problems(file: GgufFile) -> list[str]:
    """The first problem of d2t, if any. It holds absolute ids here: draft token i is target token d2t[i]."""
    ids, vocab = file.values("d2t").reshape(-1), file.lengths.get("tokenizer.ggml.tokens", 0)
    if len(set(ids.tolist())) < len(ids):
        return ["tensor d2t: target tokens repeat: it holds absolute ids here, not offsets"]
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(outside):
        return [f"tensor d2t: draft token {outside[0]} is target token {ids[outside[0]]}, outside 0..{vocab - 1}"]
    return []


def differences(file: GgufFile, config: Mapping[str, Any], layout: GgufLayout) -> list[str]:
    """Differences between a converted file and the config.json of its folder."""
    problems, config = [], {**(config.get(layout.nested) or {}), **config}
    for key, name in layout.told.items():
        wanted = config.get(name)
        if name == "target_layer_ids" and isinstance(wanted, list):
            wanted = [i + 1 for i in wanted]  # this key counts outputs of layers
        if name in config and (file.own(key) or False) != wanted:
            problems.append(f"{file.architecture}.{key}: {file.own(key)}, but config.json has {name} {config[name]}")
    token = config.get("mask_token_id")
    if token is not None and file.keys.get(MASK_TOKEN) != token:
        problems.append(f"{MASK_TOKEN}: {file.keys.get(MASK_TOKEN)}, but config.json has mask_token_id {token}")
    num_drafted = file.shapes.get("d2t", (file.lengths.get("tokenizer.ggml.tokens"),))[0]
    if config.get("draft_vocab_size") not in (None, num_drafted):
        problems.append(f"tensor d2t: {num_drafted} draft tokens, but draft_vocab_size {config['draft_vocab_size']}")
    return problems
