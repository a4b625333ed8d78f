"""Heads for llama.cpp: what it cannot serve is refused before anything is written, and damaged files are named."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf_files
import numpy as np
import pytest
import torch
from damaging import at_first, key, put, rewritten
from headstart.base.errors import BadInput
from headstart.engines.check import check_export
from headstart.engines.export import export_head, read_folder
from headstart.engines.heads import build_head, head_class, save_head
from headstart.engines.llamacpp import Conversion, serve_lines
from headstart.engines.servers.llama_server import served_as
from headstart.scripts.export_command import check, export
from headstart.targets.target import Target

SOUND = {
    "eagle3": gguf_files.eagle3,
    "dspark": gguf_files.dspark,
    "draft_lm": gguf_files.draft_model,
    "mtp": gguf_files.with_modules,
}
DFLASH = {"markov_rank": 0, "sample_from_anchor": False}
# what stands in for llama.cpp's converter: it writes the sound head, for the folder's own draft vocabulary and layers
CONVERTER = """
import json, sys
sys.path.insert(0, {here!r})
import gguf_files
print("a word on the way", file=sys.stderr)
at = sys.argv
out, source = at[at.index("--outfile") + 1], at[1]
if out.endswith("target.gguf"):
    keys, tensors = gguf_files.draft_model()
elif "markov_rank" in (config := json.load(open(source + "/config.json"))):
    keys, tensors = gguf_files.dspark()
    keys["dflash.target_layers"] = [i + 1 for i in config["target_layer_ids"]]
    keys["tokenizer.ggml.mask_token_id"] = config["mask_token_id"]
