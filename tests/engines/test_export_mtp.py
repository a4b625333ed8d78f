"""MTP modules are served from a copy of their target: in place of those that it has, or beside its layers."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from damaging import drop, key, put, rewritten
from headstart.base.errors import BadInput
from headstart.engines.check import check_folder
from headstart.engines.export import export_head, notes, read_folder
from headstart.engines.heads import build_head, save_head
from headstart.engines.importers import import_head
from headstart.engines.servers.how_to_serve import commands_of_engine
from headstart.heads.mtp import MtpConfig
from headstart.targets.target import Target
from perturbing import perturb
from run_files import tensors_of
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "targets" / "kinds"))
from kind import Kind, kind, wrapper  # noqa: E402

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


def made_in(folder, layout, tiny_model):
    """The folders of a target without MTP modules that engines load them with, and of a head."""
    target = folder / "target"
    if layout == "mimo":
        tiny_model("qwen2").save_pretrained(target)
    else:
        torch.manual_seed(0)
        DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)).save_pretrained(target)
    head = build_head(MtpConfig(layout=layout, num_depths=2), Target.load(target), seed=2)
    save_head(head, folder / "run" / "final")
    return target, folder / "run"


@pytest.fixture
def trained(tmp_path, tiny_model):
    """trained(layout): such folders."""
    return lambda layout="mimo": made_in(tmp_path, layout, tiny_model)


@pytest.fixture(scope="module")
def sound(tmp_path_factory, tiny_model):
    """An exported head, made once."""
    folder = tmp_path_factory.mktemp("made")
    export_head(made_in(folder, "mimo", tiny_model)[1], folder / "out", to="vllm")
    return folder / "out"


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


def test_engines_are_told_as_many_drafts_as_were_trained_or_measured(trained):
    """The number of modules, one, divides any K, and engines feed the module its own output."""
    head = read_folder(trained()[1])
    for measured, k in ((None, 2), (5, 5)):
        words = {"vllm": f'"num_speculative_tokens":{k}', "llama.cpp": f"--spec-draft-n-max {k}"}
        words["sglang"] = (
            f"--speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
        )
        for engine, told in words.items():
            assert told in commands_of_engine(engine, head, "served", measured)[-1]


COUNT = "num_nextn_predict_layers"
FAULTS = {
    "missing": (drop("model.mtp_layers.0.input_proj.weight"), "input_proj.weight: missing"),
    "missing in the layer": (drop("model.mtp_layers.0.self_attn.q_proj.bias"), "bias: missing"),
    "transposed": (
        put("model.mtp_layers.0.input_proj.weight", lambda _: torch.ones(64, 32)),
        r"expected \[32, 64\], found \[64, 32\]: transposed",
    ),
    "extra": (put("model.mtp_layers.0.x", lambda _: torch.ones(2)), "mtp_layers.0.x: must not be"),
    "second": (put("model.mtp_layers.1.x", lambda _: torch.ones(2)), "mtp_layers.1.x: must not be"),
    "NaN": (
        put("model.mtp_layers.0.final_layernorm.weight", lambda norm: norm.fill_(float("nan"))),
        "32 of 32 values are NaN",
    ),
    "two modules said": (key(COUNT, 2), "model.mtp_layers.1.input_proj.weight: missing"),
    "none said": (key(COUNT, None), "expected the number of modules"),
}


@pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=list(FAULTS))
def test_faults_of_modules_are_found(sound, tmp_path, fault, reason):
    folder = Path(shutil.copytree(sound, tmp_path / "out"))
    problems = check_folder(rewritten(folder, fault, weights="model-mtp.safetensors")).problems
    assert any(re.search(reason, line) for line in problems), problems


def test_faults_of_the_copy_are_found(sound, tmp_path):
    folder = Path(shutil.copytree(sound, tmp_path / "out"))
    (folder / "model.safetensors").unlink()
    problems = check_folder(folder).problems
    assert any("names model.safetensors, which is not there" in line for line in problems)
    assert any("layer 0 of the target: no tensor of it" in line for line in problems)
    # and a head's own folder is none that an engine serves
    own = sound.with_name("run") / "final"
    assert any("served within the target" in line for line in check_folder(own).problems)


def test_no_modules_go_beside_quantised_layers(trained, tmp_path):
    """Engines would read them as quantised too, and take what they find for numbers of eight bits."""
    target, run = trained()
    config = json.loads((target / "config.json").read_text())
    for method in ("fp8", "compressed-tensors"):
        (target / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
        with pytest.raises(BadInput, match=rf"stored quantised \({method}\): engines read its modules so too"):
            export_head(run, tmp_path / "out", to="vllm", dtype="bfloat16")
        assert not (tmp_path / "out").exists()


QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14}
NAMES = "image_token video_token image_start_token image_end_token video_start_token video_end_token".split()
IDS: dict[str, Any] = {f"{name}_id": 500 + i for i, name in enumerate(NAMES)}
SECTIONS = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
# by kind of target: its config, and among its module's tensors those by which vLLM's loaders differ
KINDS: dict[str, tuple[Kind, list[str]]] = {
    "exaone_moe": (  # a dense layer with a window, as the target's first
        kind("", "exaone_moe"),
        ["mtp.fc", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.layers.0.mlp.up_proj", "mtp.layers.0.self_attn.q_norm"],
    ),
    "hy_v3": (
        kind("", "hy_v3"),
        [
            *("model.layers.4.eh_proj", "model.layers.4.final_layernorm", "model.layers.4.mlp.router.gate"),
            *("model.layers.4.mlp.shared_mlp.up_proj", "model.layers.4.mlp.experts.3.down_proj"),
        ],
    ),
    "glm_ocr": (
        wrapper(
            "",
            "glm_ocr",
            kind("", "glm_ocr_text", rope_parameters=SECTIONS),
            vision_config={**QWEN, "image_size": 28},
            **IDS,
        ),
        [
            *(f"model.language_model.layers.4.{name}" for name in ("enorm", "shared_head.norm", "shared_head.head")),
            *(f"model.language_model.layers.4.{name}" for name in ("embed_tokens", "post_mlp_layernorm")),
        ],
    ),
}


@pytest.mark.fast_only(name=["glm_ocr"])
@pytest.mark.parametrize("name", list(KINDS))
def test_modules_of_each_kind_are_written_and_read_back_by_the_engines_names(name, tmp_path):
    made, names = KINDS[name]
    made.model().save_pretrained(tmp_path / "target")
    target = Target.load(tmp_path / "target")
    head = perturb(build_head(MtpConfig(num_depths=2), target, seed=2), 0.1, seed=3)
    save_head(head, tmp_path / "run" / "final")
    exported = export_head(tmp_path / "run", tmp_path / "out", to="vllm")
    assert ["feeds modules of a glm_ocr" in line for line in notes(exported)] == [True] * (name == "glm_ocr")
    written = tensors_of(tmp_path / "out")
    assert {f"{one}.weight" for one in names} <= written.keys() - tensors_of(tmp_path / "target").keys()
    assert check_folder(tmp_path / "out").problems == []
    served = Target.load(tmp_path / "out")
    imported, own = (
        import_head(tmp_path / "out", served),
        build_head(MtpConfig(num_depths=2, init="checkpoint"), served),
    )
    for read in (imported, own):
        assert read.state_dict().keys() == head.state_dict().keys()
        assert all(torch.equal(value, head.state_dict()[key]) for key, value in read.state_dict().items())
