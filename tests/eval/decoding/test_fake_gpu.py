"""What a GPU would do wrong, seen on a CPU: the current device, failed captures, memory that stays, unread chunks."""

import gc
import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafted import untrained
from headstart.eval.decoding import replay
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import Stopwatch, decode, generate
from headstart.eval.decoding.replay import Replay
from headstart.eval.decoding.stopping import Stop
from headstart.eval.measurement.measure import measure
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.suites.prompts import Suite
from headstart.heads.drafting.trees import DynamicTree
from headstart.targets.target import Target
from perturbing import perturb

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]
TREES = {"chain": None, "tree": DynamicTree(num_nodes=4, depth=2, top_k=2)}


class FakeCuda:
    """The parts of torch.cuda that steps use; every stream, event and graph tells the device that it is of."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.current, self.used, self.default_capture_stream = 0, [], None
        for name in ("device", "stream", "graph"):
            patch.setattr(torch.cuda, name, contextmanager(getattr(self, name)))
        for name in ("Stream", "CUDAGraph", "Event", "current_stream"):
            patch.setattr(torch.cuda, name, getattr(self, name))

    def device(self, device: torch.device) -> Any:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def Stream(self, device: torch.device | None = None) -> Any:  # noqa: N802
        index = self.current if device is None else device.index
        return SimpleNamespace(device=index, wait_stream=lambda other: self.used.append(other.device))

    current_stream = Stream

    def stream(self, stream: Any) -> Any:
        self.used.append(stream.device)
        yield

    def graph(self, graph: Any, stream: Any = None) -> Any:
        """Where no stream is named, torch takes one for all devices, made on the first that captures."""
        self.default_capture_stream = self.default_capture_stream or self.Stream(torch.device("cuda:0"))
        self.used += [self.current, (stream or self.default_capture_stream).device]
        yield

    def CUDAGraph(self) -> Any:  # noqa: N802
        return SimpleNamespace(replay=lambda: self.used.append(self.current))

    def Event(self, enable_timing: bool = False) -> Any:  # noqa: N802
        return SimpleNamespace(record=lambda stream=None: self.used.append((stream or self.current_stream()).device))


def test_streams_graphs_and_events_are_of_the_targets_device(monkeypatch):
    """And not of the current one, which is cuda:0 unless a program says otherwise."""
    cuda, device = FakeCuda(monkeypatch), torch.device("cuda:1")
    steps = Replay("graph", device)
    for _ in range(2):
        steps("double", lambda x: (x * 2,), torch.ones(2))
    Stopwatch(device).mark()
    assert len(cuda.used) > 6 and set(cuda.used) == {1}
    assert cuda.current == 0, "and the caller's device is as it was"


def test_all_of_decoding_runs_with_the_targets_device_as_the_current_one(target, monkeypatch):
    depth, within = [0], []

    @contextmanager
    def entered(device: torch.device) -> Any:
        assert device == target.device
        depth[0] += 1
        yield
        depth[0] -= 1

    monkeypatch.setattr(replay, "current_gpu", entered)
    forward = target.forward

    def watched(*arguments: Any, **how: Any) -> Any:
        within.append(depth[0])
        return forward(*arguments, **how)

    monkeypatch.setattr(target, "forward", watched)
    generate(target, untrained("eagle3", target), PROMPTS, max_new_tokens=6)
    assert within and all(within)


# Captures that fail


def failing(error: BaseException, *, times: int = 1000) -> Any:
    left = [times]

    def record(step: Any, arguments: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise type(error)(*error.args)  # a new one, of which nobody keeps the traceback
        return step

    return record


def test_out_of_memory_in_a_recording_fails_one_batch(target, monkeypatch):
    """As it does anywhere else: the others are measured, each in an engine that is made anew."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    monkeypatch.setattr(replay, "compiled", failing(error, times=1))
    config = MeasureConfig(setting=chain(3), max_new_tokens=8, steps="compile")
    entry, _ = measure(target, untrained("eagle3", target), Suite("four", PROMPTS), config, name="eagle3")
    assert [one.prompt for one in entry.failed] == [0] and entry.num_prompts == 3
    assert "out of memory" in entry.failed[0].reason