else:
    keys, tensors = gguf_files.eagle3()
    keys["eagle3.target_layers"] = config["eagle_aux_hidden_state_layer_ids"]
{then}
gguf_files.write(out, keys, tensors)
"""


@pytest.fixture
def checkout(tmp_path):
    """checkout(code): a llama.cpp whose converter does that before it writes."""

    def make(then=""):
        folder = tmp_path / "llama.cpp"
        folder.mkdir(exist_ok=True)
        here = str(Path(gguf_files.__file__).parent)
        (folder / "convert_hf_to_gguf.py").write_text(CONVERTER.format(here=here, then=then))
        return folder

    return make


def test_a_head_and_its_target_are_converted_checked_and_their_command_told(
    trained, checkout, tmp_path, capsys, monkeypatch
):
    run, out = trained("eagle3", draft_vocab_size=24, num_depths=5), tmp_path / "eagle3-served"
    monkeypatch.delenv("LLAMA_CPP_PYTHON", raising=False)
    export(run, out, to="llama.cpp", llama_cpp=checkout(), target_outtype="bf16")
    said = capsys.readouterr()
    flags = "--spec-type draft-eagle3 --spec-draft-n-max 5 --spec-draft-p-min 0"
    assert said.out.splitlines()[-1] == f"llama-server -m {out}/target.gguf -md {out}/head.gguf {flags}"
    assert said.err == "" and {path.name for path in out.glob("*.gguf")} == {"head.gguf", "target.gguf"}
    check(out)
    check(out / "head.gguf")
    assert [line.rsplit(": ", 1)[1] for line in capsys.readouterr().out.splitlines()] == ["fine", "fine"]


def test_without_a_checkout_the_command_that_is_left_is_told(trained, saved_target, tmp_path):
    head = export_head(trained("eagle3", num_depths=2), tmp_path / "out", to="llama.cpp")
    convert, serve = serve_lines(head, "out", Conversion(outtype="q8_0"))
    assert convert == (
        "python llama.cpp/convert_hf_to_gguf.py out --outfile out/head.gguf --outtype q8_0 --model-name out "
        f"--target-model-dir {saved_target}"
    )
    assert serve.startswith("llama-server -m TARGET.gguf -md out/head.gguf --spec-type draft-eagle3")
    assert check_export(tmp_path / "out", to="llama.cpp").problems == []


@pytest.mark.parametrize(
    ("family", "target", "words"),
    [
        ("eagle3", None, {"-m": "TARGET.gguf", "-md": "my 'out'/head.gguf"}),
        ("draft_lm", "my T.gguf", {"-m": "my T.gguf", "-md": "my 'out'/head.gguf"}),
    ],
)
def test_the_command_is_ready_for_a_shell(trained, saved_target, monkeypatch, family, target, words):
    monkeypatch.setattr("headstart.engines.llamacpp.target_folder", lambda head: saved_target)
    head = read_folder(trained(family))
    *_, serve = serve_lines(replace(head, target=target or head.target), "my 'out'", Conversion())
    said = shlex.split(serve)
    assert {flag: said[said.index(flag) + 1] for flag in words} == words and said[0] == "llama-server"


DSPARK = {"draft_vocab_size": 24, "output": "own", "confidence": True, "markov_rank": 8, "num_layers": 2}


def test_a_block_drafter_is_converted_with_its_target_and_served_as_what_it_is(trained, checkout, tmp_path, capsys):
    run, out = trained("block", num_depths=3, **DSPARK), tmp_path / "out"
    export(run, out, to="llama.cpp", llama_cpp=checkout())
    said = capsys.readouterr()
    assert said.err == "" and f"-md {out}/head.gguf --spec-type draft-dspark --spec-draft-n-max 3" in said.out
    assert served_as(out / "head.gguf")[1] == "dspark"
    convert, _ = serve_lines(read_folder(run), "told", Conversion())
    assert "--target-model-dir" in convert, "tokenizer and tables are the target's"


def test_a_draft_model_of_a_target_in_gguf_is_served_beside_that_file(trained, tmp_path, saved_target, monkeypatch):
    run = trained("draft_lm", num_depths=4)
    monkeypatch.setattr("headstart.engines.layouts.writing.gguf_folder", lambda path: saved_target)
    monkeypatch.setattr("headstart.targets.loading.gguf_folder", lambda path: saved_target)
    head = export_head(run, tmp_path / "out", to="llama.cpp", target="T-Q4.gguf")
    convert, serve = serve_lines(head, "out", Conversion())
    assert "--target-model-dir" not in convert and "--outtype f32" in convert
    assert serve.startswith("llama-server -m T-Q4.gguf -md out/head.gguf --spec-type draft-simple --spec-draft-n-max 4")
    with pytest.raises(BadInput, match="the target is a GGUF file already"):
        export_head(run, tmp_path / "x", to="llama.cpp", target="T.gguf", conversion=Conversion(target_outtype="f16"))


@pytest.mark.parametrize(
    ("family", "options", "problem"),
    [
        ("eagle3", {"fc_norm": True}, "fc_norm: it has no such norm"),
        ("eagle3", {"norm_output": True}, "norm_output: it has no such norm"),
        ("eagle3", {"num_layers": 2}, "num_hidden_layers: 2, its heads have one layer"),
        ("eagle3", {"feature_layers": [1, 3]}, "num_aux_hidden_states: 2, its heads read 3 features"),
        ("block", {"output": "own"}, "drops an output layer over the whole vocabulary"),
        ("block", {**DFLASH, "draft_vocab_size": 24, "output": "own"}, "draft_vocab_size: 24, its DFlash drafts"),
        ("block", {**DFLASH, "confidence": True}, "confidence_head: its graph has one beside a Markov head only"),
        ("block", {"markov_rank": 0}, "sample_from_anchor without a Markov head"),
        ("medusa", {"num_depths": 2}, "llama.cpp loads no medusa heads"),
        ("eagle", {}, "llama.cpp loads no eagle heads"),
        ("mtp", {}, "no graph for MTP modules of a llama target"),
    ],
)
def test_what_llama_cpp_cannot_serve_is_refused_by_name(trained, checkout, tmp_path, family, options, problem):
    run = trained(family, **options)
    with pytest.raises(BadInput, match=problem):
        export_head(run, tmp_path / "out", to="llama.cpp", conversion=Conversion(checkout()))
    assert not (tmp_path / "out").exists(), "nothing half-written stays"


def test_a_target_whose_graph_hands_out_no_features_is_refused(tiny_target, tmp_path):
    target = tiny_target("qwen2")
    target.model.save_pretrained(tmp_path / "qwen2")
    head = build_head(head_class("eagle3").config_class(type="eagle3"), Target.load(tmp_path / "qwen2"))
    save_head(head, tmp_path / "run" / "final")
    with pytest.raises(BadInput, match="its graph of a qwen2 target outputs no features"):
        export_head(tmp_path / "run", tmp_path / "out", to="llama.cpp")


def test_a_target_that_is_no_local_folder_is_refused_before_anything_is_written(trained, tmp_path, monkeypatch):
    run = trained("eagle3")
    at = run / "final" / "config.json"
    at.write_text(at.read_text().replace(str(json.loads(at.read_text())["headstart"]["target"]["name"]), "OWNER/MODEL"))
    config = {"model_type": "llama", "dtype": "float32"}
    monkeypatch.setattr(
        "headstart.engines.export.read_model_config",
        lambda named: SimpleNamespace(
            dtype=torch.float32, get_text_config=lambda: SimpleNamespace(to_dict=config.copy)
        ),
    )
    with pytest.raises(BadInput, match="target OWNER/MODEL: no local folder; name one with --target"):
        export_head(run, tmp_path / "out", to="llama.cpp")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("then", "problem"),
    [
        ("sys.exit('no such architecture')", "convert_hf_to_gguf.py: no such architecture"),
        ("import nothing_like_it", "No module named 'nothing_like_it' .install it, or name an interpreter"),
    ],
)
def test_a_conversion_that_fails_leaves_nothing(trained, checkout, tmp_path, then, problem):
    with pytest.raises(BadInput, match=problem):
        export_head(trained("eagle3"), tmp_path / "out", to="llama.cpp", conversion=Conversion(checkout(then)))
    assert not (tmp_path / "out").exists()


def test_wrong_options_are_refused_before_anything_is_read(tmp_path):
    refused: list[tuple[dict[str, Any], str]] = [
        ({"outtype": "q3"}, "--outtype q3: expected one of f32, f16, bf16, q8_0"),
        ({"target_outtype": "q3"}, "--target-outtype q3"),
        ({"llama_cpp": tmp_path}, "no convert_hf_to_gguf.py in it"),
    ]
    for values, problem in refused:
        with pytest.raises(BadInput, match=problem):
            Conversion(**values)
    with pytest.raises(BadInput, match="go with --to llama.cpp"):
        export(tmp_path, tmp_path / "out", to="vllm", outtype="f16")


DAMAGED = {
    # layer ids and flags
    "no ids": ("eagle3", key("eagle3.target_layers", ...), "target_layers: expected ascending layer numbers, found N"),
    "ids of text": ("eagle3", key("eagle3.target_layers", ["1", "2", "3"]), "expected ascending layer numbers"),
    "ids fall": ("eagle3", key("eagle3.target_layers", [3, 2, 1]), "do not ascend"),
    "ids repeat": ("eagle3", key("eagle3.target_layers", [1, 1, 2]), "do not ascend"),
    "ids below 0": ("eagle3", key("eagle3.target_layers", [-1, 1, 2]), "do not ascend from 0"),
    "no rotation": ("eagle3", key("eagle3.rope.freq_base", ...), "rope.freq_base: missing"),
    # tokenizer
    "no tokens": ("eagle3", key("tokenizer.ggml.tokens", ...), "tokenizer.ggml.tokens: missing"),
    "other tokens": ("eagle3", key("tokenizer.ggml.tokens", ["a", "b"]), "2 tokens, but eagle3.vocab_size 61"),
    # draft vocabulary
    "offsets": ("eagle3", put("d2t", lambda ids: ids - np.arange(len(ids)) // 2 * 2), "absolute ids here, not offsets"),
    "outside": ("eagle3", put("d2t", at_first(61)), "draft token 0 is target token 61, outside 0..60"),
    "below 0": ("eagle3", put("d2t", at_first(-1)), "target token -1"),
    # values
    "NaN": ("eagle3", put("blk.0.attn_v.weight", at_first(np.nan)), "attn_v.weight: 1 values are NaN or infinite"),
    "infinite": ("eagle3", put("output.weight", at_first(np.inf)), "output.weight: 1 values are NaN or infinite"),
    "NaN in a Markov head": ("dspark", put("markov_w1.weight", at_first(np.nan)), "markov_w1.weight: 1 values are NaN"),
    "NaN in a module": ("mtp", put("blk.2.nextn.enorm.weight", at_first(np.nan)), "enorm.weight: 1 values are NaN"),
    # block drafters
    "causal": ("dspark", key("dflash.attention.causal", True), "attention.causal: expected false, found True"),
    "causal by default": ("dspark", key("dflash.attention.causal", ...), "causal: expected false, found None"),
    "no slot to begin with": ("dspark", key("dflash.sample_from_anchor", ...), "sample_from_anchor: expected true or"),
    "no mask": ("dspark", key("tokenizer.ggml.mask_token_id", ...), "mask_token_id: None, expected 0 to 60"),
    "a mask beyond": ("dspark", key("tokenizer.ggml.mask_token_id", 61), "mask_token_id: 61, expected 0 to 60"),
    "no feature": ("dspark", key("dflash.target_layers", ...), "dflash.target_layers: expected ascending"),
    "offsets of a block": ("dspark", put("d2t", lambda ids: ids - np.arange(len(ids)) // 2 * 2), "not offsets"),
    # whole models
    "a model without tokens": ("draft_lm", key("tokenizer.ggml.tokens", ...), "tokenizer.ggml.tokens: missing"),
}


@pytest.mark.parametrize("kind", SOUND)
def test_sound_files_have_no_problem(tmp_path, kind):
    found = check_export(gguf_files.write(tmp_path / "sound.gguf", *SOUND[kind]()))
    assert found.problems == [] and found.layout == f"{kind} (GGUF)"


@pytest.mark.parametrize("case", DAMAGED)
def test_each_damage_of_a_gguf_file_is_named(tmp_path, case):
    kind, fault, problem = DAMAGED[case]
    keys, tensors = SOUND[kind]()
    fault(keys, tensors)
    problems = check_export(gguf_files.write(tmp_path / "bad.gguf", keys, tensors)).problems
    assert any(re.search(problem, line) for line in problems), problems


def test_files_that_are_cut_off_or_no_gguf_are_named(tmp_path):
    path = gguf_files.write(tmp_path / "cut.gguf", *gguf_files.eagle3())
    whole = path.read_bytes()
    for size in (len(whole) - 5000, 400):
        path.write_bytes(whole[:size])
        [problem] = check_export(path).problems
        assert problem.startswith("not a whole GGUF file")
    (tmp_path / "no.gguf").write_bytes(b"PK..")
    with pytest.raises(BadInput, match="not a GGUF file"):
        check_export(tmp_path / "no.gguf")
    with pytest.raises(BadInput, match="no such file"):
        check_export(tmp_path / "nowhere.gguf")


EAGLE3, BLOCK = ("eagle3", {"draft_vocab_size": 24}), ("block", {"num_depths": 3, **DSPARK})
LAYERS = "target_layers: .1, 2, 3., but config.json has"
FOLDERS = {
    "another layer": (*EAGLE3, {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, LAYERS),
    "another norm": (*EAGLE3, {"norm_before_residual": True}, "norm_before_residual: False, but config.json has"),
    "fc_norm": (*EAGLE3, {"fc_norm": True}, "fc_norm: it has no such norm"),
    "another size": (*EAGLE3, {"draft_vocab_size": 20}, "24 draft tokens, but draft_vocab_size 20"),
    "no draft size": (*EAGLE3, {"draft_vocab_size": ...}, "the converter takes the folder for a whole Llama"),
    "a bias": (*EAGLE3, {"attention_bias": True}, "attention_bias: expected False"),
    "another rotation": (
        *EAGLE3,
        {"rope_scaling": {"rope_type": "dynamic"}},
        "rope_scaling: of type dynamic, expected",
    ),
    "a slot more": (*BLOCK, {"block_size": 4}, "dflash.block_size: 3, but config.json has block_size 4"),
    "inputs of layers": (*BLOCK, {"target_layer_ids": [1, 2, 3]}, f"{LAYERS} target_layer_ids .1, 2, 3."),
    "the other slot": (
        *BLOCK,
        {"sample_from_anchor": False},
        "sample_from_anchor: True, but config.json has sample_from",
    ),
    "another mask": (*BLOCK, {"mask_token_id": 5}, "mask_token_id: 0, but config.json has mask_token_id 5"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_and_the_file_made_of_it_must_agree(trained, checkout, tmp_path, case):
    family, options, changes, problem = FOLDERS[case]
    run, out = trained(family, **options), tmp_path / "out"
    export_head(run, out, to="llama.cpp", conversion=Conversion(checkout()))
    config = json.loads((out / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    problems = check_export(out).problems
    assert any(re.search(problem, line) for line in problems), problems


def test_a_folder_for_vllm_is_asked_whether_it_can_be_converted(trained, tmp_path):
    out = tmp_path / "out"
    export_head(trained("eagle3", num_layers=2), out, to="vllm")
    assert check_export(out).problems == []
    assert any("its heads have one layer" in line for line in check_export(out, to="llama.cpp").problems)
    rewritten(out, put("fc.weight", lambda weight: weight[:, :-1]))
    assert any("tensor fc.weight: expected" in line for line in check_export(out, to="llama.cpp").problems)
