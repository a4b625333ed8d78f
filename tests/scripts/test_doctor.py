"""`headstart doctor` says what a machine can launch and what each launch config lacks there; exit 0 only if it can.

With `--target` it counts a target's bytes from its config alone, and names the ways of training that fit.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from headstart.configs.loader import shipped
from headstart.heads.stored.fit import HeadSize, TargetSize
from headstart.scripts import doctor as module
from headstart.scripts.cli import app
from headstart.scripts.doctor import (
    LocalMachine,
    find,
    missing,
    read_launch,
)
from headstart.scripts.heads_command import in_bytes
from headstart.scripts.training_ways import ServerSize, Ways
from headstart.targets.loading import TargetConfig
from headstart.targets.skeleton import load_skeleton
from safetensors.torch import save_file
from typer.testing import CliRunner

SHIPPED = shipped("accelerate/*.yaml")
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
    versions=dict(VERSIONS),
)
NODE = replace(CPU, num_cores=128, gpus=(("H200", 141 * 2**30),) * 8, cuda="13.0", nccl="2.29.3")


def lacking(name, machine, **how):
    return missing(read_launch(find(name)), machine, **how)


def test_a_node_of_eight_gpus_runs_every_shipped_config():
    assert all(not missing(read_launch(path), NODE) for path in SHIPPED)


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


def test_nothing_is_missing_that_is_not_needed():
    assert not lacking("zero2", replace(NODE, compiler=None, ninja=None)), "torch's optimizers need none on GPUs"
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
    assert all(path.stem in out for path in SHIPPED)
    assert doctor("configs/accelerate/cpu.yaml")[0] == doctor("cpu")[0] == 0
    code, out, _ = doctor("configs/accelerate/zero3.yaml")
    assert code == 1 and "8 GPUs" in out
    assert doctor("zero3", "--cpu", "--num-processes", "2")[0] == 0
    (tmp_path / "mine.yaml").write_text('distributed_type: "NO"\nnum_processes: 1\nuse_cpu: true\n')
    assert doctor(str(tmp_path / "mine.yaml"))[0] == 0


@pytest.mark.parametrize("named", [path.stem for path in SHIPPED])
def test_the_printed_command_finds_its_launch_config_from_any_folder(doctor, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out, _ = doctor(named)
    found = re.search(rf"{named}: accelerate launch --config_file (\S+) -m headstart.train CONFIG", out)
    assert found and Path(found[1]).is_absolute() and Path(found[1]).read_text() == find(named).read_text()


def test_an_unknown_config_is_bad_input(doctor, tmp_path):
    code, _, err = doctor("zero9")
    assert code == 2 and "zero9: no such launch config; shipped are cpu, ddp, fsdp2, gpu, multinode" in err
    (tmp_path / "mine.yaml").write_text("distributed_type: TPU\n")
    code, _, err = doctor(str(tmp_path / "mine.yaml"))
    assert code == 2 and "mine.yaml: distributed_type 'TPU': expected one of" in err


def test_this_machine_is_described():
    machine = module.this_machine()
    assert machine.num_cores >= 1 and machine.memory > 2**28 and machine.versions["torch"]


# Ways of training, of --target

GB = 10**9
LARGE = {  # Llama-3.1-70B
    **dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=8192, intermediate_size=28672),
    **dict(num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256),
    **dict(max_position_embeddings=131072, tie_word_embeddings=False, dtype="bfloat16"),
}


def doctor_of(folder, *arguments, config=LARGE):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return CliRunner().invoke(app, ["doctor", "--target", str(folder), *arguments])


def fitting(target, *, num_gpus, memory=80 * GB, head=20 * GB, num_heads=8):
    size = HeadSize((), True, 0, memory_bytes=head, serving_bytes=0)
    ways = Ways("MODEL", 4, num_heads, target, size, num_gpus, memory, ServerSize(target.whole, 0, 0))
    return [ways.fits(way) for way in ways.all()], [way.in_host // GB for way in ways.all()], ways.all()


def sized(num_gb, *, ends=2):
    layers = (num_gb - 2 * ends) * GB
    return TargetSize(ends * GB, layers, layers // 80, ends * GB)


def test_the_parts_of_a_70b_are_counted_without_a_weight(tmp_path):
    done = doctor_of(tmp_path / "large", "--gpus", "8", "--memory", "80")
    assert done.exit_code == 0 and "137 GB" in done.output and done.output.count(" 2.1 GB") == 2
    assert "data.features=features/mine" in done.output and "target.device_map=auto" in done.output
    assert "--num_processes 8 -m headstart.train runs/eagle3.yaml" in done.output and "shard_target" in done.output
    done = doctor_of(tmp_path / "tied", "--gpus", "8", "--memory", "16", config={**LARGE, "tie_word_embeddings": True})
    assert done.output.count(" 2.1 GB") == 1, "a tied output layer is counted once"
    assert done.exit_code == 1 and "yes" not in done.output, "the head is too large for such a GPU"


def test_what_stored_states_take_and_when_they_pay_is_counted(tmp_path):
    """EAGLE-3 reads three states of 8,192 numbers and the last one: 8 bits each, a scale for each state, and ids."""
    said = doctor_of(tmp_path / "large", "--gpus", "8", "--memory", "80").output
    [told] = re.findall(r"10,000 chats of 1,000 tokens to learn take (.*8bit)", said)
    sizes = re.findall(r"([\d.e+]+) (TB|GB) in (\w+)", told)
    found = {name: float(size) * {"TB": 1e12, "GB": 1e9}[unit] / 1e7 for size, unit, name in sizes}  # bytes of a token
    for name, width in (("float32", 4), ("bfloat16", 2), ("8bit", 1)):
        assert found[name] == pytest.approx(4 * 8192 * width, rel=0.01), name
    [pays] = re.findall(r"fewer than ([\d,]+) tokens a second \(([\d,.]+) TFLOP/s\)", said)
    rate, flops = (float(one.replace(",", "")) for one in pays)
    assert rate == pytest.approx(1e9 / found["8bit"], rel=0.005)
    assert flops == pytest.approx(2 * 70.55e9 * rate / 1e12, rel=0.001), "70.55 billion parameters"


@pytest.mark.parametrize(
    ("num_gb", "num_gpus", "fits", "in_host"),
    [
        (16, 1, [True, True, True], [0, 0, 0]),
        (141, 1, [False, True, False], [0, 69, 0]),
        (141, 8, [False, True, True, True], [0, 0, 0, 0]),
        (60, 8, [False, True, True, True], [0, 0, 0, 0]),
        (800, 8, [False, False, True, False], [0, 0, 224, 0]),
    ],
)
def test_the_ways_that_fit_by_size(num_gb, num_gpus, fits, in_host):
    found = fitting(sized(num_gb), num_gpus=num_gpus)
    assert found[:2] == (fits, in_host)


def test_a_target_that_fits_each_gpu_is_extracted_by_all_of_them():
    commands = [fitting(sized(size), num_gpus=8)[2][2].commands[0] for size in (60, 141)]
    assert "--num_processes 8 -m headstart.scripts.data.extract" in commands[0] and "device_map" not in commands[0]
    assert commands[1].startswith("headstart data extract") and "target.device_map=auto" in commands[1]


def test_a_server_takes_as_many_gpus_as_it_needs_and_the_others_train():
    ways = {size: fitting(sized(size), num_gpus=8)[2][3] for size in (60, 141)}
    assert [way.name for way in ways.values()] == [
        "vLLM on 1 of the GPUs gives states while 7 train",
        "vLLM on 2 of the GPUs gives states while 6 train",
    ]
    server, training = ways[141].commands
    assert "--tensor-parallel-size 2" in server and '"eagle_aux_hidden_state_layer_ids": [4]' in server
    assert training.startswith("CUDA_VISIBLE_DEVICES=2,3,4,5,6,7 accelerate launch ")
    assert "--num_processes 6" in training and "engine.server=http://localhost:8000" in training
    by_three = [fitting(sized(210), num_gpus=8, num_heads=heads)[2][3].name for heads in (6, 8)]
    assert [name.split()[2] for name in by_three] == ["3", "4"], "vLLM shares the attention's heads out"


def test_the_server_is_counted_by_its_weights_as_stored(tmp_path):
    """32 rows of 2,048 tokens: keys and values of 8 heads of 128 numbers in 80 layers; four states of 8,192 numbers."""
    folder = tmp_path / "packed"
    folder.mkdir()
    save_file({"weight": torch.zeros(3_000_000, dtype=torch.int8)}, folder / "model.safetensors")
    said = doctor_of(folder, "--gpus", "1", "--memory", "80").output
    sizes = {
        words: re.findall(rf"{words}[^│]*│ *([\d.]+ [A-Z]+)", said)[0] for words in ("stored", "values", "states of")
    }
    keys, states = 32 * 2048 * 80 * 2 * 8 * 128 * 2, 32 * 2048 * 4 * 8192 * 2
    assert sizes == {"stored": in_bytes(3_000_000), "values": in_bytes(keys), "states of": in_bytes(states)}
    server = ServerSize.of(load_skeleton(TargetConfig(path=str(folder))), num_states=4)
    assert server.on(2) == (3_000_000 + keys) // 2 + states


def test_beside_training_on_one_gpu_the_server_is_told_what_it_may_take():
    [server, _] = fitting(sized(16), num_gpus=1)[2][2].commands
    assert "--gpu-memory-utilization 0.25" in server, "16 of 80 GB, and a twentieth"


def test_without_a_gpu_it_counts_as_on_a_usual_one_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    output = doctor_of(tmp_path / "large").output
    assert "no GPU here: counted for 1 of 80 GB" in output and "way, on 1 x 80 GB" in output
    assert "go with --target" in str(CliRunner().invoke(app, ["doctor", "--gpus", "2"]).exception)
