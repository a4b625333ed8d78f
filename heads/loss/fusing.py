"""Functions of a few operations on large tensors, which torch.compile fuses into one pass if a run enables it.

They read and return plain tensors, record no gradients and hold no weights, so that they do not depend on what wraps
the head (DDP, ZeRO, FSDP), and one compilation serves all sizes.
"""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from typing import Generic, ParamSpec, TypeVar

import torch
from torch.fx.experimental import _config as shapes
from torch.utils._python_dispatch import _disable_current_modes

from ...base.errors import BadInput, first_line

P = ParamSpec("P")
R = TypeVar("R")


class Fusable(Generic[P, R]):
    """A function that runs as written or, after `fuse`, compiled.

    Compiled calls run outside of dispatch modes (counters of operations or storages), so that a counted step computes
    the same bits as any other. They contain no matrix products, so FLOP counts do not miss any.
    """

    is_fused = False  # for all functions in this process

    def __init__(self, function: Callable[P, R]):
        self.function = function
        update_wrapper(self, function)

    @cached_property
    def compiled(self) -> Callable[P, R]:
        return torch.compile(self.function, dynamic=True)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not Fusable.is_fused:
            return self.function(*args, **kwargs)
        # one compilation for all sizes, also if two sizes happen to be equal in the first call
        with _disable_current_modes(), shapes.patch(use_duck_shape=False):  # pyright: ignore
            return self.compiled(*args, **kwargs)


def fuse(is_fused: bool, device: torch.device | None = None) -> None:
    """Set whether all `Fusable` functions run compiled from now on.

    Args: device: compile a small function for this device first, as a trial.
    Raises: BadInput if the trial fails: torch.compile needs a C++ compiler on a CPU, Triton on a GPU.
    """
    if is_fused and device is not None:
        try:
            torch.compile(lambda x: x.sin() + 1, fullgraph=True)(torch.ones(8, device=device))
        except Exception as error:  # compilers and their loaders raise exceptions of many kinds
            raise BadInput(f"train.compile: torch.compile does not work on {device}: {first_line(error)}") from error
    Fusable.is_fused = is_fused
