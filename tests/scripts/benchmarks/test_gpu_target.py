"""The GPU suite's target at toy size: it learns, is saved as any target is, and is made once."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from headstart.configs.jsonl import read_jsonl
from headstart.eval.generate import generate
from headstart.eval.suites.prompts import prompt_ids
from headstart.heads.target import Target
from headstart.scripts.benchmarks.gpu import target as gpu_target


@pytest.fixture
def pretrain(monkeypatch, tmp_path):
    """pretrain("--shape", "llama", ...): runs the script; returns its output folder."""
    toy = replace(gpu_target.SIZES["toy"], seconds=0.5, num_problems=40)
    monkeypatch.setitem(gpu_target.SIZES, "toy", toy)

    def run(*arguments):
        output = tmp_path / "target"
        monkeypatch.setattr(sys, "argv", ["gpu_target", str(output), "--device", "cpu", *map(str, arguments)])
        gpu_target.main()
        return output

    return run


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_it_learns_and_is_a_target(shape, pretrain, capsys):
    folder = pretrain("--shape", shape)
    found = json.loads((folder / "pretrain.json").read_text())
    first, last = found["loss_curve"][0][1], found["loss_curve"][-1][1]
    assert first > last + 0.2 and found["steps"] > 3 and found["tokens_per_second"] > 0 and 0 < found["mfu"] < 1
    target = Target.load(folder, dtype="float32")
    assert type(target.model).__name__.lower().startswith(shape)
    ids = target.tokenizer.apply_chat_template([{"role": "user", "content": "Anna has 2 coins."}])["input_ids"]
    assert len(generate(target, None, ids, max_new_tokens=4, eos_token_ids=[]).token_ids[0]) == 4
    rows = {path.stem: read_jsonl(path) for path in sorted((folder / "prompts").glob("*.jsonl"))}
    assert sorted(rows) == ["code", "code_long", "reasoning", "train"]
    assert all([one["role"] for one in row["messages"]] == ["user"] for part in rows.values() for row in part)
    lengths = {name: [len(prompt_ids(row, target.tokenizer, origin="")) for row in part] for name, part in rows.items()}
    assert lengths["code"] and all(0.85 * 48 <= length <= 1.1 * 48 for length in lengths["code"])
    assert lengths["code_long"] and all(0.85 * 160 <= length <= 1.1 * 160 for length in lengths["code_long"])
    learned = {row["messages"][0]["content"] for row in rows["train"]}
    assert not learned & {row["messages"][0]["content"] for row in rows["reasoning"]}
    stored = (folder / "model.safetensors").stat().st_mtime_ns
    pretrain("--shape", shape)
    assert (folder / "model.safetensors").stat().st_mtime_ns == stored, "made once"
    assert "holds a target already" in capsys.readouterr().out


def test_too_little_text_is_said_before_training(pretrain, monkeypatch, capsys):
    monkeypatch.setattr(gpu_target, "installed_texts", lambda num_chars: ["import os\n" * 40])
    with pytest.raises(SystemExit) as caught:
        pretrain()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "gpu_target: code.jsonl: 0 held-out texts give no prompt for it\n"


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_compiled_layers_are_one_graph_without_a_mask(shape, saved_target):
    """Attention is causal by itself there: a mask would cost flash attention."""
    model = gpu_target.new_model(shape, gpu_target.SIZES["toy"], Target.load(saved_target).tokenizer)
    ids = torch.arange(3, 51).view(2, 24)
    wanted = model(input_ids=ids, labels=ids, use_cache=False).loss
    model.set_attn_implementation(gpu_target.CAUSAL)
    calls = []

    def backend(graph, inputs):
        calls.extend(node.kwargs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
        return graph.forward

    gpu_target.compile_layers(model, backend=backend)
    found = model(input_ids=ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(found, wanted)
    assert len(calls) == 1, "one graph for three layers"
    assert calls[0]["attn_mask"] is None and calls[0]["is_causal"]


def test_rows_hold_all_texts_in_order_each_with_its_end(saved_target):
    tokenizer = Target.load(saved_target).tokenizer
    rows = gpu_target.packed(tokenizer, ["w5 w6 w7", "w8", "w9 w10"], row_tokens=3)
    assert torch.equal(rows, torch.tensor([[5, 6, 7], [2, 8, 2], [9, 10, 2]], dtype=torch.int32))
