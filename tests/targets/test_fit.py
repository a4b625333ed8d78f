"""A head that does not fit its target is refused, with the numbers, before any weight is loaded."""

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.configs.loader import build, read_config, shipped
from headstart.engines.heads import build_head, head_class
from headstart.heads.stored.fit import TRAINING_BYTES, check_fit, head_size
from headstart.targets.loading import TargetConfig
from headstart.targets.skeleton import load_skeleton
from headstart.targets.target import Target


def head_config(name="eagle3", **changes):
    raw = read_config(f"heads/{name}.yaml")["head"]
    return build(head_class(raw["type"]).config_class, {**raw, **changes}, where="head")


@pytest.fixture
def no_weights(saved_target, tmp_path):
    """The saved target's folder, but only its config."""
    (tmp_path / "config.json").write_text((saved_target / "config.json").read_text())
    return TargetConfig(path=str(tmp_path))


@pytest.mark.parametrize("name", [path.stem for path in shipped("heads/*.yaml")])
def test_the_size_is_that_of_the_head_when_built(name, saved_target, no_weights):
    config = head_config(name)
    size = head_size(config, load_skeleton(no_weights))
    assert config == head_config(name), "the config was not touched"
    head = build_head(config, Target.load(saved_target, dtype="float32"))
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    assert (size.feature_layers, size.parameters) == (head.feature_layers, trained)
    assert size.memory_bytes == TRAINING_BYTES * trained
    assert size.serving_bytes == 4 * trained


@pytest.mark.fast_only(family=["gemma3", "gpt_neox", "qwen3_5"])
@pytest.mark.parametrize("head_type", ["draft_lm", "mtp"])  # which have layers of the target's kind
def test_every_kind_of_target_has_a_skeleton(family, head_type, tiny_model, tmp_path):
    tiny_model(family).config.save_pretrained(tmp_path)
    skeleton = load_skeleton(TargetConfig(path=str(tmp_path)))
    assert {p.device.type for p in skeleton.model.parameters()} == {"meta"}
    built = build_head(head_config(head_type), Target.of(tiny_model(family), name="tiny", fingerprint=""))
    trained = sum(p.numel() for p in built.parameters() if p.requires_grad)
    assert head_size(head_config(head_type), skeleton).parameters == trained


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("eagle3", {"feature_layers": [1, 2, 9]}, r"feature layer 9: .* has layers 0\.\.3"),
        (
            "eagle3",
            {"draft_vocab_size": 100},
            "draft vocabulary of 100 tokens: should be between 1 and the target's 61",
        ),
        ("eagle3", {"feature_layers": [3, 1]}, r"head.feature_layers: \[3, 1\]: must ascend"),
        ("draft_lm", {"num_layers": 9}, "head.num_layers 9: expected 1 to 4"),
        ("draft_lm", {"hidden_size": 33}, "head.hidden_size 33: .*not a multiple of .*4"),
    ],
)
def test_what_does_not_fit_is_refused_without_weights(name, changes, problem, no_weights):
    with pytest.raises(BadInput, match=problem):
        check_fit(head_config(name, **changes), no_weights)


def test_what_fits_passes(no_weights):
    check_fit(head_config("eagle3", feature_layers=[0, 3], draft_vocab_size=61), no_weights)
    check_fit(head_config("mtp", init="checkpoint"), no_weights)  # read with the target's weights


def test_a_target_that_cannot_be_built_without_weights_is_left_to_its_loading(no_weights, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("needs values")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", refuse)
    check_fit(head_config(feature_layers=[1, 2, 9]), no_weights)
    with pytest.raises(BadInput, match="cannot be built without weights: needs values"):
        load_skeleton(no_weights)


def test_a_skeleton_takes_the_stored_dtype(tiny_model, tmp_path):
    model = tiny_model("llama")
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(tmp_path)
    size = head_size(head_config("medusa"), load_skeleton(TargetConfig(path=str(tmp_path))))
    assert size.serving_bytes == 2 * size.parameters
