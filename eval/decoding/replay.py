"""How the engine runs and times its steps of fixed shape: eagerly, compiled, or replayed as CUDA graphs."""

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import pairwise
from math import inf
from types import MethodType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ...base.errors import BadInput, first_line
from ...targets.cpu.joined_decoder import COMPILES_FROM, compiled_ahead

Tensors = tuple[Tensor | None, ...]
Step = Callable[..., Tensors]
P = ParamSpec("P")
R = TypeVar("R")

STEPS = ("eager", "graph", "compile")
WARM_UPS = 2  # runs before a capture, in which kernels are chosen and workspaces allocated
RECORDED_FROM = 128  # tokens of an answer: in fewer, recording is estimated to take longer than it saves


def default_steps(device: torch.device, *, num_tokens: float = inf) -> str:
    """`graph` on a GPU, `eager` elsewhere. Args: num_tokens: per answer, of an engine that decodes a single batch."""
    return "graph" if device.type == "cuda" and num_tokens >= RECORDED_FROM else "eager"


def check_steps(steps: str, device: torch.device) -> str:
    """`steps` itself. Raises BadInput if it is unknown or not supported on this device."""
    if steps not in STEPS:
        raise BadInput(f"steps {steps!r}: expected one of {', '.join(STEPS)}")
    if steps == "graph" and device.type != "cuda":
        raise BadInput(f"steps graph: a CUDA graph needs a GPU, and the target is on {device}; compile works here")
    if steps == "compile" and TorchVersion(torch.__version__) < COMPILES_FROM:
        raise BadInput(f"steps compile: needs torch {COMPILES_FROM}, this is {torch.__version__}")
    return steps


def current_gpu(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which a GPU is current, so that streams, events and graphs are created on it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_device(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorate a method of an object with a `target`: no gradients, and the target's GPU is current."""

    @wraps(method)
    def run(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), current_gpu(self.target.device):
            return method(self, *args, **kwargs)

    return run


class Replay:
    """Records steps under keys, and runs the recorded ones.

    A step takes and returns tensors, copies nothing to the host, and is idempotent: its other writes are repeated by
    the next run on the same arguments. So recording may run it several times.
    """

    def __init__(self, steps: str, device: torch.device, generator: torch.Generator | None = None):
        """Args: generator: the steps' source of randomness, registered with CUDA graphs. Raises as `check_steps`."""
        self.steps, self.device, self.generator = check_steps(steps, device), device, generator
        self.recorded: dict[Hashable, Step | None] = {}  # None: it could not be recorded, so it runs eagerly
        self.has_warned = False

    def has(self, key: Hashable) -> bool:
        """Whether a step of that key would run without being recorded first."""
        return self.steps == "eager" or key in self.recorded

    def __call__(self, key: Hashable, step: Step, *arguments: Tensor | None) -> Tensors:
        """Run a step. key: identifies all that the step depends on except the tensors' values, shapes included.

        Results may be overwritten by the next run under the same key. A step that cannot be recorded runs eagerly, with
        one warning. Raises: torch.OutOfMemoryError if recording runs out of memory.
        """
        if self.steps == "eager":
            return step(*arguments)
        with current_gpu(self.device):
            if key not in self.recorded:
                self.recorded[key] = self._record(step, arguments)
            return (self.recorded[key] or step)(*arguments)

    def _record(self, step: Step, arguments: Tensors) -> Step | None:
        try:
            step = weakly(step) if isinstance(step, MethodType) else step
            recorded = compiled(step, arguments) if self.steps == "compile" else step
            return Graph(recorded, arguments, self) if self.device.type == "cuda" else recorded
        except BadInput:
            raise
        except Exception as error:  # dynamo, inductor, the C++ compiler and CUDA each raise their own
            if lack := lack_of_memory(error):
                raise torch.OutOfMemoryError(lack) from error
            if not self.has_warned:
                why = f"steps {self.steps}: this target or drafter cannot be recorded ({first_line(error)})"
                warnings.warn(f"{why}: it decodes with eager steps, and slower", stacklevel=4)
            self.has_warned = True
            return None


def weakly(step: MethodType) -> Step:
    """The method with only a weak reference to its object, which refers to what is recorded: a strong one would be a
    cycle that delays freeing memory."""
    owner, function = weakref.ref(step.__self__), step.__func__
    return lambda *tensors: function(owner(), *tensors)


def lack_of_memory(error: BaseException | None) -> str:
    """The out-of-memory message in an exception's chain; empty if there is none. Ending the capture of a CUDA graph may
    raise another error on top of the allocator's."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error):
            return first_line(error)
        error = error.__cause__ or error.__context__
    return ""


def compiled(step: Step, arguments: Tensors, *, backend: str = "inductor") -> Step:
    """The step compiled whole for exactly these shapes, without guards, as each key has only one shape."""

    def whole(*tensors: Tensor | None) -> Tensors:  # a bound method loses its object in aot_compile
        return step(*tensors)

    recorded = compiled_ahead(whole, arguments, backend=backend)
    gc.collect()  # frees dynamo's tracing state, whose cycles hold all tensors that it saw
    return recorded


class Graph:
    """A step as one CUDA graph: a single launch per run, instead of one per kernel."""

    def __init__(self, step: Step, arguments: Tensors, replay: Replay):
        self.inputs = [None if argument is None else argument.clone() for argument in arguments]
        stream, current = torch.cuda.Stream(replay.device), torch.cuda.current_stream(replay.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step(*self.inputs)
        current.wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        if replay.generator is not None:
            self.graph.register_generator_state(replay.generator)
        with torch.cuda.graph(self.graph, stream=stream):  # the default stream would be the first device's
            self.outputs = step(*self.inputs)

    def __call__(self, *arguments: Tensor | None) -> Tensors:
        for own, given in zip(self.inputs, arguments, strict=True):
            if own is not None and given is not None and own is not given:
                own.copy_(given)
        self.graph.replay()
        return self.outputs


def to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor of values that the host has; a GPU copies them behind its work, and the host does not wait for it."""
    is_gpu = device.type == "cuda"
    return torch.tensor(values, pin_memory=is_gpu).to(device, non_blocking=is_gpu)


class HostCopy:
    """A tensor on its way to the host: a GPU copies it behind what it was given before."""

    def __init__(self, tensor: Tensor):
        self.values, self.copied = tensor.to("cpu", non_blocking=tensor.is_cuda), None
        if tensor.is_cuda:
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> list[Any]:
        """The values, once they are here."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.values.tolist()


class Stopwatch:
    """Measures device time between points in its stream; reads events only when the device has been waited for."""

    def __init__(self, device: torch.device):
        self.device = device

    def now(self) -> float:
        """Seconds, after waiting for all work on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def mark(self) -> Any:
        """A point in the device's stream."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, *marks: Any) -> list[float]:
        """Seconds from each mark to the next, after waiting for the last."""
        if self.device.type != "cuda":
            return [after - before for before, after in pairwise(marks)]
        marks[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]
