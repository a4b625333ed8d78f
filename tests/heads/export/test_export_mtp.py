"""MTP modules are served from a copy of their target: in place of those that it has, or beside its layers."""

import json
import re
from typing import Any

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.heads.export.check import check_folder
from headstart.heads.export.tensor_files import tensor_locations
from headstart.heads.export.write import export_head, notes
from headstart.heads.mtp import MtpConfig
from headstart.heads.registry import build_head, save_head
from headstart.heads.target import Target
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

DEEPSEEK: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
}


def tensors_of(folder):
    found = {}
    for name, path in tensor_locations(folder).items():
        with safe_open(path, framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


@pytest.fixture
def trained(tmp_path, tiny_model):
    """trained(layout): the folders of a target without MTP modules that engines load them with, and of a head."""

    def make(layout="mimo", **options):
        folder = tmp_path / "target"
        if layout == "mimo":
            tiny_model("qwen2").save_pretrained(folder)
        else:
            torch.manual_seed(0)
            DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)).save_pretrained(folder)
        head = build_head(MtpConfig(**{"layout": layout, "num_depths": 2, **options}), Target.load(folder), seed=2)
        save_head(head, tmp_path / "run" / "final")
        return folder, tmp_path / "run"

    return make


@pytest.mark.parametrize("layout", ["mimo", "deepseek_v3"])
def test_modules_go_beside_the_layers_of_a_target_without_them(trained, tmp_path, layout):
    target, run = trained(layout)
    export_head(run, tmp_path / "out", to="vllm")
    before, after, head = tensors_of(target), tensors_of(tmp_path / "out"), load_file(run / "final/model.safetensors")
    assert all(torch.equal(after[name], value) for name, value in (before | head).items())
    extra = after.keys() - before.keys() - head.keys()
    tables = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    assert extra == (set() if layout == "mimo" else tables)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    assert config["architectures"] == ["MiMoForCausalLM" if layout == "mimo" else "DeepseekV3ForCausalLM"]
    assert check_folder(tmp_path / "out").problems == []
    # what has the modules is written again with others in their place
    again = export_head(run, tmp_path / "again", to="hf", target=str(tmp_path / "out"))
    assert notes(again) == [] and check_folder(tmp_path / "again").problems == []
    for path in (tmp_path / "out").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


FAULTS = {
    "missing": (lambda tensors: tensors.pop("model.mtp_layers.0.input_proj.weight"), "input_proj.weight: missing"),
    "missing in the layer": (lambda tensors: tensors.pop("model.mtp_layers.0.self_attn.q_proj.bias"), "bias: missing"),
    "transposed": (
        lambda tensors: tensors.update({"model.mtp_layers.0.input_proj.weight": torch.ones(64, 32)}),
        r"expected \[32, 64\], found \[64, 32\]: transposed",
    ),
    "extra": (lambda tensors: tensors.update({"model.mtp_layers.0.x": torch.ones(2)}), "mtp_layers.0.x: must not be"),
    "second": (lambda tensors: tensors.update({"model.mtp_layers.1.x": torch.ones(2)}), "mtp_layers.1.x: must not be"),
    "NaN": (
        lambda tensors: tensors["model.mtp_layers.0.final_layernorm.weight"].fill_(float("nan")),
        "32 of 32 values are NaN",
    ),
}


@pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=list(FAULTS))
def test_faults_of_modules_are_found(trained, tmp_path, fault, reason):
    _, run = trained()
    export_head(run, tmp_path / "out", to="vllm")
    path = tmp_path / "out" / "model-mtp.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    fault(tensors)
    save_file(tensors, path)
    problems = check_folder(tmp_path / "out").problems
    assert any(re.search(reason, line) for line in problems), problems


def test_faults_of_the_copy_are_found(trained, tmp_path):
    _, run = trained()
    export_head(run, tmp_path / "out", to="vllm")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    for value, reason in (
        (2, "model.mtp_layers.1.input_proj.weight: missing"),
        (None, "expected the number of modules"),
    ):
        path.write_text(json.dumps({**config, "num_nextn_predict_layers": value}))
        assert any(reason in line for line in check_folder(tmp_path / "out").problems)
    path.write_text(json.dumps(config))
    (tmp_path / "out" / "model.safetensors").unlink()
    problems = check_folder(tmp_path / "out").problems
    assert any("names model.safetensors, which is not there" in line for line in problems)
    assert any("layer 0 of the target: no tensor of it" in line for line in problems)
    # and a head's own folder is none that an engine serves
    assert any("served within the target" in line for line in check_folder(run / "final").problems)


def test_what_cannot_be_served_is_refused_or_said(trained, tmp_path):
    target, run = trained(feedback="pre_norm")
    assert "feed the next depth from behind the norm" in notes(export_head(run, tmp_path / "out", to="vllm"))[0]
    for path in target.iterdir():
        path.unlink()
    target.rmdir()
    with pytest.raises(BadInput, match="no local folder; name one with --target: the modules go into a copy of it"):
        export_head(run, tmp_path / "other", to="vllm")
    assert not (tmp_path / "other").exists()
