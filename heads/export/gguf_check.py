"""Checks of a GGUF file for llama-server to draft with: keys, tensors, vocabulary, feature layers.

Sources: the loaders of llama.cpp of November 2026. They refuse a missing tensor, but serve a wrong layer number, a
vocabulary of offsets or a NaN, and then drafts are just not accepted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..families import served_families
from .contracts import Contract
from .gguf_contract import MASK_TOKEN, vocab_size
from .gguf_file import GgufFile, read_gguf
from .serving import GgufLayout

MODULE = ("eh_proj", "enorm", "hnorm")  # each MTP block has these beside its ordinary tensors


def check_file(path: Path, config: Mapping[str, Any] | None = None) -> tuple[str | None, list[str]]:
    """The layout of a GGUF file (None if it cannot be read) and its problems, a line each.

    Args: config: config.json of the folder that the file was made from, to compare with.
    Raises: BadInput if it is not a GGUF file or the package gguf is missing.
    """
    file = read_gguf(path)
    if file.problem:
        return None, [file.problem]
    layouts = {name: layout for serving in served_families().values() for name, layout in serving.gguf.items()}
    layout = layouts.get(file.architecture)  # None: a whole language model
    contract = language_model(file) if layout is None else layout.contract(file)
    tokenizer(file, contract)
    contract.problems += tensor_problems(file, contract, is_head=layout is not None)
    if config is not None and layout is not None:
        contract.problems += differences(file, config, layout)
    return contract.layout, contract.problems


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


def tokenizer(file: GgufFile, contract: Contract) -> None:
    """Check the vocabulary, which llama-server compares with the target's."""
    tokens, key = file.lengths.get("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens"
    contract.report(not tokens, f"{key}: missing; llama-server compares it with the target's")
    contract.report(not file.keys.get("tokenizer.ggml.model"), "tokenizer.ggml.model: missing")
    vocab = file.own("vocab_size")
    differs = bool(tokens) and vocab is not None and vocab != tokens
    contract.report(differs, f"{key}: {tokens} tokens, but {file.architecture}.vocab_size {vocab}")


def tensor_problems(file: GgufFile, contract: Contract, *, is_head: bool) -> list[str]:
    """Tensors that are missing, of a wrong shape or type, forbidden, or hold NaN or infinite values."""
    problems = contract.compare(file.shapes, unknown="its graph has none") if contract.shapes else []
    for name, shape in file.shapes.items():
        if len(shape) == 1 and file.kinds[name] not in ("F32", "I64"):
            problems.append(f"tensor {name}: of type {file.kinds[name]}, norms and biases are F32")
        is_ours = is_head or ".nextn." in name  # in a whole model, only the head's part
        num_bad = int((~np.isfinite(file.values(name))).sum()) if is_ours and name != "d2t" else 0
        if num_bad:
            problems.append(f"tensor {name}: {num_bad} values are NaN or infinite")
    return problems


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
    num_drafted = file.shapes.get("d2t", (vocab_size(file),))[0]
    if config.get("draft_vocab_size") not in (None, num_drafted):
        problems.append(f"tensor d2t: {num_drafted} draft tokens, but draft_vocab_size {config['draft_vocab_size']}")
    return problems
