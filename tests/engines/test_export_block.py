"""Block drafters in engines' layouts: every flag is written, heads come back the same, and a wrong flag is found."""

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from damaging import drop, key, put, rewritten
from headstart.base.errors import BadInput
from headstart.engines.check import check_folder
from headstart.engines.export import export_head, read_folder, serve_commands
from headstart.engines.families.table import SERVINGS
from headstart.engines.heads import load_head

DFLASH = {"sample_from_anchor": False, "markov_rank": 0}
DFLASH2 = {**DFLASH, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 5}
LILICORR = {**DFLASH, "selector_rank": 6, "selector_top_k": 4, "lattice_layers": 2}
ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
OWN = {"intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
OWN |= {"rms_norm_eps": 1e-5, "rope_parameters": ROPE}
KINDS = {
    "dspark": {},
    "dspark, its own layers": {"feature_layers": [0, 2], "architecture": OWN},
    "dspark, a window": {"sample_from_anchor": False, "sliding_window": 6},
    "dspark, cut": {"draft_vocab_size": 24, "output": "own", "confidence": True},
    "dflash": {**DFLASH, "output": "own"},
    "dflash, a window": {**DFLASH, "sliding_window": 6},
    "dflash2": DFLASH2,
    "lilicorr": {**LILICORR, "lattice_size": 24, "lattice_mlp_ratio": 1.5, "output": "own"},
    "lilicorr, convolutions": {**LILICORR, "conv_group_size": 16, "lattice_size": 32, "lattice_scale": 8.0},
}
SIZES = {"num_depths": 3, "num_layers": 2, "markov_rank": 8}


@pytest.fixture
def trained(trained, on_disk):
    """trained(**options): such a block drafter, and its folder."""

    def make(**options):
        run = trained("block", **{**SIZES, **options})
        return load_head(run / "final", on_disk), run

    return make


@pytest.fixture
def same_drafts(on_disk, make_batch):
    """same_drafts(head, folder): what is loaded from the folder, whose tensors, keys and drafts are the head's."""

    def check(head, folder):
        loaded, batch = load_head(folder, on_disk), make_batch(on_disk, head)
        assert loaded.mask_token == head.mask_token and loaded.feature_layers == head.feature_layers
        for name in set(SERVINGS["block"].computes) - {"mask_token_id"}:
            assert getattr(loaded.config, name) == getattr(head.config, name), name
        assert head.state_dict().keys() == loaded.state_dict().keys()
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in head.state_dict().items())
        mine, theirs = (each.teacher_forced_logits(batch)[1] for each in (head, loaded))
        torch.testing.assert_close(theirs, mine)
        return loaded

    return check


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_comes_back_the_same(kind, trained, same_drafts, on_disk, tmp_path):
    """Also without our record, as others publish: under names with a prefix, and with copies of the target's tables."""
    head, run = trained(**KINDS[kind])

    def publish(config, tensors):
        del config["headstart_export"]
        if config["architectures"] != ["Qwen3DSparkModel"]:
            for name in ("mask_token_id", "target_layer_ids", "sample_from_anchor", "is_causal"):
                del config[name]
        tensors["embed_tokens.weight"] = on_disk.input_embedding.weight.clone()
        tensors.setdefault("lm_head.weight", on_disk.output_layer.weight.clone())
        for name in [name for name in tensors if name not in ("d2t", "t2d")]:
            tensors[f"model.{name}"] = tensors.pop(name)

    export_head(run, tmp_path / "out", to="vllm")
    assert check_folder(tmp_path / "out").problems == []
    assert load_head(tmp_path / "out", on_disk).config == head.config
    assert same_drafts(head, rewritten(tmp_path / "out", publish)).config.num_depths == 3


@pytest.mark.parametrize(
    ("nested", "beside"),
    [
        ({"use_swa": True}, {"layer_types": ...}),
        ({"use_swa": True, "swa_window_size": 6}, {"layer_types": ["full_attention"] * 2, "sliding_window": ...}),
        ({"swa_window_size": 6, "causal": False}, {"sliding_window": 9}),
        ({"causal": False}, {"mask_token_id": 5, "target_layer_ids": [0, 3]}),
    ],
)
def test_dflash_config_comes_first_as_in_vllm(nested, beside, trained, same_drafts, tmp_path):
    head, run = trained(**KINDS["dflash, a window"])

    def publish(config, tensors):
        for name, value in {**beside, "headstart_export": ..., "is_causal": ..., "dflash_config.causal": ...}.items():
            key(name, value)(config, tensors)
        config["dflash_config"] |= nested

    export_head(run, tmp_path / "out", to="vllm")
    assert same_drafts(head, rewritten(tmp_path / "out", publish)).config.sliding_window == 6


