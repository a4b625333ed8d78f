"""Exported heads have the names, shapes and keys that engines read, or nothing is written."""

import json
import shlex
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.engines.check import check_export, check_folder
from headstart.engines.export import ENGINES, GEMMA_3, LAYOUTS, engines_of, export_head, notes, serve_commands
from headstart.engines.families.table import SERVINGS
from headstart.engines.heads import HEADS, build_head, head_class, load_head, save_head
from headstart.engines.layouts.fp8 import ONLY
from headstart.heads.eagle import EagleConfig
from headstart.heads.medusa import MedusaConfig
from headstart.targets.target import Target
from safetensors.torch import load_file

CASES = [  # but for modules, which go into a copy of a target that has such, and assistants, whose target is Gemma 4
    (family, to)
    for family, serving in SERVINGS.items()
    for to in engines_of(family)
    if not serving.is_module and family != "assistant" and to != "llama.cpp"
]
DFLASH = {"markov_rank": 0, "sample_from_anchor": False}
LATTICE = {"selector_rank": 6, "selector_top_k": 4, "lattice_layers": 1}
OPTIONS: dict[str, Any] = {"medusa": {"num_depths": 2}, "eagle3": {"draft_vocab_size": 24}}
KEPT = "rms_norm_eps max_position_embeddings rope_theta eos_token_id bos_token_id head_dim num_key_value_heads".split()


@pytest.fixture
def trained(trained):
    """With the options above."""
    return lambda family, **options: trained(family, **OPTIONS.get(family, {}) | options)


