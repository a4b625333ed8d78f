"""Exported tensors find their parameters in SGLang: names and shapes, written down from its source, version 0.5.23.

SGLang has no build for CPUs, so this stands in for loading: below is what its draft models hold (llama_eagle.py,
llama_eagle3.py, mimo_mtp.py) and how their `load_weights` renames a checkpoint's tensors. They skip unknown names and
leave what is missing as memory had it, so each parameter has to be filled here, and no tensor left over.
"""

import json
import re

import pytest
import torch
from headstart.engines.export import export_head
from headstart.engines.heads import build_head, head_class, save_head
from headstart.heads.mtp import MtpConfig
from headstart.targets.target import Target
from headstart.targets.weights.tensor_files import read_tensor_files

D, INNER, WIDE, NARROW, V = 32, 48, 32, 16, 61  # of the tests' target: hidden, MLP, query and key widths, vocabulary
IDS = torch.arange(3, 51, 2)


def layer(place, *, reads=D, norms=(), has_bias=False):
    """A Llama layer, its fused projections by their parts."""
    shapes = {
        f"{place}.self_attn.q_proj.weight": (WIDE, reads),
        f"{place}.self_attn.k_proj.weight": (NARROW, reads),
        f"{place}.self_attn.v_proj.weight": (NARROW, reads),
        f"{place}.self_attn.o_proj.weight": (D, WIDE),
        f"{place}.mlp.gate_proj.weight": (INNER, D),
        f"{place}.mlp.up_proj.weight": (INNER, D),
        f"{place}.mlp.down_proj.weight": (D, INNER),
    }
    shapes |= {f"{place}.{name}.weight": (D,) for name in ("post_attention_layernorm", *norms)}
    if has_bias:
        sizes = {"q": WIDE, "k": NARROW, "v": NARROW}
        shapes |= {f"{place}.self_attn.{one}_proj.bias": (size,) for one, size in sizes.items()}
    return shapes


def eagle_model(config):
    """fc has a bias; the first layer does not normalise; embedding and output layer are put in from the target."""
    shapes = {"model.fc.weight": (D, 2 * D), "model.fc.bias": (D,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= layer(f"model.layers.{i}", norms=["input_layernorm"] if i else [])
    return shapes


def eagle3_model(config):
    """Every layer has both norms; all but the first read one state, through `hidden_norm`."""
    nested, num = config["eagle_config"], config["num_aux_hidden_states"]
    shapes = {
        "model.fc.weight": (D, num * D),
        "model.norm.weight": (D,),
        "lm_head.weight": (config["draft_vocab_size"], D),
    }
    for i in range(config["num_hidden_layers"]):
        norms = ["input_layernorm", "hidden_norm"]
        shapes |= layer(f"model.layers.{i}", reads=D if i else 2 * D, norms=norms)
    if nested.get("norm_before_fc", config.get("norm_before_fc")):
        shapes["model.input_norm.weight"] = (num * D,)
    if config.get("fc_norm"):
        shapes |= {f"model.fc_norm.{i}.weight": (D,) for i in range(num)}
    return shapes


def eagle_name(name):
    return None if "lm_head" in name else f"model.{name}"


def eagle3_name(name):
    if "d2t" in name or "t2d" in name:  # the first becomes the map of drafted tokens, the second is skipped
        return None
    name = name.replace("midlayer", "layers.0")
    return name if name.startswith("lm_head") else f"model.{name}"


def mimo_name(name):
    """Of a whole checkpoint: the module's parts; the target's own layers are skipped."""
    found = re.match(r"model.mtp_layers.\d+\.(.*)", name)
    if found is None:
        return None
    parts = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    return f"model.{found[1]}" if any(part in name for part in parts) else f"model.mtp_block.{found[1]}"


def loaded(folder, rename):
    """What of the folder's tensors arrives under which name, with its shape."""
    stored = read_tensor_files(folder)
    found = {rename(name): shape for name, shape in stored.shapes.items()}
    return {name: shape for name, shape in found.items() if name is not None}


EAGLE3 = [
    {},
    {"draft_vocab_size": 24},
    {"num_layers": 2, "fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "feature_layers": [1, 3]},
]
CASES = [("eagle", {}), ("eagle", {"num_layers": 2}), *(("eagle3", options) for options in EAGLE3)]


@pytest.mark.parametrize(("family", "options"), CASES)
def test_every_parameter_of_a_draft_is_filled_and_no_tensor_left_over(saved_target, tmp_path, family, options):
    target = Target.load(saved_target)
    config = head_class(family).config_class(type=family, **options)
    head = build_head(config, target, draft_token_ids=IDS if config.draft_vocab_size else None)
    save_head(head, tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", to="sglang")
    served = json.loads((tmp_path / "out" / "config.json").read_text())
    model, rename = {"eagle": (eagle_model, eagle_name), "eagle3": (eagle3_model, eagle3_name)}[family]
    assert loaded(tmp_path / "out", rename) == model(served)
    assert served["architectures"][0] == {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}[family]
    assert served["vocab_size"] == V
    if family == "eagle3":
        counted = [i + 1 for i in served["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        assert counted == list(head.feature_layers), "SGLang adds one to each"
        assert not served["norm_before_residual"], "it has no such layer"


def test_a_mimo_module_is_filled(tiny_model, tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path / "target")
    target = Target.load(tmp_path / "target")
    save_head(build_head(MtpConfig(layout="mimo", num_depths=1), target), tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", to="sglang")
    block = layer("model.mtp_block", norms=["input_layernorm"], has_bias=True)
    own = {f"model.{name}.weight": (D,) for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    assert loaded(tmp_path / "out", mimo_name) == {**block, **own, "model.input_proj.weight": (D, 2 * D)}