def test_only_an_output_layer_that_is_the_targets_is_shared(trained, on_disk, tmp_path):
    """One that training has moved little is the head's own, and so is the target's where our record says so."""
    _, run = trained(**KINDS["dflash"])
    export_head(run, tmp_path / "out", to="vllm")
    theirs = on_disk.output_layer.weight.detach()
    folder = rewritten(tmp_path / "out", put("lm_head.weight", lambda _: theirs))
    assert load_head(folder, on_disk).config.output == "own"
    rewritten(folder, key("headstart_export", ...))
    for moved, output in ((0.0, "shared"), (5e-4, "own")):
        head: Any = load_head(rewritten(folder, put("lm_head.weight", lambda _, by=moved: theirs + by)), on_disk)
        assert head.config.output == output and torch.equal(head.output_rows(), theirs + moved)


def test_a_head_of_the_speculators_library_is_read(trained, same_drafts, tmp_path):
    head, run = trained(sample_from_anchor=False)
    export_head(run, tmp_path / "out", to="vllm")

    def as_speculators(config, tensors):
        layer = {name: config.pop(name) for name in list(config) if name not in ("block_size", "mask_token_id")}
        layer.pop("headstart_export")
        ids = layer.pop("target_layer_ids")
        del layer["sample_from_anchor"]  # whose default there is false
        config |= {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "speculators_config": {"algorithm": "dspark"},
            "transformer_layer_config": layer,
            "aux_hidden_state_layer_ids": [i + 1 for i in ids],
        }

    same_drafts(head, rewritten(tmp_path / "out", as_speculators))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "lilicorr" not in kind])
def test_the_speculators_layout_comes_back_the_same_also_without_our_record(
    kind, trained, same_drafts, on_disk, tmp_path
):
    head, run = trained(**KINDS[kind])
    export_head(run, tmp_path / "out", to="speculators")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == list(head.feature_layers)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    found = check_folder(tmp_path / "out")
    assert found.problems == [] and found.layout == "block (speculators)"
    assert config["transformer_layer_config"]["is_causal"] is False
    assert load_head(tmp_path / "out", on_disk).config == head.config
    same_drafts(head, rewritten(tmp_path / "out", key("headstart_export", ...)))
    if "dspark" not in kind:
        rewritten(tmp_path / "out", key("transformer_layer_config.is_causal", ...))
        same_drafts(head, rewritten(tmp_path / "out", key("sliding_window_non_causal", ...)))
    causal = {"dspark, a window": ..., "dflash": True}  # vLLM takes sliding layers of DSpark for causal ones
    if kind in causal:
        rewritten(tmp_path / "out", key("sliding_window_non_causal", True))
        damaged = rewritten(tmp_path / "out", key("transformer_layer_config.is_causal", causal[kind]))
        assert any("is_causal" in problem for problem in check_folder(damaged).problems)


SPECULATORS_FAULTS = {
    "causal": ("sliding_window_non_causal", False, "sliding_window_non_causal: expected True"),
    "causal by default": ("sliding_window_non_causal", ..., "sliding_window_non_causal: expected True, found None"),
    "the other slot": ("sample_from_anchor", False, "speculative_tokens: 3, but a block drafts 2"),
    "no slot said": ("sample_from_anchor", ..., "sample_from_anchor: None: engines' defaults differ"),
    "outputs of layers": ("aux_hidden_state_layer_ids", [0, 1, 2], "expected .1, 2, 3.: the head was trained"),
    "a width": ("block_size", 4, "speculative_tokens: 3, but a block drafts 4"),
    "no target": ("speculators_config", {"proposal_methods": [{"speculative_tokens": 3}]}, "name_or_path: missing"),
    "a kind": ("speculators_model_type", "xpress", "speculators_model_type: xpress, expected dflash or"),
    "a kind of model": ("model_type", "speculator_model", "vLLM asks transformers for such a model"),
    "a rotation": ("transformer_layer_config.rope_theta", 5.0, "rope_theta: 5.0, but rope_parameters.rope_theta"),
    "another layer": ("transformer_layer_config.model_type", "llama", "model_type: expected 'qwen3', found 'llama'"),
}


