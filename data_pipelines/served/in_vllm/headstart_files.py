"""Files in which a server gives states: each is there whole, or not at all, and so is the reason why one is not.

Imports only what every environment with vLLM has, and nothing of headstart.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SUFFIX, FAILED = ".safetensors", ".failed"


def write(path: Path, token_ids: list[int], states: Callable[[], Tensor]) -> None:
    """Write a request's file; where that fails, one beside it, `path` with the suffix FAILED, that says why."""
    unfinished = path.with_name(f".{path.name}")
    try:
        save_file({"token_ids": torch.tensor(token_ids), "states": states().contiguous()}, unfinished)
        os.replace(unfinished, path)
    except Exception as error:
        unfinished.unlink(missing_ok=True)  # on a full disk this makes room for the reason
        unfinished.write_text(f"{type(error).__name__}: {error}")
        os.replace(unfinished, path.with_suffix(FAILED))
