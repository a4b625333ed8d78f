"""Everything wrong with a GGUF file that llama-server would draft with: keys, tensors, vocabulary, feature layers.

Sources: the loaders of llama.cpp of November 2026. They refuse a missing tensor; a wrong layer number, a vocabulary of
offsets or a NaN they serve, and drafts are no longer accepted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...configs.errors import BadInput, first_line
from ..importing.gguf import check_gguf
from .contracts import FEATURE_IDS, Contract
from .llamacpp import NUM_TAPS

SIZES = {
    "embedding_length": "D",
    "feed_forward_length": "the MLP's",
    "attention.head_count": "N",
    "attention.head_count_kv": "Nkv",
    "block_count": "the layers'",
    "vocab_size": "V",
}
MODULE = ("eh_proj", "enorm", "hnorm")  # each MTP block has these beside its ordinary tensors
SMALL = 1 << 22  # elements of a tensor whose values are looked at; larger ones are sampled


@dataclass
class GgufFile:
    """What a file says of itself. shapes are [rows, columns], as PyTorch has them; lengths, those of arrays of text."""

    keys: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # F32, BF16, Q8_0, ...
    stored: dict[str, Any] = field(default_factory=dict)  # of the reader
    problem: str | None = None  # with the file itself

    @property
    def architecture(self) -> str:
        return str(self.keys.get("general.architecture"))

    def own(self, key: str) -> Any:
        """A key of the architecture."""
        return self.keys.get(f"{self.architecture}.{key}")

    def values(self, name: str) -> np.ndarray:
        """A tensor's numbers, dequantised; none of a type that the package gguf cannot read."""
        from gguf.quants import dequantize

        tensor = self.stored[name]
        part = tensor.data if tensor.n_elements <= SMALL else tensor.data[:: tensor.n_elements // SMALL + 1]
        try:
            return part if part.dtype.kind == "i" else dequantize(part, tensor.tensor_type)
        except NotImplementedError:
            return np.empty(0)


def read_gguf(path: Path) -> GgufFile:
    """Raises BadInput where it is no GGUF file at all, or the package gguf is missing."""
    check_gguf(path)
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise BadInput(f"{path}: needs the package gguf (pip install gguf)") from error
    found = GgufFile()
    try:
        reader = GGUFReader(path)
    except Exception as error:  # a damaged file makes the reader raise errors of many kinds
        found.problem = f"not a whole GGUF file: {first_line(error)}"
        return found
    for key, entry in reader.fields.items():
        parts = [entry.parts[i] for i in entry.data]
        if entry.types and entry.types[-1].name == "STRING":
            found.lengths[key] = len(parts)
            found.keys[key] = bytes(parts[0]).decode(errors="replace") if len(entry.types) == 1 else None
        else:
            values = [part[0].item() for part in parts]
            found.keys[key] = values if entry.types and entry.types[0].name == "ARRAY" else next(iter(values), None)
    for tensor in reader.tensors:
        found.stored[tensor.name], found.kinds[tensor.name] = tensor, tensor.tensor_type.name
        found.shapes[tensor.name] = tuple(int(size) for size in reversed(tensor.shape))
    return found


def check_file(path: Path, config: Mapping[str, Any] | None = None) -> tuple[str | None, list[str]]:
    """The layout of a GGUF file, None where it cannot be read, and a line for everything wrong with it.

    Args: config: of the folder that the file was made from, with which it is compared.
    Raises: BadInput where it is no GGUF file at all, or of no kind of drafter.
    """
    file = read_gguf(path)
    if file.problem:
        return None, [file.problem]
    contract = CONTRACTS.get(file.architecture, language_model)(file)
    tokenizer(file, contract)
    contract.problems += tensor_problems(file, contract)
    if config is not None and file.architecture == "eagle3":
        contract.problems += differences(file, config)
    return contract.layout, contract.problems


def sizes_of(file: GgufFile, contract: Contract) -> dict[str, int] | None:
    """Counts that shapes follow from; None, with the problem, where one is not there."""
    found = {key: file.own(key) for key in SIZES}
    if found["vocab_size"] is None:
        found["vocab_size"] = file.lengths.get("tokenizer.ggml.tokens")
    for key, value in found.items():
        whose = f"{file.architecture}.{key}: expected a count ({SIZES[key]}), found {value!r}"
        contract.report(type(value) is not int or value < 1, whose)
    return None if contract.problems else found


def eagle3(file: GgufFile) -> Contract:
    """fc, one layer that reads twice its width, output norm and layer; d2t of a cut vocabulary."""
    contract = Contract("eagle3 (GGUF)")
    sizes = sizes_of(file, contract)
    feature_layers(file, contract)
    for key in ("norm_before_residual", "norm_before_fc"):
        wrong = type(file.own(key)) not in (bool, type(None))
        contract.report(wrong, f"eagle3.{key}: expected true or false, found {file.own(key)!r}")
    default = "missing; llama.cpp would take a default that is not the target's"
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "context_length"):
        contract.report(not file.own(key), f"eagle3.{key}: {default}")
    if sizes is None:
        return contract
    contract.report(sizes["block_count"] != 1, f"eagle3.block_count: {sizes['block_count']}, its graph has one layer")
    hidden, num_heads, num_kv = (sizes[key] for key in ("embedding_length", *list(SIZES)[2:4]))
    head_dim = file.own("attention.key_length") or hidden // num_heads
    turned = file.own("rope.dimension_count")
    contract.report(turned not in (None, head_dim), f"eagle3.rope.dimension_count: {turned}, heads are {head_dim} wide")
    wide, read = file.own("target_hidden_size"), 2 * hidden
    if type(wide) is not int:
        contract.problems.append(f"eagle3.target_hidden_size: expected a count, found {wide!r}")
        return contract
    contract.report(wide != hidden, f"eagle3.target_hidden_size: {wide}, but embeddings, the target's, have {hidden}")
    inner, vocab = sizes["feed_forward_length"], sizes["vocab_size"]
    num_drafted = file.shapes["d2t"][0] if "d2t" in file.shapes else vocab
    layer = {
        "attn_norm": (hidden,),
        "attn_norm_2": (hidden,),
        "attn_q": (num_heads * head_dim, read),
        "attn_k": (num_kv * head_dim, read),
        "attn_v": (num_kv * head_dim, read),
        "attn_output": (hidden, num_heads * head_dim),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    contract.shapes = {f"blk.0.{name}.weight": shape for name, shape in layer.items()}
    contract.shapes |= {"fc.weight": (hidden, NUM_TAPS * wide), "output_norm.weight": (hidden,)}
    contract.optional = {"token_embd.weight": (vocab, hidden), "rope_freqs.weight": (head_dim // 2,)}
    output = contract.shapes if "d2t" in file.shapes else contract.optional
    output["output.weight"] = (num_drafted, hidden)
    if file.own("norm_before_fc"):
        contract.shapes["enc.output_norm.weight"] = (NUM_TAPS * wide,)
    if "d2t" in file.shapes:
        contract.optional["d2t"] = (num_drafted,)
        contract.problems += map_problems(file, vocab)
    contract.forbidden["t2d"] = "llama.cpp reads no such map"
    return contract


def feature_layers(file: GgufFile, contract: Contract) -> None:
    """The ids count the state that enters a layer: HF's hidden_states[i], as vLLM counts."""
    ids, key = file.own("target_layers"), "eagle3.target_layers"
    if not isinstance(ids, list) or len(ids) != NUM_TAPS or any(type(i) is not int for i in ids):
        contract.problems.append(f"{key}: expected {NUM_TAPS} layer numbers, found {ids!r}")
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
    """A draft model, or a target with its MTP modules: every block is there, and each module's own tensors."""
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
    contract.optional = dict(file.shapes)  # its architecture's own: the loader knows them
    vocab = file.lengths.get("tokenizer.ggml.tokens", 0)
    contract.shapes = {"token_embd.weight": (vocab, hidden)}
    if not count or any(name.startswith("blk.0.") for name in file.shapes):  # not modules alone, apart from the target
        contract.shapes["output_norm.weight"] = (hidden,)
        for i in range(num_blocks - count):
            there = any(name.startswith(f"blk.{i}.") for name in file.shapes)
            contract.report(not there, f"block {i}: no tensor of it, of {num_blocks - count} layers")
    for i in range(num_blocks - count, num_blocks):
        shapes = dict.fromkeys(MODULE, (hidden,)) | {"eh_proj": (hidden, 2 * hidden)}
        contract.shapes |= {f"blk.{i}.nextn.{name}.weight": shape for name, shape in shapes.items()}
    return contract


# by general.architecture; all others are whole language models. Of a new kind of head: a function and a line here
CONTRACTS: dict[str, Callable[[GgufFile], Contract]] = {"eagle3": eagle3}


def tokenizer(file: GgufFile, contract: Contract) -> None:
    """Drafter and target are compared by their tokens, so the file has the target's."""
    tokens, key = file.lengths.get("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens"
    contract.report(not tokens, f"{key}: missing; llama-server compares it with the target's")
    contract.report(not file.keys.get("tokenizer.ggml.model"), "tokenizer.ggml.model: missing")
    vocab = file.own("vocab_size")
    differs = bool(tokens) and vocab is not None and vocab != tokens
    contract.report(differs, f"{key}: {tokens} tokens, but {file.architecture}.vocab_size {vocab}")


def tensor_problems(file: GgufFile, contract: Contract) -> list[str]:
    """Tensors that are missing, of another shape or type, should not be there, or hold what no training gives."""
    problems = []
    for name, shape in contract.shapes.items():
        if name not in file.shapes:
            problems.append(f"tensor {name}: missing, expected {list(shape)}")
    for name, found in file.shapes.items():
        shape = contract.shapes.get(name, contract.optional.get(name)) if contract.shapes else found
        if shape is None:
            problems.append(f"tensor {name}: must not be there: {contract.forbidden.get(name, 'its graph has none')}")
        elif shape != found:
            turned = ": transposed" if found == shape[::-1] else ""
            problems.append(f"tensor {name}: expected {list(shape)}, found {list(found)}{turned}")
        if len(found) == 1 and file.kinds[name] not in ("F32", "I64"):
            problems.append(f"tensor {name}: of type {file.kinds[name]}, norms and biases are F32")
        is_ours = file.architecture == "eagle3" or ".nextn." in name  # of a whole model the head's part alone
        num_bad = int((~np.isfinite(file.values(name))).sum()) if is_ours and name != "d2t" else 0
        if num_bad:
            problems.append(f"tensor {name}: {num_bad} values are NaN or infinite")
    return problems


def differences(file: GgufFile, config: Mapping[str, Any]) -> list[str]:
    """Where a converted file is not the folder's head."""
    told = {"target_layers": FEATURE_IDS, "norm_before_residual": "norm_before_residual"}
    told |= {"norm_before_fc": "norm_before_fc", "vocab_size": "vocab_size"}
    problems = [
        f"eagle3.{key}: {file.own(key)}, but config.json has {name} {config[name]}"
        for key, name in told.items()
        if name in config and (file.own(key) or False) != config[name]
    ]
    num_drafted = file.shapes.get("d2t", (file.own("vocab_size"),))[0]
    if config.get("draft_vocab_size") not in (None, num_drafted):
        problems.append(f"tensor d2t: {num_drafted} draft tokens, but draft_vocab_size {config['draft_vocab_size']}")
    return problems
