"""How the engine runs its steps of fixed shape (as they are, compiled, or replayed as CUDA graphs), and times them."""

import time
import warnings
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..configs.errors import BadInput, first_line

Tensors = tuple[Tensor | None, ...]
Step = Callable[..., Tensors]

STEPS = ("eager", "graph", "compile")
COMPILES_FROM = "2.11"  # earlier torch cannot trace the steps
WARM_UPS = 2  # runs before a capture, in which kernels are chosen and workspaces made


def check_steps(steps: str, device: torch.device) -> str:
    """The word itself. Raises BadInput on one that is not known, or does not work on this device."""
    if steps not in STEPS:
        raise BadInput(f"steps {steps!r}: expected one of {', '.join(STEPS)}")
    if steps == "graph" and device.type != "cuda":
        raise BadInput(f"steps graph: a CUDA graph needs a GPU, and the target is on {device}; compile works here")
    if steps == "compile" and TorchVersion(torch.__version__) < COMPILES_FROM:
        raise BadInput(f"steps compile: needs torch {COMPILES_FROM}, this is {torch.__version__}")
    return steps


class Replay:
    """Records steps under keys, and runs the recorded ones.

    A step takes and returns tensors, reads nothing to the host, and may be run again on the same arguments without
    harm: what it writes besides its results, a later run writes again. So recording may run it as often as it likes.
    """

    def __init__(self, steps: str, device: torch.device, generator: torch.Generator | None = None):
        """Args: generator: what steps draw from; CUDA graphs must know it."""
        self.steps, self.device, self.generator = check_steps(steps, device), device, generator
        self.recorded: dict[Hashable, Step] = {}

    def has(self, key: Hashable) -> bool:
        """Whether a step of that key would run without being recorded first."""
        return self.steps == "eager" or key in self.recorded

    def __call__(self, key: Hashable, step: Step, *arguments: Tensor | None) -> Tensors:
        """Run a step. key: of everything but the tensors' values that the step depends on, shapes included.

        Results may be overwritten by the next run under the same key. Raises BadInput where a step cannot be recorded.
        """
        if self.steps == "eager":
            return step(*arguments)
        if key not in self.recorded:
            try:
                recorded = compiled(step, arguments) if self.steps == "compile" else step
                on_gpu = self.device.type == "cuda"
                self.recorded[key] = Graph(recorded, arguments, self.generator) if on_gpu else recorded
            except BadInput:
                raise
            except Exception as error:  # dynamo, inductor, the C++ compiler and CUDA each raise their own
                raise BadInput(
                    f"steps {self.steps}: this target or drafter cannot be recorded ({first_line(error)}); eager works"
                ) from error
        return self.recorded[key](*arguments)


def compiled(step: Step, arguments: Tensors, *, backend: str = "inductor") -> Step:
    """The step compiled whole for exactly these shapes, without guards: a key has one shape and one state."""

    def whole(*tensors: Tensor | None) -> Tensors:  # a bound method loses its object in aot_compile
        return step(*tensors)

    options: Any = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    before_2_13: Any = torch._dynamo.config.patch(enable_aot_compile=True)  # pyright: ignore[reportAttributeAccessIssue]
    with warnings.catch_warnings(), before_2_13:
        warnings.simplefilter("ignore")  # dynamo's, of caches in transformers that it looks through
        ahead: Any = torch.compile(whole, fullgraph=True, dynamic=False, options=options, backend=backend)
        return ahead.aot_compile((arguments, {}))


class Graph:
    """A step as one CUDA graph: a single launch per run, instead of one per kernel."""

    def __init__(self, step: Step, arguments: Tensors, generator: torch.Generator | None):
        self.inputs = [None if argument is None else argument.clone() for argument in arguments]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        if generator is not None:
            self.graph.register_generator_state(generator)
        with torch.cuda.graph(self.graph):
            self.outputs = step(*self.inputs)

    def __call__(self, *arguments: Tensor | None) -> Tensors:
        for own, given in zip(self.inputs, arguments, strict=True):
            if own is not None and given is not None and own is not given:
                own.copy_(given)
        self.graph.replay()
        return self.outputs


class Stopwatch:
    """Time on the device between points in its stream, read when it has been waited for anyway."""

    def __init__(self, device: torch.device):
        self.device = device

    def now(self) -> float:
        """Seconds, after all that the device was given is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def mark(self) -> Any:
        """A point in the device's stream."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, *marks: Any) -> list[float]:
        """Seconds from each mark to the next, all of them passed."""
        if self.device.type != "cuda":
            return [after - before for before, after in pairwise(marks)]
        marks[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]
