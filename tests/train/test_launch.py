"""What was asked for is what runs, or the run says why not."""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from headstart.base.errors import BadInput
from headstart.configs.loader import PACKAGE_CONFIGS, shipped
from headstart.engines.heads import build_head, head_class
from headstart.train.backend import Backend
from headstart.train.inputs.config import TrainConfig
from headstart.train.inputs.launch import Launch, requested_launch, start_accelerator
from headstart.train.optim import build_optimizer


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, Launch("single", 1)),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, Launch("ddp", 2)),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0", "ACCELERATE_USE_DEEPSPEED": "true"}, Launch("deepspeed", 1)),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, Launch("fsdp2", 1)),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "true"},
            "deepspeed: ACCELERATE_USE_CPU would turn",
        ),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP 1: set fsdp_version: 2"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "would leave models empty in all processes but the first",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK or LOCAL_RANK is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "each process would train alone; start them with accelerate launch"),
        ({"SLURM_STEP_NUM_TASKS": "16"}, "SLURM_STEP_NUM_TASKS is 16 but WORLD_SIZE is not set"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, "asked for several processes and started"),
    ],
)
def test_what_was_requested_launch_is_read_from_the_launchers_environment(environ, launch):
    if isinstance(launch, Launch):
        assert requested_launch(environ) == launch
    else:
        with pytest.raises(BadInput, match=launch):
            requested_launch(environ)


@pytest.mark.parametrize(
    ("environ", "settings", "problem"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, "asks for mixed_precision bf16, the run for train.precision fp32"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "deepspeed was asked for but LOCAL_RANK is not set"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, {}, "fsdp2 was asked for but LOCAL_RANK is not set"),
        ({}, {"device": "cuda"}, "train.device cuda: no CUDA device here"),
    ],
)
def test_a_launch_that_contradicts_the_run_is_refused(environ, settings, problem, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for key in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(BadInput, match=problem):
        start_accelerator(TrainConfig(output_dir="unused", max_steps=1, **settings))


def test_a_backend_that_came_up_as_another_is_caught(monkeypatch):
    monkeypatch.setattr("headstart.train.inputs.launch.requested_launch", lambda _: Launch("ddp", 2))
    with pytest.raises(BadInput) as caught:
        start_accelerator(TrainConfig(output_dir="unused", max_steps=1, device="cpu"))
    told = "launched as ddp on 2 processes, but single on 1 process came up: each process would train alone"
    assert str(caught.value) == told


@pytest.mark.slow
def test_a_planted_wrong_launch_stops_with_its_reason(launching, tmp_path):
    codes = launching.wait(launching.start("ddp", tmp_path / "wrong", flags=("--mixed_precision", "bf16")))
    said = (tmp_path / "wrong.log").read_text()
    assert set(codes) == {2}, said
    assert any(line.startswith("headstart: ") and "asks for mixed_precision bf16" in line for line in said.splitlines())


@pytest.mark.parametrize(
    ("kind", "num_parts", "problem"),
    [
        (DistributedType.DEEPSPEED, 1, "would shard the adapters that the target runs through"),
        (DistributedType.FSDP, 1, "would shard the adapters that the target runs through"),
        (DistributedType.MULTI_CPU, 2, "train.context_parallel 2: each process would learn"),
    ],
)
def test_what_cannot_be_trained_in_parts_is_refused(kind, num_parts, problem, target):
    plugin = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
    accelerator = SimpleNamespace(distributed_type=kind, is_fsdp2=True, num_processes=2, state=plugin)
    head = build_head(head_class("medusa").config_class(type="medusa"), target)
    head.adapts_target = True
    config = TrainConfig(output_dir="unused", max_steps=1, context_parallel=num_parts)
    with pytest.raises(BadInput, match=problem):
        Backend(accelerator, head, build_optimizer(head, config), config)  # pyright: ignore[reportArgumentType]


def test_every_shipped_launch_config_says_its_command():
    configs = shipped("accelerate/*.yaml")
    assert {path.stem for path in configs} >= {"cpu", "gpu", "ddp", "zero2", "zero3", "fsdp2", "multinode"}
    for path in configs:
        assert f"--config_file configs/accelerate/{path.name}" in path.read_text(), path
    for path in PACKAGE_CONFIGS.glob("deepspeed/*.json"):
        assert set(json.loads(path.read_text())) == {"zero_optimization"}, "the run decides the rest"
