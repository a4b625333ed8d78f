"""vLLM (0.32; 0.33 was only read): how it calls the ways of drafting, what it is told of a head, and words in a path
that mislead it."""

import json
from pathlib import Path
from shlex import quote
from typing import Any

from .layouts.serving import EngineSupport, HeadFolder

METHODS = {
    "medusa": "medusa",  # up to 0.32
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "assistant": "mtp",
    "draft_lm": "draft_model",
    "dflash": "dflash",
    "dspark": "dspark",
}
# by family, words in a path by which vLLM takes a head for one of that family, where it is told no such method
PATH_WORDS = {"eagle": ("eagle-",), "eagle3": ("eagle3",), "block": ("dflash", "dspark")}


def command(head: HeadFolder, folder: str, *, target: str, to: str) -> str:
    """The command that serves an exported head. A folder of the speculators layout names its target itself."""
    if to == "speculators":
        return f"vllm serve {quote(folder)}"
    told: dict[str, Any] = {"method": METHODS[head.method], "model": folder, "num_speculative_tokens": head.num_drafted}
    if head.is_module:
        target = told.pop("model")
    if head.is_parallel:
        told["parallel_drafting"] = True
    return f"vllm serve {quote(target)} --speculative-config {quote(json.dumps(told, separators=(',', ':')))}"


# its runner for CPUs has no DSpark, whose heads become DFlash's
VLLM = EngineSupport(
    METHODS, command, layouts=("plain", "speculators"), keys_on_cpu={"markov_rank": 0, "sample_from_anchor": False}
)


def switching_word(where: str | Path, family: str) -> str | None:
    """The word in a path or hub id that makes vLLM take its head for another method; None: there is none.

    A path never overrides a method that vLLM is told and that such words are of, so for its families only the last part
    of the path counts.
    """
    allowed = PATH_WORDS.get(family, ())
    text = Path(where).name.lower() if allowed else str(where).lower()
    return next((word for some in PATH_WORDS.values() for word in some if word in text and word not in allowed), None)
