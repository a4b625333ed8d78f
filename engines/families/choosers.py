"""What DFlash2 and LiLiCorr add to a block drafter's folder: keys of `dflash_config`, and tensors with their sizes.

Both have DFlash2's convolutions, LiLiCorr also without. DFlash2 chooses by a selector, LiLiCorr by a lattice.
"""

from collections.abc import Mapping
from typing import Any

from ...heads.nn.dflash2 import NUM_TAPS
from ...heads.nn.lilicorr import LILICORR_KEYS, NUM_FIGURES
from ..layouts.contracts import Contract
from ..layouts.tensors import Part

CONV_KEYS = ("conv_kernel_size", "conv_group_size")
DFLASH2_KEYS = (*CONV_KEYS, "selector_rank", "selector_top_k")
WIDTHS = (1, 2, 4, 8, 16)  # candidates of a slot that engines have kernels for
PREDECESSORS = "candidate_selector.predecessor_codebook"
SELECTOR = [
    Part(PREDECESSORS, "vocab chosen", when="dflash2"),
    Part("candidate_selector.successor_codebook", "vocab chosen", when="dflash2"),
    Part("candidate_selector.hidden_projection.weight", "chosen hidden", when="dflash2"),
]


def convolutions(number: int) -> list[Part]:
    """Those of a layer. Sizes by name: `taps`, `kernels`."""
    parts = []
    for conv in (f"layers.{number}.attention_conv", f"layers.{number}.mlp_conv"):
        parts.append(Part(f"{conv}.base_kernel", "2 taps hidden", when="convolutions"))
        parts.append(Part(f"{conv}.kernel_projection.weight", "kernels hidden", when="convolutions"))
    return parts


def lattice(num_layers: int) -> list[Part]:
    """Sizes by name: `lattice` of the layers, `triple` of that, `fed` of their MLPs, `chosen` of vectors."""
    linears = {  # name: rows, columns
        "pass_hidden_proj": "lattice hidden",
        "feature_mlp.up_proj": f"lattice {NUM_FIGURES}",
        "feature_mlp.down_proj": "lattice lattice",
        "context_proj": "lattice hidden",
        "factor_input_proj": "lattice triple",
        **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), "chosen lattice"),
    }
    others = {
        **dict.fromkeys(("feature_norm.weight", "feature_norm.bias"), str(NUM_FIGURES)),
        "slot_embedding": "1 1 slots 1 lattice",
        "rank_embedding": "1 1 1 candidates lattice",
        "relative_slot_bias": "lattice_heads distances",
        "same_slot_bias": "lattice_heads",
        **dict.fromkeys(("output_norm.weight", "anchor_norm.weight"), "lattice"),
    }
    for i in range(num_layers):
        linears |= {f"layers.{i}.mlp.up_proj": "fed lattice", f"layers.{i}.mlp.down_proj": "lattice fed"}
        linears[f"layers.{i}.attn.out_proj"] = "lattice lattice"
        others |= {f"layers.{i}.attn.in_proj_weight": "triple lattice", f"layers.{i}.attn.in_proj_bias": "triple"}
        others |= dict.fromkeys((f"layers.{i}.attn_norm.weight", f"layers.{i}.mlp_norm.weight"), "lattice")
    for name, shape in linears.items():
        others |= {f"{name}.weight": shape, f"{name}.bias": shape.split()[0]}
    narrow = {"token_proj.weight": "lattice hidden", "token_proj.bias": "lattice"}  # where embeddings are not as wide
    return [
        Part(f"lilicorr.{name}", shape, when=when)
        for when, parts in (("lattice", others), ("narrow lattice", narrow))
        for name, shape in parts.items()
    ]


def sizes_of(config: Mapping[str, Any], hidden: int) -> dict[str, int]:
    """The sizes that the parts name, by keys that were checked; those of what a head does not have may be missing."""
    sizes = {"taps": NUM_TAPS, "chosen": config.get("selector_rank") or config.get("lilicorr_factor_dim") or 0}
    if group := config.get("conv_group_size"):
        sizes["kernels"] = 2 * NUM_TAPS * hidden // group
    if config.get("lilicorr_num_layers"):
        size, slots = config["lilicorr_hidden_size"] or hidden, config["block_size"] - 1
        sizes |= {"lattice": size, "triple": 3 * size, "fed": int(size * config["lilicorr_mlp_ratio"])}
        sizes |= {"slots": slots, "distances": 2 * slots + 1, "candidates": config["lilicorr_candidate_topk"]}
        sizes["lattice_heads"] = config["lilicorr_num_heads"]
    return sizes


def check_keys(config: Mapping[str, Any], contract: Contract, *, is_dflash2: bool, hidden: int) -> None:
    """Report wrong keys of what chooses, and of the convolutions."""
    has_convolutions = is_dflash2 or any(config.get(key) for key in CONV_KEYS)
    for key in DFLASH2_KEYS if is_dflash2 else CONV_KEYS if has_convolutions else ():
        count, name = config.get(key), f"dflash_config.{key}"
        if type(count) is not int or count < 1:
            kind = "DFlash2" if is_dflash2 else "convolutions"
            contract.problems.append(f"{name}: expected a count, found {count!r}: engines load no {kind} without")
        elif key == "conv_kernel_size":
            contract.report(count != NUM_TAPS, f"{name}: {count}, expected {NUM_TAPS}")
        elif key == "conv_group_size":
            contract.report(hidden % count != 0, f"{name}: {count} does not divide hidden_size {hidden}")
    if is_dflash2:
        return
    for key, (_, kind) in LILICORR_KEYS.items():
        value, least = config.get(key), 0 if key == "lilicorr_hidden_size" else 1e-12
        kinds = (int,) if kind is int else (int, float)
        is_wrong = isinstance(value, bool) or not isinstance(value, kinds) or value < least
        known = f"dflash_config.{key}: expected {'a count' if kind is int else 'a number above 0'}, found {value!r}"
        contract.report(is_wrong, f"{known}: engines load no LiLiCorr without")
    if contract.problems:
        return
    top_k, size = config["lilicorr_candidate_topk"], config["lilicorr_hidden_size"] or hidden
    contract.report(top_k not in WIDTHS, f"dflash_config.lilicorr_candidate_topk: {top_k}, expected one of {WIDTHS}")
    heads = config["lilicorr_num_heads"]
    contract.report(size % heads != 0, f"dflash_config.lilicorr_num_heads: {heads} does not divide {size}")
    eps = config.get("lilicorr_vector_eps")
    contract.report(not isinstance(eps, float), f"dflash_config.lilicorr_vector_eps: {eps!r}, expected a number")