FAULTS = {
    "sample_from_anchor left out": ("dspark", "sample_from_anchor", ..., "sample_from_anchor"),
    "the other slot": ("dspark", "sample_from_anchor", False, "sample_from_anchor: expected True"),
    "a slot more": ("dspark", "block_size", 4, "block_size: expected 3"),
    "inputs of layers": ("dspark", "target_layer_ids", [1, 2, 3], r"target_layer_ids: expected \[0, 1, 2\]"),
    "no such layer": ("dspark", "target_layer_ids", [0, 1, 4], "of a target with layers 0 to 3"),
    "a token beyond": ("dspark", "mask_token_id", 61, "mask_token_id: 61, expected 0 to 60"),
    "a gate": ("dspark", "markov_head_type", "gated", "markov_head_type: expected 'vanilla'"),
    "a head that is not there": ("dspark", "enable_confidence_head", True, "confidence_head.proj.weight: missing"),
    "causal": ("dflash", "dflash_config.causal", True, "causal: expected False"),
    "causal left out": ("dflash", "dflash_config.causal", ..., "causal: expected False"),
    "another mask": ("dflash", "dflash_config.mask_token_id", 5, "dflash_config.mask_token_id: 5"),
    "drafts from the anchor": ("dflash", "sample_from_anchor", True, "sample_from_anchor: expected False"),
    "a window of no size": ("dflash", "layer_types", ["sliding_attention"] * 2, "sliding_window: None: expected"),
    "layers of two kinds": ("dflash", "layer_types", ["sliding_attention", "full_attention"], "expected one kind"),
    "another window": ("dflash, a window", "sliding_window", 8, "sliding_window: 8, but the head was trained with 6"),
    "a window left out": ("dspark, a window", "layer_types", ["full_attention"] * 2, "was trained with 6"),
    "a window for vLLM only": ("dspark, a window", "use_sliding_window", False, "use_sliding_window: expected True"),
    "a lattice's logits": ("lilicorr", "dflash_config.lilicorr_logit_scale", ..., "logit_scale: expected a number"),
    "a lattice's width": (
        "lilicorr",
        "dflash_config.lilicorr_hidden_size",
        0,
        "token_proj.weight: unknown|pass_hidden",
    ),
    "three candidates": ("lilicorr", "dflash_config.lilicorr_candidate_topk", 3, "candidate_topk: 3, expected one of"),
    "heads of a lattice": ("lilicorr", "dflash_config.lilicorr_num_heads", 5, "num_heads: 5 does not divide 24"),
    "no convolutions": ("lilicorr, convolutions", "dflash_config.conv_group_size", ..., "no convolutions without"),
    "another rotation": ("dflash", "partial_rotary_factor", 0.5, "partial_rotary_factor"),
}


ALL_FAULTS = [("vllm", *fault) for fault in FAULTS.values()]
ALL_FAULTS += [("speculators", "dspark", *fault) for fault in SPECULATORS_FAULTS.values()]


@pytest.mark.parametrize(("to", "kind", "name", "value", "problem"), ALL_FAULTS, ids=[*FAULTS, *SPECULATORS_FAULTS])
def test_a_flag_that_costs_acceptance_is_found(to, kind, name, value, problem, copied):
    folder = copied("block", to, **{**SIZES, **KINDS[kind]})
    problems = check_folder(rewritten(folder, key(name, value))).problems
    assert any(re.search(problem, line) for line in problems), problems


