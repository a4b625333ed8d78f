"""How the engine runs its steps of fixed shape (as they are, compiled, or replayed as CUDA graphs), and times them."""

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
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from ..configs.errors import BadInput, first_line
from ..heads.drafter import Reading
from ..heads.drafting import worth_verifying
from .sampling import choose
from .verify import AcceptedPath, AcceptRule, Candidates, exact

Tensors = tuple[Tensor | None, ...]
Step = Callable[..., Tensors]
P = ParamSpec("P")
R = TypeVar("R")

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


def current_gpu(device: torch.device) -> AbstractContextManager[Any]:
    """Within, a GPU is the current one: streams, events and graphs are made on that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_device(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of something with a `target`: without gradients, and with the target's GPU as the current one."""

    @wraps(method)
    def run(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), current_gpu(self.target.device):
            return method(self, *args, **kwargs)

    return run


class Replay:
    """Records steps under keys, and runs the recorded ones.

    A step takes and returns tensors, reads nothing to the host, and may be run again on the same arguments without
    harm: what it writes besides its results, a later run writes again. So recording may run it as often as it likes.
    """

    def __init__(self, steps: str, device: torch.device, generator: torch.Generator | None = None):
        """Args: generator: what steps draw from; CUDA graphs must know it."""
        self.steps, self.device, self.generator = check_steps(steps, device), device, generator
        self.recorded: dict[Hashable, Step | None] = {}  # None: it could not be recorded, and runs as it is
        self.has_warned = False

    def has(self, key: Hashable) -> bool:
        """Whether a step of that key would run without being recorded first."""
        return self.steps == "eager" or key in self.recorded

    def __call__(self, key: Hashable, step: Step, *arguments: Tensor | None) -> Tensors:
        """Run a step. key: of everything but the tensors' values that the step depends on, shapes included.

        Results may be overwritten by the next run under the same key. A step that cannot be recorded runs eagerly, and
        one line says so. Raises torch.OutOfMemoryError where memory is what recording lacks.
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
    """A method without a hold on its object: that holds what is recorded, and would not go before a collection."""
    owner, function = weakref.ref(step.__self__), step.__func__
    return lambda *tensors: function(owner(), *tensors)


def lack_of_memory(error: BaseException | None) -> str:
    """What an allocator said that is behind an exception; empty where none is. The end of a CUDA graph's capture raises
    an error of its own while the allocator's is on its way."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error):
            return first_line(error)
        error = error.__cause__ or error.__context__
    return ""


def compiled(step: Step, arguments: Tensors, *, backend: str = "inductor") -> Step:
    """The step compiled whole for exactly these shapes, without guards: a key has one shape and one state."""

    def whole(*tensors: Tensor | None) -> Tensors:  # a bound method loses its object in aot_compile
        return step(*tensors)

    options: Any = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    before_2_13: Any = torch._dynamo.config.patch(enable_aot_compile=True)  # pyright: ignore[reportAttributeAccessIssue]
    with warnings.catch_warnings(), before_2_13:
        warnings.simplefilter("ignore")  # dynamo's, of caches in transformers that it looks through
        ahead: Any = torch.compile(whole, fullgraph=True, dynamic=False, options=options, backend=backend)
        recorded = ahead.aot_compile((arguments, {}))
    gc.collect()  # dynamo's own state of the tracing, circles which hold all that it saw
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
        with torch.cuda.graph(self.graph, stream=stream):  # unnamed, it is one for all devices, of the first's
            self.outputs = step(*self.inputs)

    def __call__(self, *arguments: Tensor | None) -> Tensors:
        for own, given in zip(self.inputs, arguments, strict=True):
            if own is not None and given is not None and own is not given:
                own.copy_(given)
        self.graph.replay()
        return self.outputs


class Widths:
    """How many drafts of each row a round verifies, and how wide its forward is: as wide as its widest row.

    Eager steps have any width. Recorded ones read 1, 2, 4, ... tokens, as each width is recorded by itself, and give
    results of one width, as drafting is recorded for one.
    """

    def __init__(self, num_drafted: int, cost: float | None, steps: str):
        """Args: cost: of verifying one more token, as `worth_verifying` takes it; None: all are verified."""
        if cost is not None and not 0 <= cost < inf:
            raise BadInput(f"verify_cost {cost}: expected 0 or more")
        self.num_drafted, self.cost, self.steps = num_drafted, cost, steps
        few = [(1 << i) - 1 for i in range(num_drafted.bit_length())]
        less = [] if cost is None else range(num_drafted) if steps == "eager" else few
        self.known = [*less, num_drafted] if num_drafted not in less else list(less)

    def offered(self, confidence: Tensor | None, read: Reading | None, num_rows: int) -> list[int]:
        """Drafts to verify of each row: where verifying has a cost, those that pay, and none of a row that has ended.

        Args: confidence: [B, K] of a Proposal. read: what the drafter read before it.
        """
        if self.cost is None or confidence is None:
            return [self.num_drafted] * num_rows
        worth = worth_verifying(confidence, self.cost)
        return (worth if read is None else worth * (read.num_valid > 0).to(worth.device)).tolist()

    def of(self, num_offered: Sequence[int]) -> int:
        """Drafts that a forward reads where so many of each row are verified."""
        return next(width for width in self.known if width >= max(num_offered))

    def accepted(self, rule: AcceptRule, drafted: Candidates) -> AcceptedPath:
        """At most what is offered is accepted; behind it nothing was tried, so the target's own choice follows."""
        accepted, offered, history = rule.function(drafted), drafted.offered, drafted.history
        if offered is None or (drafted.is_chain and drafted.draft_probs is None and rule.function is exact):
            return accepted
        rows = torch.arange(len(offered), device=offered.device)
        history = None if history is None else history[rows, offered][:, None]
        logits = drafted.logits[rows, offered][:, None]  # [B, 1, V]
        own = choose(logits, drafted.sampling, history=history, generator=drafted.generator)
        bonus = torch.where(accepted.num_accepted >= offered, own[:, 0], accepted.bonus)
        return AcceptedPath(torch.minimum(accepted.num_accepted, offered), accepted.path, bonus)

    def filled(self, result: Tensor) -> Tensor:
        """[B, width + 1, ...] to the full width where steps are recorded, with zeros."""
        if self.cost is None or self.steps == "eager":
            return result
        return F.pad(result, (0, 0) * (result.ndim - 2) + (0, self.num_drafted + 1 - result.shape[1]))


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
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, *marks: Any) -> list[float]:
        """Seconds from each mark to the next, all of them passed."""
        if self.device.type != "cuda":
            return [after - before for before, after in pairwise(marks)]
        marks[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]