def test_out_of_memory_that_a_broken_capture_hides_is_seen(monkeypatch):
    """The end of a capture raises an error of its own while that of the allocator is on its way."""

    def record(step: Any, arguments: Any) -> Any:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(replay, "compiled", record)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2 GiB"):
        Replay("compile", torch.device("cpu"))("key", lambda x: (x,), torch.ones(1))


def test_what_cannot_be_recorded_runs_eagerly_and_says_so(target, monkeypatch):
    head = untrained("eagle3", target)
    wanted = generate(target, head, PROMPTS, max_new_tokens=20, eos_token_ids=[]).token_ids
    monkeypatch.setattr(replay, "compiled", failing(RuntimeError("operation not permitted when stream is capturing")))
    engine = Engine(target, head, batch_size=4, max_length=28, steps="compile")
    with pytest.warns(UserWarning, match="steps compile: .*not permitted when stream is capturing.* eager") as lines:
        found = decode(engine, PROMPTS, max_new_tokens=20, stop=Stop.of(target, eos_token_ids=[]))
    assert found.token_ids == wanted
    assert len(lines) == 1, "once, and not for every step and length"


# Memory


@pytest.fixture
def no_collection() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.fast_only(head_type=["eagle3"], steps=["compile"])
@pytest.mark.parametrize(
    ("head_type", "steps", "tree"),
    [
        ("block", "eager", "chain"),
        ("eagle3", "compile", "tree"),
        ("eagle3", "traced", "chain"),
        ("medusa", "compile", "chain"),
        ("mtp", "eager", "tree"),
    ],
)
def test_keys_and_values_go_with_their_engine(steps, tree, head_type, target, monkeypatch, no_collection):
    """At once, and not when a collection comes by: the next engine needs the memory."""
    traced = partial(replay.compiled, backend="eager")
    record = traced if steps == "traced" else lambda step, arguments: lambda *now: step(*now)
    monkeypatch.setattr(replay, "compiled", record)
    how = {"tree": TREES[tree], "steps": "eager" if steps == "eager" else "compile"}
    engine = Engine(target, untrained(head_type, target), batch_size=4, max_length=24, **how)
    decode(engine, PROMPTS, max_new_tokens=8, stop=Stop.of(target))
    kept = [weakref.ref(tensor) for layer in engine.cache.layers for tensor in (layer.keys, layer.values)]
    kept += [weakref.ref(engine.cache), weakref.ref(engine)]
    assert all(one() is not None for one in kept)
    del engine
    assert not any(one() is not None for one in kept)


def test_an_engine_whose_recording_failed_is_let_go(target, monkeypatch, no_collection):
    monkeypatch.setattr(replay, "compiled", failing(torch.OutOfMemoryError("CUDA out of memory.")))
    engine = Engine(target, None, batch_size=4, max_length=24, steps="compile")
    kept = weakref.ref(engine)
    with pytest.raises(torch.OutOfMemoryError):
        decode(engine, PROMPTS, max_new_tokens=8, stop=Stop.of(target))
    del engine
    assert kept() is None


# Prompts in chunks


@pytest.mark.fast_only(head_type=["eagle3"])
def test_drafters_read_long_prompts_in_chunks_as_at_once(head_type, target, monkeypatch):
    """What they draft is the same, and no reading is wider than a chunk: so is no mask."""
    source = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 61, (length,), generator=source).tolist() for length in (37, 12, 5, 33, 1, 24)]
    head, widths = perturb(untrained(head_type, target), 0.02, seed=3), []
    how: dict[str, Any] = {"max_new_tokens": 16, "eos_token_ids": []}
    whole = generate(target, head, prompts, **how)
    commit = head.commit

    def watched(state: Any, read: Any) -> None:
        widths.append(read.tokens.shape[1])
        commit(state, read)

    monkeypatch.setattr(head, "commit", watched)
    monkeypatch.setattr(Target, "prompt_chunk", 12)
    parts = generate(target, head, prompts, **how)
    assert parts.token_ids == whole.token_ids
    assert [one.num_accepted for one in parts.rounds] == [one.num_accepted for one in whole.rounds]
    assert max(widths) == 12