@pytest.mark.parametrize(
    ("options", "to", "message"),
    [
        ({"markov_rank": 0}, "vllm", "sample_from_anchor without a Markov head"),
        ({**DFLASH, "output": "own"}, "sglang", "SGLang's DFlash drafts with the target's output layer"),
        ({}, "hf", "hf loads no block heads"),
        ({**LILICORR, "selector_top_k": 5}, "vllm", "engines' lattices have one of"),
        (LILICORR, "speculators", "the speculators layout has no lattice"),
        (LILICORR, "llama.cpp", "it has no LiLiCorr"),
        ({"sliding_window": 6}, "sglang", "sliding_window 6: SGLang lets a slot see earlier slots only"),
    ],
)
def test_what_no_engine_computes_is_not_written(options, to, message, trained, tmp_path):
    with pytest.raises(BadInput, match=message):
        export_head(trained(**options)[1], tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_scaled_logits_are_no_targets_of_what_engines_choose_by_bare_ones(trained, tmp_path):
    """Granite's, of which vLLM's Markov head and choosers would draft other tokens."""
    for options, is_refused in (({}, True), (DFLASH2, True), (LILICORR, True), (DFLASH, False)):
        head = read_folder(trained(**options)[1])
        scaled = replace(head, target_config={**(head.target_config or {}), "logits_scaling": 8.0})
        for one, refused in ((head, False), (scaled, is_refused)):
            problems = SERVINGS["block"].refusals(one, to="vllm")
            assert any("scales or caps its logits" in problem for problem in problems) == refused


def test_a_head_from_before_an_option_has_its_default(trained, on_disk, tmp_path):
    head, run = trained(**DFLASH2)
    config = json.loads((run / "final" / "config.json").read_text())
    del config["headstart"]["head"]["lattice_layers"]
    (run / "final" / "config.json").write_text(json.dumps(config))
    export_head(run, tmp_path / "out", to="vllm")
    assert load_head(tmp_path / "out", on_disk).config == head.config


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("dspark", key("is_causal", True), "causal"),
        ("dspark", key("layer_types", ["sliding_attention"] * 2), "sliding_window: missing"),
        ("dspark", key("layer_types", ["sliding_attention", "full_attention"]), "layer_types"),
        ("dspark", key("markov_head_type", "rnn"), "markov_head_type rnn"),
        ("dspark", key("mask_token_id", ...), "mask_token_id: missing"),
        ("dspark", drop("fc.weight"), "tensor fc.weight"),
        ("dspark", key("is_neox_style", False), "is_neox_style"),
        ("dspark", key("architectures", ["Gemma4DSparkModel"]), "Gemma4DSparkModel: layers of Gemma 4, ours are Qwen3"),
        ("dflash", key("dflash_config.attention_value_scale", 0.5), "dflash_config.attention_value_scale 0.5"),
        ("dflash2", key("dflash_config.input_embedding_scale", 5.7), "embeddings times 5.7 in vLLM, in .* times 1.0"),
        ("dflash2", key("dflash_config.output_multiplier", 0.5), "output_multiplier 0.5: expected 1.0, as"),
        ("dflash2", key("dflash_config.final_logit_softcapping", 30.0), "softcapping 30.0: expected 0.0, as"),
    ],
)
def test_a_block_of_another_kind_is_not_loaded(kind, change, message, copied, on_disk):
    def both(config, tensors):
        del config["headstart_export"]
        change(config, tensors)

    folder = rewritten(copied("block", "vllm", **{**SIZES, **KINDS[kind]}), both)
    with pytest.raises(BadInput, match=message):
        load_head(folder, on_disk)


@pytest.mark.parametrize(
    ("kind", "has_table", "factor", "is_read"),
    [
        ("dflash", False, None, False),
        ("dflash", True, None, True),
        ("dspark", False, None, False),
        ("dspark", True, None, True),
        ("dflash2", False, None, False),
        ("dflash2", False, 32**0.5, True),
        ("dflash2", True, None, True),
        ("dflash2", True, 32**0.5, False),
        ("lilicorr", True, None, False),
    ],
)
def test_a_published_block_is_read_with_embeddings_scaled_as_vllm_scales_them(
    kind, has_table, factor, is_read, copied, tiny_target
):
    """Which are the target's own, or the folder's, of DFlash2 times a key; LiLiCorr's lattice reads the target's."""
    gemma = tiny_target("gemma3")

    def publish(config, tensors):
        del config["headstart_export"]
        if factor is not None:
            config["dflash_config"]["input_embedding_scale"] = factor
        if has_table:
            tensors["embed_tokens.weight"] = gemma.embed(torch.arange(61)[None])[0].clone()

    folder = rewritten(copied("block", "vllm", **{**SIZES, **KINDS[kind]}), publish)
    with nullcontext() if is_read else pytest.raises(BadInput, match="embeddings times .* in vLLM, in .* times 5.65"):
        load_head(folder, gemma)


def test_a_mask_tokens_own_embedding_is_not_left_out(copied, on_disk):
    """Which vLLM reads beside DFlash's weights, and not beside DSpark's."""
    for kind, is_read in (("dspark", False), ("dflash", True)):
        folder = rewritten(copied("block", "vllm", **{**SIZES, **KINDS[kind]}), key("headstart_export", ...))
        (folder / "mask_embedding.pt").touch()
        with pytest.raises(BadInput, match="mask_embedding.pt") if is_read else nullcontext():
            load_head(folder, on_disk)
        shutil.rmtree(folder)


def test_commands_name_the_method_and_the_width(trained, tmp_path):
    for options, method, flags in (({}, "dspark", "DSPARK"), (DFLASH, "dflash", "DFLASH")):
        head = export_head(trained(**options)[1], tmp_path / method, to="vllm")
        commands = serve_commands(head, "served", to="vllm")
        assert f'"method":"{method}","model":"served","num_speculative_tokens":3' in commands["vllm"]
        assert f"--speculative-algorithm {flags} " in commands["sglang"]
        assert commands["sglang"].endswith("--speculative-num-draft-tokens 4")
