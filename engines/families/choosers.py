"""What DFlash2 and LiLiCorr add to a block drafter's folder: keys of `dflash_config`.

Both have DFlash2's convolutions, LiLiCorr also without. DFlash2 chooses by a selector, LiLiCorr by a lattice.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...base.typed import TypedKeys
from ...heads.nn.dflash2 import NUM_TAPS
from ...heads.nn.lilicorr import LILICORR_KEYS
from ...targets.target import Target
from ..layouts.contracts import Contract
from ..layouts.foreign import same_tensor

CONV_KEYS = ("conv_kernel_size", "conv_group_size")
DFLASH2_KEYS = (*CONV_KEYS, "selector_rank", "selector_top_k")
ROUNDED = 1e-2  # how far a factor may be from the target's: some are rounded to 16 bits
WIDTHS = (1, 2, 4, 8, 16)  # candidates of a slot that engines have kernels for


def lattice_keys(read: Callable[[str, type], Any], hidden_size: int) -> dict[str, Any]:
    """The keys of a head's own config that say what its lattice is. Args: read: of `dflash_config`, a key of a type."""
    keys = {own: read(key, kind) for key, (own, kind) in LILICORR_KEYS.items()}
    return {**keys, "lattice_size": keys["lattice_size"] or hidden_size}


def check_embeddings(factor: float | None, contract: Contract, target: Target, *, table: Tensor | None) -> None:
    """Report if what vLLM's block drafters read is scaled otherwise than by the target's embedding module, which ours
    read.

    Args: factor: DFlash2's `input_embedding_scale`, if there. table: the folder's own; None: vLLM's read the target's
        bare one.
    """
    wanted = target.embedding_scale
    is_bare = table is None or same_tensor(table, target.input_embedding.get_parameter("weight").cpu())
    found = (1.0 if is_bare else wanted) * (1.0 if factor is None else factor)
    is_same = math.isclose(found, wanted, rel_tol=ROUNDED)
    contract.report(not is_same, f"embeddings times {found} in vLLM, in {target.name} times {wanted}")


def check_scales(config: TypedKeys, contract: Contract, target: Target, *, is_shared: bool) -> None:
    """Report keys by which vLLM's DFlash2 scales and caps logits otherwise than the target, which ours takes as it is.

    Args: config: `dflash_config`. is_shared: whether the head drafts by the target's output layer.
    """
    factor, cap = (target.logit_scale, target.logit_cap or 0.0) if is_shared else (1.0, 0.0)
    for key, wanted, default in (("output_multiplier", factor, 1.0), ("final_logit_softcapping", cap, 0.0)):
        given = config.read(key, float)
        found = default if given is None else given
        is_same = math.isclose(found, wanted, rel_tol=ROUNDED)
        contract.report(not is_same, f"dflash_config.{key} {found}: expected {wanted}, as {target.name} has it")


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
