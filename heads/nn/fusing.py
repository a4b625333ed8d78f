"""Functions of few operations over large tensors, whose passes torch.compile makes one where a run asks for it.

What is compiled reads and returns plain tensors, records no gradient and holds no weights: it is the same whatever
wraps the head (DDP, ZeRO, FSDP), and one compilation serves all sizes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, update_wrapper
from typing import Generic, ParamSpec, TypeVar

import torch
from torch.fx.experimental import _config as shapes
from torch.utils._python_dispatch import _disable_current_modes

from ...configs.errors import BadInput, first_line

P = ParamSpec("P")
R = TypeVar("R")


class Fusable(Generic[P, R]):
    """A function that runs as written or, where `fuse` said so for this process, as torch.compile makes it.

    Compiled, it is not seen by what counts operations or storages: it has no matrix products, and a step that is
    counted computes the same bits as any other.
    """

    is_fused = False  # of all of them

    def __init__(self, function: Callable[P, R]):
        self.function = function
        update_wrapper(self, function)

    @cached_property
    def compiled(self) -> Callable[P, R]:
        return torch.compile(self.function, dynamic=True)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not Fusable.is_fused:
            return self.function(*args, **kwargs)
        # one compilation for all sizes, also where two happen to be equal the first time
        with _disable_current_modes(), shapes.patch(use_duck_shape=False):  # pyright: ignore
            return self.compiled(*args, **kwargs)


def fuse(is_fused: bool, device: torch.device | None = None) -> None:
    """How all `Fusable` functions run from now on.

    Args: device: where; given, a first small compilation shows that it works there.
    Raises: BadInput where it does not: torch.compile needs a C++ compiler on a CPU, Triton on a GPU.
    """
    if is_fused and device is not None:
        try:
            torch.compile(lambda x: x.sin() + 1, fullgraph=True)(torch.ones(8, device=device))
        except Exception as error:  # whatever compilers and their loaders raise
            raise BadInput(f"train.compile: torch.compile does not work on {device}: {first_line(error)}") from error
    Fusable.is_fused = is_fused


@contextmanager
def fused(is_fused: bool) -> Iterator[None]:
    """`fuse` for the time of a context."""
    before = Fusable.is_fused
    fuse(is_fused)
    try:
        yield
    finally:
        fuse(before)
