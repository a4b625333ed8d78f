"""`headstart doctor` says what a machine can launch and what each launch config lacks there; exit 0 only if it can."""

from dataclasses import replace
from pathlib import Path

import pytest
from headstart.scripts import doctor as module
from headstart.scripts.doctor import LocalMachine, cpu_command, find, missing, read_launch, shipped_configs

VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0", "deepspeed": "0.19.8"}
NO_DEEPSPEED = {**VERSIONS, "deepspeed": None}
CPU = LocalMachine(
    num_cores=4,
    memory=16 * 2**30,
    gpus=(),
    cuda=None,
    nccl=None,
    gloo=True,
    compiler="/usr/bin/g++",
    ninja="/usr/bin/ninja",
    shm_op=False,
    versions=dict(VERSIONS),
)
NODE = replace(CPU, num_cores=128, gpus=(("H200", 141 * 2**30),) * 8, cuda="13.0", nccl="2.29.3")


def lacking(name, machine, **how):
    return missing(read_launch(find(name)), machine, **how)


def test_a_node_of_eight_gpus_runs_every_shipped_config():
    assert all(not missing(read_launch(path), NODE) for path in shipped_configs())


def test_a_cpu_runs_one_process_and_says_what_the_others_need():
    assert not lacking("cpu", CPU)
    assert lacking("gpu", CPU) == ["1 GPU, here are 0", "torch is built without CUDA"]
    for name in ("ddp", "zero2", "zero3", "fsdp2", "multinode"):
        assert lacking(name, CPU)[0] == "8 GPUs, here are 0"
        assert not lacking(name, CPU, cpu=True, num_processes=4)
    assert lacking("ddp", CPU, cpu=True) == ["8 processes on 4 cores: --num-processes 4"]


@pytest.mark.parametrize(
    ("change", "name", "how", "problem"),
    [
        ({"gpus": (("A10", 2**30),) * 2}, "fsdp2", {}, "8 GPUs, here are 2"),
        ({"nccl": None}, "ddp", {}, "torch is built without NCCL"),
        ({"gloo": False}, "ddp", {"cpu": True}, "torch is built without gloo"),
        ({"compiler": None}, "zero2", {"cpu": True}, "no C++ compiler on PATH: g++ 9 or newer"),
        ({"ninja": None}, "zero3", {"cpu": True}, "no ninja on PATH: pip install ninja, with its folder on PATH"),
        ({"versions": NO_DEEPSPEED}, "zero2", {}, "deepspeed is not installed: pip install deepspeed"),
    ],
)
def test_what_is_missing_is_named(change, name, how, problem):
    assert lacking(name, replace(NODE, **change), **how) == [problem]


def test_a_built_operation_needs_no_compiler():
    assert not lacking("zero2", replace(NODE, compiler=None, ninja=None, shm_op=True), cpu=True)
    assert not lacking("zero2", replace(NODE, compiler=None, ninja=None)), "torch's optimizers need none on GPUs"


def test_two_gpus_run_two_processes():
    assert not lacking("ddp", replace(NODE, gpus=NODE.gpus[:2]), num_processes=2)


@pytest.fixture
def doctor(headstart, monkeypatch):
    """doctor(*arguments): exit code, output and errors of the command on a machine without GPUs."""
    monkeypatch.setattr(module, "this_machine", lambda: CPU)

    def call(*arguments):
        code, out, err = headstart("doctor", *arguments)
        return code, " ".join(out.split()), err

    return call


def test_the_exit_code_is_that_of_the_config_asked_for(doctor, tmp_path):
    code, out, _ = doctor()
    assert code == 0 and "none on PATH" not in out and "torch is built without it" in out
    assert all(path.stem in out for path in shipped_configs())
    assert doctor("configs/accelerate/cpu.yaml")[0] == doctor("cpu")[0] == 0
    code, out, _ = doctor("configs/accelerate/zero3.yaml")
    assert code == 1 and "8 GPUs" in out
    assert doctor("zero3", "--cpu", "--num-processes", "2")[0] == 0
    (tmp_path / "mine.yaml").write_text('distributed_type: "NO"\nnum_processes: 1\nuse_cpu: true\n')
    assert doctor(str(tmp_path / "mine.yaml"))[0] == 0


def test_the_command_for_cpus_is_whole_and_starts_as_many_processes(doctor):
    _, out, _ = doctor("configs/accelerate/ddp.yaml")
    path, start = "configs/accelerate/ddp.yaml", "--num_processes 2 -m headstart.train CONFIG"
    assert f"without GPUs: accelerate launch --config_file {path} {start}" in out and "--cpu" not in out
    assert "accelerate launch" not in doctor("cpu")[1]
    assert not cpu_command(read_launch(find("ddp")), NODE) and not cpu_command(
        read_launch(find("ddp")), replace(CPU, num_cores=1)
    )
    assert "'my configs/ddp.yaml'" in cpu_command(
        replace(read_launch(find("ddp")), path=Path("my configs/ddp.yaml")), CPU
    )


def test_an_unknown_config_is_bad_input(doctor, tmp_path):
    code, _, err = doctor("zero9")
    assert code == 2 and "zero9: no such launch config; shipped are cpu, ddp, fsdp2, gpu, multinode" in err
    (tmp_path / "mine.yaml").write_text("distributed_type: TPU\n")
    code, _, err = doctor(str(tmp_path / "mine.yaml"))
    assert code == 2 and "mine.yaml: distributed_type 'TPU': expected one of" in err


def test_this_machine_is_described():
    machine = module.this_machine()
    assert machine.num_cores >= 1 and machine.memory > 2**28 and machine.versions["torch"]
