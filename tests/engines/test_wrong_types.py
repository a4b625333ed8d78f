"""A value of another type in a published head's config.json is one line that names the file and the key."""

import json
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.engines.export import engines_of, export_head
from headstart.engines.heads import build_head, head_class, load_head, save_head
from headstart.engines.importers import import_head
from json_places import changed, places_in

OTHERS: tuple[Any, ...] = ("sixteen", ["x"], {"x": 1}, 2.5)
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 24, "num_layers": 2},
    "medusa": {"num_depths": 2},
    "mtp": {"layout": "mimo", "num_depths": 1},
    "block": {"markov_rank": 4, "confidence": True},
}
LAYOUTS = [("eagle", "vllm"), ("eagle3", "vllm"), ("eagle3", "speculators"), ("medusa", "vllm"), ("medusa", "")]
LAYOUTS += [("block", "vllm"), ("block", "speculators"), ("mtp", "vllm")]  # a draft model's config is transformers' own


@pytest.fixture
def exported(target_for, tmp_path):
    """exported(family, to): a target, and a folder of that layout as if others had made it, with its config."""

    def make(family, to):
        target = target_for(family)
        config = head_class(family).config_class(**OPTIONS.get(family, {}))
        ids = torch.arange(3, 51, 2) if config.draft_vocab_size else None
        save_head(build_head(config, target, draft_token_ids=ids), tmp_path / "head")
        if to:
            export_head(tmp_path / "head", tmp_path / "out", to=to)
        else:  # our own folders have the names of those that others published
            (tmp_path / "head").rename(tmp_path / "out")
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        for ours in ("headstart_export", "headstart"):
            written.pop(ours, None)
        return target, tmp_path / "out", written

    return make


@pytest.mark.parametrize(("family", "to"), LAYOUTS)
@pytest.mark.slow
def test_no_value_of_another_type_is_more_than_a_line(exported, family, to):
    assert not to or to in engines_of(family)
    target, folder, config = exported(family, to)
    path, num_refused = folder / "config.json", 0
    path.write_text(json.dumps(config))
    import_head(folder, target)
    for key in places_in(config):
        for other in OTHERS:
            path.write_text(json.dumps(changed(config, key, other)))
            try:
                import_head(folder, target)
            except BadInput as error:
                assert str(folder) in str(error) and "\n" not in str(error), (key, other, error)
                num_refused += 1
    assert num_refused >= (0 if family == "medusa" else 3)  # Medusa's import reads tensors alone


CASES = [
    ("block", "vllm", ("block_size",), "16", "block_size: expected a whole number, found '16'"),
    ("block", "vllm", ("block_size",), [16], r"block_size: expected a whole number, found \[16\]"),
    ("block", "vllm", ("target_layer_ids",), 3, "target_layer_ids: expected a list, each item a whole number, found 3"),
    ("block", "speculators", ("aux_hidden_state_layer_ids",), ["1"], "aux_hidden_state_layer_ids: expected a list"),
    ("block", "vllm", ("sample_from_anchor",), "no", "sample_from_anchor: expected true or false, found 'no'"),
    ("eagle3", "vllm", ("num_attention_heads",), "4", "num_attention_heads: expected a whole number, found '4'"),
    ("eagle3", "vllm", ("num_attention_heads",), 0, "num_attention_heads: expected at least 1, found 0"),
    ("eagle3", "vllm", ("rope_theta",), [1.0], r"rope_(parameters.rope_)?theta: expected a number, found \[1.0\]"),
    ("eagle3", "vllm", ("rms_norm_eps",), "1e-6", "rms_norm_eps: expected a number, found '1e-6'"),
    ("eagle3", "vllm", ("rope_parameters",), {"factor": "8"}, "rope_parameters.factor: expected a number or "),
    ("eagle3", "vllm", ("eagle_config",), [1], r"eagle_config: expected an object, found \[1\]"),
    (
        "eagle3",
        "speculators",
        ("transformer_layer_config",),
        5,
        "transformer_layer_config: expected an object, found 5",
    ),
    (
        "eagle3",
        "speculators",
        ("speculators_config", "proposal_methods", 0, "speculative_tokens"),
        "3",
        "speculators_config.proposal_methods.0.speculative_tokens: expected a whole number, found '3'",
    ),
    ("eagle", "vllm", ("num_hidden_layers",), "1", "num_hidden_layers: expected a whole number, found '1'"),
    ("mtp", "vllm", ("num_nextn_predict_layers",), "1", "num_nextn_predict_layers: expected a whole number, found '1'"),
    ("draft_lm", "vllm", ("pard_token",), "<mask>", "pard_token: expected a whole number, found '<mask>'"),
]


@pytest.mark.parametrize(("family", "to", "key", "value", "problem"), CASES)
def test_the_line_names_file_and_key(exported, family, to, key, value, problem):
    target, folder, config = exported(family, to)
    if key == ("rope_theta",):
        config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(changed(config, key, value)))
    with pytest.raises(BadInput, match=f"^head {folder}: config.json: {problem}"):
        import_head(folder, target)


@pytest.mark.parametrize("place", ["headstart", "headstart_export"])
@pytest.mark.parametrize(("key", "value"), [("feature_layers", 5), ("num_depths", "five"), ("type", "medusa")])
def test_our_own_record_is_checked_alike(exported, tmp_path, place, key, value):
    target, folder, _ = exported("eagle3", "vllm")
    export_head(tmp_path / "head", tmp_path / "again", to="vllm")
    folder = tmp_path / ("head" if place == "headstart" else "again")
    config = json.loads((folder / "config.json").read_text())
    config[place]["head"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=f"^head {folder}: ") as caught:
        load_head(folder, target)
    assert key == "type" or f"config.json: {place}.head.{key}: expected a" in str(caught.value)
