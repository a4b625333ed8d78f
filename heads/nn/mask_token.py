"""The token whose embedding stands for what a block drafter has not drafted yet."""

from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ..target import Target

PLAIN = (0.2, 5.0)  # lengths of an embedding, in those of the median one, that are neither nearly zero nor huge


def default_mask_token(target: Target) -> int:
    """The tokenizer's mask token, else a row that no token uses, else padding or the end of a text; the first whose
    embedding is neither nearly zero nor huge."""
    candidates: list[int | None] = []
    if "/" in target.name or Path(target.name).is_dir():  # a tokenizer comes with it
        tokenizer: Any = target.tokenizer
        candidates = [tokenizer.mask_token_id, *range(len(tokenizer), target.vocab_size)]
    candidates += [getattr(target.config, "pad_token_id", None), *sorted(target.eos_token_ids)]
    usable = [i for i in [*candidates, *range(target.vocab_size)] if i is not None and 0 <= i < target.vocab_size]
    weight = cast(Tensor, target.input_embedding.weight)  # [V, D]
    if weight.device.type == "meta":
        return usable[0]
    norms = weight.detach().float().norm(dim=-1)
    typical = norms.median()
    is_plain = ((norms > PLAIN[0] * typical) & (norms < PLAIN[1] * typical)).tolist()
    return next(i for i in usable if is_plain[i])