def read(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("family", "to"), CASES)
def test_what_is_exported_passes_the_contract(trained, tmp_path, family, to):
    out = tmp_path / "served"
    head = export_head(trained(family), out, to=to)
    assert check_folder(out).problems == []
    assert head.family == family and notes(head) == []
    commands = serve_commands(head, str(out), to=to)
    assert all(str(out) in command for command in commands.values())
    assert commands
    assert ("sglang" in commands) == (family != "medusa" and to != "speculators")
    names = {path.name for path in out.iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert names == {"config.json", "model.safetensors"} | (tokenizer if family == "draft_lm" else set())


@pytest.mark.parametrize(("family", "to"), [("eagle3", "vllm"), ("eagle3", "speculators"), ("medusa", "vllm")])
def test_printed_commands_are_ready_for_a_shell(trained, tmp_path, family, to):
    """Names with spaces and quotes come out of a shell as they went in."""
    head = export_head(trained(family), tmp_path / "served", to=to)
    for name, command in serve_commands(head, "my 'served' head", to=to, target="a target").items():
        words = shlex.split(command)
        assert any("my 'served' head" in word for word in words), command
        assert to == "speculators" or "a target" in words
        if "--speculative-config" in words:
            spec = json.loads(words[words.index("--speculative-config") + 1])
            assert spec["model"] == "my 'served' head", name


def test_a_draft_model_of_a_quantised_target_is_not_said_to_be_quantised(saved_target, tmp_path):
    """Engines would read its weights as the config says."""
    target = Target.load(saved_target)
    target.config.quantization_config = {"quant_method": "fp8"}
    folder = save_head(build_head(head_class("draft_lm").config_class(type="draft_lm"), target), tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config | config["headstart"]["head"]["architecture"]
    export_head(folder, tmp_path / "out", to="vllm")
    assert "quantization_config" not in read(tmp_path / "out")[0] and check_folder(tmp_path / "out").problems == []


def test_one_eagle3_folder_is_right_for_both_engines(trained, tmp_path, on_disk):
    run = trained("eagle3", num_layers=2)
    folders = [tmp_path / "vllm", tmp_path / "sglang"]
    for folder in folders:
        export_head(run, folder, to=folder.name)
    assert [f.read_bytes() for f in folders[0].iterdir()] == [f.read_bytes() for f in folders[1].iterdir()]
    config, tensors = read(folders[0])
    ids = config["eagle_aux_hidden_state_layer_ids"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [i - 1 for i in ids]
    assert config["num_aux_hidden_states"] == len(ids) and config["draft_vocab_size"] == 24
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])
    assert torch.equal(tensors["d2t"] + torch.arange(24), torch.arange(3, 51, 2))
    assert not any("embed" in name for name in tensors)
    kept = {**on_disk.config.to_dict(), "rope_theta": 500.0}
    assert {key: config[key] for key in KEPT} == {key: kept[key] for key in KEPT}
    assert config["rope_scaling"] is None and config["hidden_act"] == "silu"


@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators", "llama.cpp"])
def test_a_window_of_eagle3_is_for_vllm(trained, tmp_path, to):
    """Where an engine would draft over all positions, nothing is written, or a line says so."""
    run, out = trained("eagle3", sliding_window=8, draft_vocab_size=None), tmp_path / "served"
    if to in ("sglang", "llama.cpp"):
        with pytest.raises(BadInput, match="sliding_window"):
            export_head(run, out, to=to)
        return
    head = export_head(run, out, to=to)
    config = read(out)[0]
    layer = config.get("transformer_layer_config", config)
    assert layer["layer_types"] == ["sliding_attention"] and layer["sliding_window"] == 8
    assert check_export(out).problems == []
    assert check_export(out, to="sglang").problems == ["sliding_window 8: SGLang drafts over all positions"]
    assert notes(head) == ["sliding_window 8: serve it with vLLM; SGLang drafts over all positions"]
    assert "sglang" not in serve_commands(head, str(out), to=to)


def test_a_trained_bias_is_sglangs_alone(trained, tmp_path):
    run = trained("eagle", bias=True)
    with pytest.raises(BadInput, match="fc.bias is trained and vLLM leaves it out"):
        export_head(run, tmp_path / "out", to="vllm")
    assert not (tmp_path / "out").exists()
    export_head(run, tmp_path / "out", to="sglang")
    assert check_folder(tmp_path / "out").problems == []


def test_speculators_name_their_target(trained, tmp_path, on_disk):
    export_head(trained("eagle3"), tmp_path / "out", to="speculators")
    config, tensors = read(tmp_path / "out")
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": on_disk.name,
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 3
    assert "layers.0.hidden_norm.weight" in tensors and not any(name.startswith("midlayer") for name in tensors)


@pytest.mark.parametrize("output", ["own", "shared"])
def test_medusa_has_vllms_names(trained, tmp_path, on_disk, output):
    run = trained("medusa", output=output, num_residual_blocks=2)
    _, ours = read(run / "final")
    export_head(run, tmp_path / "blocks", to="vllm")
    config, blocks = read(tmp_path / "blocks")
    assert config["original_lm_head"] == (output == "shared") and config["medusa_fc_bias"] is True
    for k, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert torch.equal(blocks[f"blocks.{k}.layers.{j}.weight"], ours[f"{k}.{j}.linear.weight"])
    rows = on_disk.output_layer.weight
    if output == "shared":
        assert torch.equal(blocks["lm_head.weight"], rows)
    else:
        assert torch.equal(blocks["lm_heads.1.weight"], ours["1.2.weight"])


def test_a_cut_vocabulary_of_medusa_is_for_our_engine_alone(trained, tmp_path):
    with pytest.raises(BadInput, match="draft_vocab_size 24: engines draft the whole vocabulary from Medusa heads"):
        export_head(trained("medusa", draft_vocab_size=24), tmp_path / "out", to="vllm")
    assert not (tmp_path / "out").exists()


def test_a_cut_vocabulary_of_eagle_1_is_left_out(trained, tmp_path):
    head = export_head(trained("eagle", draft_vocab_size=24), tmp_path / "out", to="vllm")
    assert not {"d2t", "t2d"} & set(read(tmp_path / "out")[1])
    why = "engines draft the whole vocabulary from EAGLE-1 heads: draft_vocab_size has no effect there"
    assert notes(head) == [why]


def test_the_adapter_of_a_target_lies_in_a_folder_of_its_own(saved_target, tmp_path):
    head = build_head(MedusaConfig(num_depths=2, target_lora_rank=2), Target.load(saved_target))
    save_head(head, tmp_path / "head")
    exported = export_head(tmp_path / "head", tmp_path / "out", to="vllm")
    [command], [said] = serve_commands(exported, "out", to="vllm").values(), notes(exported)
    assert command.startswith("vllm serve MERGED_TARGET ") and "target_adapter/ on it" in said
    assert check_folder(tmp_path / "out").problems == []
    assert (tmp_path / "out" / "target_adapter" / "adapter_model.safetensors").is_file()


def test_weights_take_the_targets_dtype_or_the_one_asked_for(trained, saved_target, tmp_path):
    run, half = trained("eagle3"), tmp_path / "half"
    shutil.copytree(saved_target, half)
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    cases: list[tuple[dict[str, Any], torch.dtype]] = [
        ({}, torch.float32),
        ({"target": str(half)}, torch.bfloat16),
        ({"dtype": "fp16"}, torch.float16),
    ]
    for how, wanted in cases:
        out = tmp_path / str(wanted)
        export_head(run, out, to="vllm", **how)
        config, tensors = read(out)
        assert tensors["fc.weight"].dtype == wanted and tensors["d2t"].dtype == torch.int64
        assert config["torch_dtype"] == config["dtype"] == str(wanted).removeprefix("torch.")
        assert check_folder(out).problems == []


DFLASH = {"sample_from_anchor": False, "markov_rank": 0}


@pytest.mark.parametrize(("family", "options"), [("eagle", {}), ("eagle3", {"num_layers": 2}), ("block", DFLASH)])
def test_layers_in_fp8_are_the_heads_own_up_to_rounding(trained, tmp_path, on_disk, family, options):
    run, out = trained(family, **options), tmp_path / "out"
    head = export_head(run, out, to="vllm", dtype="fp8")
    assert check_folder(out).problems == [] and list(serve_commands(head, str(out), to="vllm")) == ["vllm"]
    assert check_folder(out, to="sglang").problems == [f"quantization_config: {ONLY}"]
    stored, found = read(out)[1], load_head(out, on_disk).state_dict()
    for name, value in load_head(run / "final", on_disk).state_dict().items():
        if name.endswith("_proj.weight"):
            assert stored[name].dtype == torch.float8_e4m3fn
            largest = value.abs().amax(1, keepdim=True)  # 448: numbers of 3 bits behind the first, down to 2 ** -6
            assert ((found[name] - value).abs() <= value.abs() / 16 + largest * 2**-18).all()
        else:
            assert torch.equal(found[name], value)


OTHERS = [("medusa", "vllm"), ("eagle3", "sglang"), ("eagle3", "speculators"), ("block", "vllm")]  # a DSpark


@pytest.mark.parametrize(("family", "to"), OTHERS)
def test_fp8_that_no_engine_was_seen_to_read_is_refused(trained, tmp_path, family, to):
    with pytest.raises(BadInput, match="--dtype fp8: only vLLM was seen to read FP8, of EAGLE-3, EAGLE-1 and DFlash"):
        export_head(trained(family), tmp_path / "out", to=to, dtype="fp8")
    assert not (tmp_path / "out").exists()


def test_a_target_is_found_from_another_folder(saved_target, tmp_path, monkeypatch):
    """A relative path of training is recorded as an absolute one, so that the export takes the target's dtype."""
    shutil.copytree(saved_target, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    monkeypatch.chdir(tmp_path)
    save_head(build_head(EagleConfig(), Target.load("model")), tmp_path / "run" / "final")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert notes(export_head(tmp_path / "run", tmp_path / "out", to="vllm")) == []
    assert read(tmp_path / "out")[1]["fc.weight"].dtype == torch.bfloat16


def gone(run, folder):
    """The run, as if its target had been removed."""
    path = run / "final" / "config.json"
    config = json.loads(path.read_text())
    config["headstart"]["target"]["name"] = str(folder / "gone")
    path.write_text(json.dumps(config))
    return run


def test_a_target_that_is_gone_is_an_error_where_its_config_decides(trained, tmp_path):
    """By its dtype, unless that is given; and by how it scales its embeddings, where a folder may need the table."""
    for family in ("eagle", "eagle3", "block"):
        run = gone(trained(family), tmp_path)
        for to in ("vllm", "sglang"):
            with pytest.raises(BadInput, match="gone: not there, and what is written depends on how it scales"):
                export_head(run, tmp_path / "out", to=to, dtype="float16")
            assert not (tmp_path / "out").exists()
    run = gone(trained("medusa"), tmp_path)
    with pytest.raises(
        BadInput, match="gone: not there, and weights take its dtype: name it with --target, or a dtype"
    ):
        export_head(run, tmp_path / "out", to="vllm")
    assert not (tmp_path / "out").exists()
    [line] = notes(export_head(run, tmp_path / "out", to="vllm", dtype="float16"))
    assert line.endswith("gone is not there: weights are in float16")
    with pytest.raises(BadInput, match="target .*nowhere: no such folder"):
        export_head(run, tmp_path / "other", to="vllm", target=str(tmp_path / "nowhere"))


def test_a_target_of_other_weights_is_said(trained, tiny_model, tmp_path):
    """As no shape need differ, and the text stays right."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "same")
    run = trained("eagle3")
    assert notes(export_head(run, tmp_path / "out", to="vllm", target=str(tmp_path / "same"))) == []
    model.lm_head.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "other")
    [line] = notes(export_head(run, tmp_path / "again", to="vllm", target=str(tmp_path / "other")))
    assert line.startswith(f"target {tmp_path / 'other'}: other weights than those that the head was trained on (")


@pytest.mark.parametrize(("family", "is_said"), [("eagle", True), ("eagle3", True), ("block", True), ("medusa", False)])
def test_what_vllm_needs_for_gemma_3_is_said(family, is_said, trained, tmp_path):
    head = export_head(trained(family), tmp_path / "out", to="vllm")
    of_gemma = replace(head, target_config={**(head.target_config or {}), "model_type": "gemma3_text"})
    assert [line for line in notes(of_gemma) if "--model-impl transformers" in line] == [GEMMA_3] * is_said


def test_what_no_engine_loads_is_refused(trained, tmp_path):
    cases = [("medusa", "sglang", "sglang loads no medusa heads; expected --to vllm")]
    cases += [("eagle", "speculators", "speculators loads no eagle heads; expected --to vllm or sglang")]
    cases += [("eagle3", "tgi", "--to tgi: expected one of vllm, sglang, llama.cpp, speculators, hf")]
    cases += [("mtp", "vllm", "no engine loads MTP modules of layout deepseek_v3 with a llama target")]
    for family, to, problem in cases:
        with pytest.raises(BadInput, match=problem):
            export_head(trained(family), tmp_path / "out", to=to)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "nothing half-written stays"


def test_a_path_that_switches_the_method_is_refused(trained, tmp_path):
    for family, name in (
        ("medusa", "My-EAGLE3-medusa"),
        ("draft_lm", "dflash/x"),
        ("eagle", "eagle3"),
        ("eagle3", "eagle-3"),
    ):
        with pytest.raises(BadInput, match="in its path makes vLLM take"):
            export_head(trained(family), tmp_path / name, to="vllm")
    export_head(trained("eagle3"), tmp_path / "eagle3", to="vllm")


@pytest.fixture
def of_another_kind(saved_target, tmp_path):
    """The target under a config of another type."""

    def made(model_type, **changes):
        folder = tmp_path / model_type
        shutil.copytree(saved_target, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type, **changes}))
        return folder

    return made


@pytest.fixture
def scaling_target(of_another_kind):
    """A target whose embedding module scales its table."""
    return of_another_kind("gemma2")


@pytest.mark.parametrize(("family", "options"), [("eagle", {}), ("eagle3", {}), ("block", DFLASH)])
def test_of_a_target_that_scales_its_embeddings_vllm_is_given_the_scaled_table(
    family, options, trained, scaling_target, tmp_path
):
    """SGLang shares the bare one, so it is given no such head."""
    run = trained(family, **options)
    export_head(run, tmp_path / "out", to="vllm", target=str(scaling_target))
    table = load_file(scaling_target / "model.safetensors")["model.embed_tokens.weight"]
    ours = load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"]
    torch.testing.assert_close(ours, table.to(ours.dtype) * table.shape[1] ** 0.5, rtol=0.01, atol=0)
    assert not check_export(tmp_path / "out", to="vllm").problems
    [problem] = check_export(tmp_path / "out", to="sglang").problems
    assert problem.startswith("embedding_scale ")
    with pytest.raises(BadInput, match="gemma2 scales its embeddings"):
        export_head(run, tmp_path / "other", to="sglang", target=str(scaling_target))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("family", "engine"), [("eagle", "sglang"), ("eagle3", "vllm"), ("block", "vllm")])
def test_the_bare_table_serves_where_the_model_scales_behind_it(engine, family, trained, of_another_kind, tmp_path):
    target = of_another_kind("granite", embedding_multiplier=6.0)
    export_head(trained(family), tmp_path / "out", to=engine, target=str(target))
    assert "embed_tokens.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "options", "scales", "engines"),
    [
        ("eagle", {}, False, {"vllm", "sglang"}),
        ("eagle", {}, True, {"vllm"}),
        ("eagle", {"bias": True}, False, {"sglang"}),
        ("eagle3", {}, True, {"vllm"}),
        ("eagle3", {"norm_before_residual": True}, False, {"vllm"}),
        ("eagle3", {"sliding_window": 8}, False, {"vllm"}),
        ("eagle3", {"parallel": True, "mask_token_id": 5}, False, {"vllm"}),
        ("block", {**DFLASH, "output": "own"}, False, {"vllm"}),
        ("block", {**DFLASH, **LATTICE, "output": "own"}, True, set()),
        ("draft_lm", {"parallel": True, "mask_token_id": 5}, False, {"vllm"}),
    ],
)
def test_a_command_is_told_for_an_engine_only_if_the_head_can_be_exported_for_it(
    trained, scaling_target, tmp_path, family, options, scales, engines
):
    run, target = trained(family, **options), str(scaling_target) if scales else None
    for to in ("vllm", "sglang"):
        if to in engines:
            head = export_head(run, tmp_path / to, to=to, target=target)
            assert {"vllm", "sglang"} & set(serve_commands(head, str(tmp_path / to), to=to)) == engines
        else:
            with pytest.raises(BadInput):
                export_head(run, tmp_path / to, to=to, target=target)


def test_every_family_is_exported_or_known_not_to_be(on_disk):
    """A family without serving is refused with that reason; what another says of engines is in their words."""
    for family in HEADS:
        assert set(engines_of(family)) <= {*ENGINES, *LAYOUTS}
    assert EagleConfig().bias is False


def test_a_window_for_decoding_alone_is_in_the_config_that_vllm_reads(trained, tmp_path):
    export_head(trained("eagle3"), tmp_path / "vllm", to="vllm", window="16")
    config, _ = read(tmp_path / "vllm")
    assert config["sliding_window"] == 16 and config["layer_types"] == ["sliding_attention"]
    assert check_folder(tmp_path / "vllm").problems == []


@pytest.mark.parametrize(("family", "window", "sink"), [("eagle3", "16", ""), ("eagle", "16:4", "4")])
def test_and_a_flag_for_sglang(trained, tmp_path, family, window, sink):
    head = export_head(trained(family), tmp_path / "served", to="sglang", window=window)
    assert "sliding_window" not in read(tmp_path / "served")[0]
    told = serve_commands(head, "served", to="sglang")["sglang"]
    sink = f" --speculative-draft-sink-size {sink}" if sink else ""
    assert told.endswith(f"--speculative-draft-window-size 16{sink}")


@pytest.mark.parametrize(
    ("family", "options", "to", "window"),
    [
        ("eagle3", {}, "vllm", "16:4"),
        ("eagle3", {}, "sglang", "16:4"),
        ("eagle3", {}, "llama.cpp", "16"),
        ("eagle3", {"sliding_window": 8}, "vllm", "16"),
        ("medusa", {}, "vllm", "16"),
        ("block", {}, "sglang", "16"),
    ],
)
def test_a_window_that_an_engine_has_not_is_refused(trained, tmp_path, family, options, to, window):
    with pytest.raises(BadInput, match=f"--draft-window {window}: {to} has none for this"):
        export_head(trained(family, **options), tmp_path / "out", to=to, window=window)
    assert not (tmp_path / "out").exists()
