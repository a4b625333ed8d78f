"""Rehearses rung 3's answers without a GPU: the host's work is timed here, the device's is a clock that is set forward.

    python -m headstart.benchmarks.gpu.rehearsal [docs/results/gpu/answers.json]

The file tells how long a step took on a GPU. What it shows is how much of the host's work the device waits for, and
what idle rows, readings and the queue's end cost, in shares of that device's time; none of it is a time on a GPU.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from ...eval.decoding import continuous, replay
from ...eval.decoding.replay import HostCopy, Replay, Stopwatch, Tensors
from ...targets.caches.cache import SlotCache
from ...targets.layers.target_output import TargetOutput
from ...targets.target import Target
from ..store import Figures, describe
from .answers import answered

MEASURED = Path(__file__).parents[2] / "docs/results/gpu/answers.json"
LAUNCH_SECONDS = 20e-6  # of the host, for a CUDA graph
TOKEN_FLOPS = 2 * 134.5e6  # of a token of SmolLM2-135M
DEVICE_FLOPS = 300e12  # per second in its products, which are small: estimated
SHARED, SHORTEST, LONGEST = 24, 68, 83  # tokens of the orders' prompts there, of which all begin with SHARED ones
ANSWERED = 48, 96  # tokens of answers


class RehearsedDevice:
    """A device's clock beside that of the host, whose work takes the time that this thread computes for it."""

    def __init__(self, step_seconds: float):
        self.step_seconds = step_seconds
        self.waited = self.skipped = 0.0  # seconds that the host waited; these less those left out
        self.free_at = 0.0  # when all that was launched is over
        self.seconds = defaultdict[str, float](
            float
        )  # of each kind of work; `waiting`: for the host, behind the first work

    def now(self) -> float:
        return time.thread_time() + self.skipped

    def wait(self, until: float) -> None:
        left = max(0.0, until - self.now())
        self.waited += left
        self.skipped += left

    def run(self, kind: str, seconds: float, step: Callable[[], Tensors]) -> Tensors:
        """Launch a step that takes the device so long, and the host as long as launching a graph."""
        before = self.now()
        result = step()
        self.skipped += LAUNCH_SECONDS - (self.now() - before)
        begins = max(self.free_at, self.now())
        self.seconds["waiting"] += begins - self.free_at if self.free_at else 0.0
        self.free_at = begins + seconds
        self.seconds[kind] += seconds
        return result

    def record(self, replay: Replay, step: Callable[..., Tensors], arguments: Tensors) -> Callable[..., Tensors]:
        """In place of `Replay._record`: a graph that copies its arguments, as a captured one does."""
        inputs = [None if argument is None else argument.clone() for argument in arguments]
        is_round = step.__name__ == "_verify"
        kind, seconds = ("rounds", self.step_seconds) if is_round else ("reading", self.reading_seconds(arguments[0]))

        def launch(*given: Tensor | None) -> Tensors:
            for own, new in zip(inputs, given, strict=True):
                if own is not None and new is not None:
                    own.copy_(new)
            return self.run(kind, seconds, lambda: step(*inputs))

        return launch

    def reading_seconds(self, tokens: Tensor | None) -> float:
        """A step's latency at least."""
        assert tokens is not None
        return max(self.step_seconds, tokens.numel() * TOKEN_FLOPS / DEVICE_FLOPS)

    @contextmanager
    def as_a_gpu(self, target: Target) -> Iterator[None]:
        """Decoding of this target as on a GPU, on this device."""
        with ExitStack() as stack:
            for owner, name, stand_in in (
                (target, "forward", counting_down),
                (target, "best", lambda states: states[..., 0].long()),
                (continuous, "launches_ahead", lambda device: True),
                (continuous, "most_read", lambda device, num_rows: max(1, num_rows // continuous.READ_TOGETHER)),
                (continuous, "default_steps", lambda device: "graph"),
                (replay, "check_steps", lambda steps, device: steps),
                (continuous, "HostCopy", partial(RehearsedCopy, self)),
                (Replay, "_record", self.record),
                (Stopwatch, "mark", lambda watch: max(self.free_at, self.now())),
            ):
                stack.enter_context(patch.object(owner, name, stand_in))
            yield


class RehearsedCopy(HostCopy):
    """One that is over when the device is done with what it was given before."""

    def __init__(self, device: RehearsedDevice, tensor: Tensor):
        super().__init__(tensor)
        self.device, self.over_at = device, device.free_at

    def tolist(self) -> list[Any]:
        self.device.wait(self.over_at)
        return super().tolist()


def counting_down(tokens: Tensor, *, cache: SlotCache, **how: Any) -> TargetOutput:
    """The states of a target that writes n - 1 behind each token n, and ends with 0; takes up no time of its own."""
    cache.layer(0, *[torch.zeros(len(tokens), 1, 0, 8)] * 2)
    states = (tokens - 1).clamp(min=0)[..., None].float().expand(-1, -1, 8)  # [B, T, D]
    return TargetOutput(states[:, :, None].expand(-1, -1, 0, -1), states)


def rehearsed(num_rows: int, num_prompts: int, step_seconds: float) -> tuple[RehearsedDevice, Figures]:
    """The device and the figures of a queue of prompts whose answers count down."""
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=128, eos_token_id=0, max_position_embeddings=512, **sizes)
    target = Target.of(AutoModelForCausalLM.from_config(config), name="counting down", fingerprint="")
    chance, device = random.Random(0), RehearsedDevice(step_seconds)
    prompts = [
        [100] * SHARED + chance.choices(range(1, 128), k=chance.randint(SHORTEST, LONGEST) - SHARED - 1) + [length]
        for length in (chance.randint(*ANSWERED) for _ in range(num_prompts))
    ]
    with device.as_a_gpu(target):
        done = answered(target, prompts, batch_size=num_rows, max_new_tokens=ANSWERED[1], now=device.now)
    assert done.answers == {str(i): list(range(prompt[-1]))[::-1] for i, prompt in enumerate(prompts)}
    parts = {f"share_{kind}": round(seconds / done.seconds, 4) for kind, seconds in sorted(device.seconds.items())}
    parts["host_ms_per_round"] = round(1000 * (done.seconds - device.waited) / len(done.rounds), 3)
    return device, {**done.figures(step_seconds), **parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measured", nargs="?", type=Path, default=MEASURED)
    torch.set_num_threads(1)
    for name, cell in json.loads(parser.parse_args().measured.read_text())["cells"].items():
        _, figures = rehearsed(cell["asked"]["batch_size"], cell["num_prompts"], cell["step_ms"] / 1000)
        print(f"{name}: {describe(figures)}")


if __name__ == "__main__":
    main()
