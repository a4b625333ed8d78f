"""A timed step does the work that a step of training does."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from headstart.benchmarks.operations import Operations
from headstart.benchmarks.training_step import Shape, build_step, run_step
from headstart.data_pipelines.loader import TrainingBatch
from headstart.train.checkpoint import Best, Progress
from headstart.train.inputs.config import TrainConfig
from headstart.train.loop import Loop, step_seed
from headstart.train.optim import build_optimizer
from headstart.train.watching.trend import Trend

TOY = Shape(
    head="eagle3", hidden=64, intermediate=172, num_heads=8, num_kv_heads=4, vocabulary=512, context=96, batch_size=2,
    depths=3,
)  # fmt: skip
CONFIG = TrainConfig(output_dir="unused", max_steps=2, accumulation=1)
# of these heads training draws some positions of a row; EAGLE-3 learns at all of them
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "p-eagle": {"parallel": True},
    "block": {"blocks_per_row": 8, "num_layers": 2},
    "draft_lm": {"parallel": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_operations_are_those_of_the_training_loop(name):
    head_type = "eagle3" if name == "p-eagle" else name
    head, batch = build_step(Shape(**{**vars(TOY), "head": head_type, "options": OPTIONS[name]}))
    torch.manual_seed(step_seed(CONFIG.seed, 0, 0))  # the same positions are drawn
    with Operations() as benched:
        run_step(head, batch, dtype="fp32")
    rows = TrainingBatch(batch.input_ids, batch.loss_mask, None, batch.output, batch.input_ids.numel())
    with Operations() as trained:
        assert loop_of(head).step(0, iter([rows])) is not None
    assert benched.total == trained.total > 0


def loop_of(head: Any) -> Loop:
    """A training loop of one process, without Accelerate."""
    backend: Any = SimpleNamespace(
        config=CONFIG,
        head=head,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        optimizer=build_optimizer(head, CONFIG),
        update=lambda: 0.0,  # products of an optimizer are no part of the timed ones
        total=lambda values: values,
        accumulating=lambda is_last: nullcontext(),
        loss=head,
        backward=lambda loss: loss.backward(),
    )
    others: dict[str, Any] = {"stopping": SimpleNamespace(received=None)}
    others |= {"watchdog": SimpleNamespace(at=lambda _: None)}
    place: Any = SimpleNamespace(part=0, num_parts=1, group=0, num_groups=1)
    progress = Progress(0, 2, Best(), Trend())
    return Loop(backend, place=place, progress=progress, **others, deadline=math.inf, may_lack_batches=False)
