"""`headstart doctor --target` counts a target's bytes from its config alone, and names the ways that fit."""

import json

import pytest
from headstart.heads.targets.fit import HeadSize, TargetSize
from headstart.scripts.cli import app
from headstart.scripts.ways import ways_of
from typer.testing import CliRunner

GB = 10**9
LARGE = {  # Llama-3.1-70B
    **dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=8192, intermediate_size=28672),
    **dict(num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256),
    **dict(max_position_embeddings=131072, tie_word_embeddings=False, dtype="bfloat16"),
}


def doctor(folder, *arguments, config=LARGE):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return CliRunner().invoke(app, ["doctor", "--target", str(folder), *arguments])


def fitting(target, *, num_gpus, memory=80 * GB, head=20 * GB):
    size = HeadSize((), True, 0, memory_bytes=head, serving_bytes=0)
    ways = ways_of(target, size, path="MODEL", num_layers=4, num_gpus=num_gpus, memory=memory)
    return [way.fits(memory) for way in ways], [way.in_host // GB for way in ways], ways


def sized(num_gb, *, ends=2):
    layers = (num_gb - 2 * ends) * GB
    return TargetSize(ends * GB, layers, layers // 80, ends * GB, rest=0)


def test_the_parts_of_a_70b_are_counted_without_a_weight(tmp_path):
    done = doctor(tmp_path / "large", "--gpus", "8", "--memory", "80")
    assert done.exit_code == 0 and "137 GB" in done.output and done.output.count("2.1 GB") == 2
    assert "data.features=features/mine" in done.output and "target.device_map=auto" in done.output
    assert "--num_processes 8 -m headstart.train runs/eagle3.yaml" in done.output and "shard_target" in done.output


def test_a_tied_output_layer_is_counted_once(tmp_path):
    done = doctor(tmp_path / "tied", "--gpus", "1", "--memory", "80", config={**LARGE, "tie_word_embeddings": True})
    assert done.output.count("2.1 GB") == 1


@pytest.mark.parametrize(
    ("num_gb", "num_gpus", "fits", "in_host"),
    [
        (16, 1, [True, True, True, True], [0, 0, 0, 0]),
        (141, 1, [False, False, True, False], [0, 0, 69, 0]),
        (141, 8, [False, True, True, True, True], [0, 0, 0, 0, 0]),
        (60, 8, [False, True, True, True, True], [0, 0, 0, 0, 0]),
        (800, 8, [False, False, False, True, False], [0, 0, 0, 224, 0]),
    ],
)
def test_the_ways_that_fit_by_size(num_gb, num_gpus, fits, in_host):
    found = fitting(sized(num_gb), num_gpus=num_gpus)
    assert found[:2] == (fits, in_host)


def test_a_target_that_fits_each_gpu_is_extracted_by_all_of_them():
    commands = [fitting(sized(size), num_gpus=8)[2][3].commands[0] for size in (60, 141)]
    assert "--num_processes 8 -m headstart.scripts.data.extract" in commands[0] and "device_map" not in commands[0]
    assert commands[1].startswith("headstart data extract") and "target.device_map=auto" in commands[1]


def test_a_server_takes_as_many_gpus_as_it_needs_and_the_others_train():
    ways = {size: fitting(sized(size), num_gpus=8)[2][4] for size in (60, 141)}
    assert [way.name for way in ways.values()] == [
        "vLLM on 1 of the GPUs gives states while 7 train",
        "vLLM on 2 of the GPUs gives states while 6 train",
    ]
    server, training = ways[141].commands
    assert "--tensor-parallel-size 2" in server and '"eagle_aux_hidden_state_layer_ids": [4]' in server
    assert training.startswith("CUDA_VISIBLE_DEVICES=2,3,4,5,6,7 accelerate launch ")
    assert "--num_processes 6" in training and "data.server=http://localhost:8000" in training


def test_a_head_too_large_for_a_gpu_is_said(tmp_path):
    assert fitting(sized(16), num_gpus=1, head=80 * GB)[0] == [False] * 4
    done = doctor(tmp_path / "large", "--gpus", "8", "--memory", "16")
    assert done.exit_code == 1 and "yes" not in done.output


def test_without_a_gpu_the_numbers_must_be_given(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "--gpus and --memory" in str(doctor(tmp_path / "large").exception)
    assert "go with --target" in str(CliRunner().invoke(app, ["doctor", "--gpus", "2"]).exception)
