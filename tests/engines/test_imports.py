"""Heads that others published draft here as the formulas say, and our exports come back as they were."""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.engines.check import check_folder
from headstart.engines.export import engines_of, export_head
from headstart.engines.families.table import SERVINGS
from headstart.engines.heads import build_head, head_class, head_record, load_head, save_head, start_head
from headstart.engines.importers import import_head
from headstart.engines.layouts.contracts import Contract
from headstart.engines.layouts.foreign import Imported
from headstart.engines.layouts.serving import Serving
from headstart.engines.layouts.writing import write_config, write_tensors
from headstart.engines.vllm import METHODS
from headstart.eval.drafters.registry import parse_drafter
from headstart.heads.block_network import BlockConfig
from headstart.heads.drafting.drafter import Reading
from headstart.heads.eagle import EagleConfig
from headstart.heads.families import HEADS
from headstart.heads.medusa import MedusaConfig, MedusaHead
from headstart.targets.target import Target
from perturbing import perturb
from safetensors.torch import save_file

EAGLE3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "vocab_size": 61,
    "draft_vocab_size": 24,
    "torch_dtype": "float16",
}
IDS = torch.arange(3, 51, 2)  # the 24 target tokens that are drafted
OWN_SIZES = {"intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture(scope="module")
def target(saved_target):
    return Target.load(saved_target)


@pytest.fixture
def published(tmp_path):
    """published(config, tensors): a folder as it lies on the hub."""

    def make(config, tensors, name="model.safetensors"):
        folder = tmp_path / "published"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / name)
        return folder

    return make


def noise(shapes):
    source = torch.Generator().manual_seed(7)
    return {name: 0.3 * torch.randn(shape, generator=source) for name, shape in shapes.items()}


def layer(place, *, heads=4, kv_heads=2, head_dim=8, inner=48, width=64, norms=()):
    wide, narrow = heads * head_dim, kv_heads * head_dim
    shapes: dict[str, Any] = {
        "self_attn.q_proj": (wide, width),
        "self_attn.k_proj": (narrow, width),
        "self_attn.v_proj": (narrow, width),
        "self_attn.o_proj": (32, wide),
        "mlp.gate_proj": (inner, 32),
        "mlp.up_proj": (inner, 32),
        "mlp.down_proj": (32, inner),
        **dict.fromkeys((*norms, "post_attention_layernorm"), (32,)),
    }
    return {f"{place}.{name}.weight": shape for name, shape in shapes.items()}


def eagle3_tensors(place="midlayer", *, num_features=3, cut=True, **sizes):
    norms = ("input_layernorm", "hidden_norm")
    shapes = {"fc.weight": (32, 32 * num_features), **layer(place, norms=norms, **sizes), "norm.weight": (32,)}
    tensors = noise(shapes | {"lm_head.weight": (24 if cut else 61, 32)})
    if cut:
        tensors |= {"d2t": IDS - torch.arange(24), "t2d": torch.zeros(61, dtype=torch.bool).index_fill(0, IDS, True)}
    return tensors


def rms(x, weight):
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def first_draft(head, target):
    """[Vd] what a head says behind one token that the target has read, and the states there."""
    output = target.forward(torch.tensor([[5]]), feature_layers=head.feature_layers)
    state = head.begin(batch_size=1, max_length=8)
    read = Reading(torch.tensor([[5]]), torch.tensor([[9]]), output, torch.tensor([0]), torch.tensor([1]))
    head.commit(state, read)
    return head.first_logits(state)[0], output


def plain_layer(w, place, x, hidden):
    """One decoder layer at the only position there is: attention is its value."""
    value = w[f"{place}.self_attn.v_proj.weight"] @ x
    wide, narrow = w[f"{place}.self_attn.q_proj.weight"].shape[0], len(value)
    size = 16 if wide == narrow * 2 and narrow == 16 and w[f"{place}.mlp.up_proj.weight"].shape[0] == 40 else 8
    mixed = value.view(-1, size).repeat_interleave(wide // narrow, 0).flatten()
    hidden = hidden + w[f"{place}.self_attn.o_proj.weight"] @ mixed
    y = rms(hidden, w[f"{place}.post_attention_layernorm.weight"])
    gated = torch.nn.functional.silu(w[f"{place}.mlp.gate_proj.weight"] @ y) * (w[f"{place}.mlp.up_proj.weight"] @ y)
    return hidden + w[f"{place}.mlp.down_proj.weight"] @ gated


def plain_eagle3(w, target, features, *, place="midlayer", residual=False):
    if "input_norm.weight" in w:
        features = rms(features, w["input_norm.weight"])
    hidden = w["fc.weight"] @ features
    normed = rms(hidden, w[f"{place}.hidden_norm.weight"])
    embedded = rms(target.input_embedding.weight[9], w[f"{place}.input_layernorm.weight"])
    out = plain_layer(w, place, torch.cat([embedded, normed]), normed if residual else hidden)
    return w["lm_head.weight"] @ rms(out, w["norm.weight"])


def speculators(**changes):
    layer_config = {key: value for key, value in EAGLE3.items() if key not in ("architectures", "draft_vocab_size")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "x/y", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer_config,
        "draft_vocab_size": 24,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        **changes,
    }


SGLANG = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}}
VLLM = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "num_aux_hidden_states": 3}
ARCHITECTURE = {"architectures": ["LlamaForCausalLMEagle3"]}
EAGLE3_CASES = {
    "SpecForge": ({**EAGLE3, **ARCHITECTURE, **SGLANG}, {}, {}),
    "vLLM, layers.0": ({**EAGLE3, **ARCHITECTURE, **VLLM}, {"place": "layers.0"}, {}),
    "whole vocabulary": ({**EAGLE3, **VLLM, "draft_vocab_size": 61}, {"cut": False}, {}),
    "own sizes": ({**EAGLE3, **VLLM, **OWN_SIZES}, {"heads": 2, "kv_heads": 1, "head_dim": 16, "inner": 40}, {}),
    "own rotation": ({**EAGLE3, **VLLM, "rope_theta": 7.0}, {}, {}),
    "speculators": (speculators(), {"place": "layers.0"}, {"residual": True}),
    "speculators, portable": (speculators(norm_before_residual=False), {"place": "layers.0"}, {}),
    "speculators, norm before fc": (speculators(norm_before_fc=True), {"place": "layers.0"}, {"residual": True}),
}


@pytest.mark.parametrize(("config", "made", "how"), EAGLE3_CASES.values(), ids=list(EAGLE3_CASES))
def test_eagle3_of_others_drafts_as_the_formulas_say(published, target, config, made, how):
    tensors = eagle3_tensors(**made)
    if config.get("norm_before_fc"):
        tensors |= noise({"input_norm.weight": (96,)})
    tensors["embed_tokens.weight"] = target.input_embedding.weight.half()
    head: Any = import_head(published(config, tensors), target)
    assert head.feature_layers == (1, 2, 3)
    logits, output = first_draft(head, target)
    wanted = plain_eagle3(tensors, target, output.features[0, 0].flatten(), place=made.get("place", "midlayer"), **how)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert head.rotary.embedding.config.rope_parameters["rope_theta"] == config.get("rope_theta", 500.0)
    assert (head.vocabulary is None) == (config.get("draft_vocab_size") == 61)


def test_defaults_are_the_engines(published, tiny_target):
    deep = tiny_target(num_hidden_layers=8, rms_norm_eps=1e-5)
    config = {key: value for key, value in EAGLE3.items() if key != "rms_norm_eps"}
    head: Any = import_head(published({**config, **ARCHITECTURE}, eagle3_tensors()), deep)
    assert head.feature_layers == (2, 4, 5) and head.norm.eps == 1e-6


def test_eagle1_of_others_drafts_as_the_formulas_say(published, target):
    config = {key: value for key, value in EAGLE3.items() if key != "draft_vocab_size"}
    tensors = noise({"fc.weight": (32, 64), "fc.bias": (32,), **layer("layers.0", width=32)})
    tables = {"embed_tokens.weight": target.input_embedding.weight}
    head: Any = import_head(published({**config, "bias": True}, tensors | tables), target)
    assert head.config.bias and type(head) is head_class("eagle")
    logits, output = first_draft(head, target)
    x = torch.cat([target.input_embedding.weight[9], output.post_norm[0, 0]])
    x = tensors["fc.weight"] @ x + tensors["fc.bias"]
    torch.testing.assert_close(logits, target.logits(plain_layer(tensors, "layers.0", x, x)), rtol=1e-4, atol=1e-4)
    del tensors["fc.bias"]
    assert not import_head(published({**config, "rope_theta": 7.0}, tensors), target).fc.bias.any()  # pyright: ignore


@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "vllm"])
def test_medusa_of_others_drafts_as_the_formulas_say(published, target, prefix):
    shapes = {
        f"{k}.0.linear.{kind}": (32, 32)[: 2 if kind == "weight" else 1] for k in (0, 1) for kind in ("weight", "bias")
    }
    tensors = noise(shapes | {"0.1.weight": (61, 32), "1.1.weight": (61, 32)})
    config = {"base_model_name_or_path": "x/y", "medusa_num_heads": 2, "medusa_num_layers": 1}
    served = {f"{prefix}{name}": value for name, value in tensors.items()}
    if prefix == "vllm":
        config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1}
        served = {
            name.replace(".0.linear.", ".layers.0."): value for name, value in tensors.items() if "linear" in name
        }
        served = {f"blocks.{name}": value for name, value in served.items()}
        served |= {f"lm_heads.{k}.weight": tensors[f"{k}.1.weight"] for k in (0, 1)}
    head = import_head(published(config, served, name="medusa_lm_head.safetensors"), target)
    logits, output = first_draft(head, target)
    hidden = output.post_norm[0, 0]
    hidden = hidden + torch.nn.functional.silu(tensors["0.0.linear.weight"] @ hidden + tensors["0.0.linear.bias"])
    torch.testing.assert_close(logits, tensors["0.1.weight"] @ hidden, rtol=1e-4, atol=1e-4)
    assert isinstance(head.config, MedusaConfig) and head.config.output == "own" and head.num_depths == 2


def test_an_output_layer_of_the_target_is_shared(published, target):
    blocks = noise({"blocks.0.layers.0.weight": (32, 32)})
    config = {"model_type": "medusa", "num_heads": 1, "num_hidden_layers": 1, "original_lm_head": True}
    head = import_head(published(config, blocks | {"lm_head.weight": target.output_layer.weight}), target)
    assert head.config.output == "shared" and not head.get_submodule("0.0.linear").bias.any()  # pyright: ignore
    with pytest.raises(BadInput, match=r"tensor lm_head.weight \[61, 32\]: not that of"):
        import_head(published(config, blocks | {"lm_head.weight": target.output_layer.weight + 1}), target)


def test_a_plain_model_is_a_draft_model(saved_target, target):
    head = import_head(saved_target, target)
    assert head.config.type == "draft_lm"
    logits, _ = first_draft(head, target)
    torch.testing.assert_close(logits, target.model(torch.tensor([[5, 9]])).logits[0, -1])


# the first engine of each layout: those that load one layout share a folder. Modules for llama.cpp need a target of
# whose modules it has a graph; these are stitched like all others
EVERY = [(family, to) for family in SERVINGS for to in reversed(engines_of(family))]
LAYOUTS = {(family, SERVINGS[family].layout(to)): to for family, to in EVERY}
LEFT_OUT = [
    ("mtp", "llama.cpp"),
    ("assistant", "vllm"),
    ("assistant", "sglang"),
    ("assistant", "llama.cpp"),
]  # Gemma 4's
CASES = [(family, to) for (family, _), to in LAYOUTS.items() if (family, to) not in LEFT_OUT]
OPTIONS = {"medusa": {"num_depths": 2}, "eagle3": {"draft_vocab_size": 24}, "mtp": {"layout": "mimo", "num_depths": 1}}
MORE = [("eagle3", "vllm", {"num_layers": 2, "fc_norm": True, "norm_output": True, "draft_vocab_size": None})]
MORE += [("eagle3", to, {"sliding_window": 3}) for to in ("vllm", "speculators")]
MORE += [("block", to, {"sliding_window": 9}) for to in ("vllm", "speculators")]
MORE += [("medusa", "vllm", {"output": "shared"}), ("medusa", "vllm", {"target_lora_rank": 2})]


def perturbed(family, target, scale, **options):
    config = head_class(family).config_class(**OPTIONS.get(family, {}) | options)
    head = build_head(config, target, draft_token_ids=IDS if config.draft_vocab_size else None, seed=2)
    return perturb(head.eval(), scale, seed=1)


@pytest.mark.fast_only(family=["eagle3", "medusa", "mtp"])
@pytest.mark.parametrize(("family", "to", "options"), [(*case, {}) for case in CASES] + MORE)
def test_exported_and_imported_is_exported_alike(target_for, tmp_path, family, to, options):
    target = target_for(family)
    load = partial(Target.load, target.name)  # afresh, as one head's adapters may be on it
    ours = perturbed(family, target, 0.1, **options)
    save_head(ours, tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "one", to=to)
    head = import_head(tmp_path / "one", load())
    assert type(head) is type(ours)
    assert family == "mtp" or head.config == ours.config  # a whole checkpoint does not say how modules were trained
    save_head(head, tmp_path / "again")
    loaded = load_head(tmp_path / "again", load())
    export_head(tmp_path / "again", tmp_path / "two", to=to)
    for path in (path for path in (tmp_path / "one").rglob("*") if path.is_file()):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes(), path
    if not ours.adapts_target:
        torch.testing.assert_close(first_draft(loaded, target)[0], first_draft(ours, target)[0])


@pytest.mark.parametrize("config", [{**VLLM, "rope_theta": 7.0}, speculators()], ids=["rotation", "residual"])
def test_what_others_made_otherwise_is_saved_and_exported_so(published, target, tmp_path, config):
    head = load_head(published({**EAGLE3, **config}, eagle3_tensors("layers.0")), target)
    save_head(head, tmp_path / "head")
    loaded = load_head(tmp_path / "head", target)
    export_head(tmp_path / "head", tmp_path / "out", to="vllm")
    if "speculators_config" in config:
        with pytest.raises(BadInput, match="norm_before_residual: SGLang has no such layer"):
            export_head(tmp_path / "head", tmp_path / "other", to="sglang")
    for again in (loaded, load_head(tmp_path / "out", target)):
        assert again.config == head.config
        torch.testing.assert_close(first_draft(again, target)[0], first_draft(head, target)[0])


def test_a_hub_id_names_a_head(published, target, monkeypatch):
    folder, asked = published({**EAGLE3, **VLLM}, eagle3_tensors()), []

    def download(repo, **how):
        asked.append(repo)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert parse_drafter("head:owner/name") == ("head", "owner/name")
    head = load_head("owner/name", target)
    assert head.config.type == "eagle3" and head_record("owner/name").fingerprint is None
    assert set(asked) == {"owner/name"}


@pytest.mark.parametrize(
    ("config", "change", "problem"),
    [
        ({}, {"midlayer.self_attn.q_proj.weight": torch.ones(64, 32)}, r"q_proj.weight: expected \(32, 64\), found"),
        ({}, {"midlayer.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.weight: expected None, found"),
        ({}, {"embed_tokens.weight": torch.ones(61, 32)}, r"embed_tokens.weight \[61, 32\]: not that of"),
        ({}, {"d2t": IDS}, "d2t: expected offsets to ascending target tokens below 61"),
        ({"hidden_size": 64}, {}, "hidden_size 64: .* has 32"),
        ({"model_type": "qwen3"}, {}, "model_type qwen3: expected llama"),
        ({"attention_bias": True}, {}, "attention_bias: expected none"),
        ({"sliding_window": 8}, {}, "sliding_window 8: expected layer_types that say which layers have it"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, {}, r"\[1, 2\] for the 3 features that fc.weight reads"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, "feature layer 9"),
    ],
)
def test_what_does_not_fit_is_refused(published, target, config, change, problem):
    folder = published({**EAGLE3, **VLLM, **config}, eagle3_tensors() | change)
    with pytest.raises(BadInput, match=problem) as caught:
        import_head(folder, target)
    assert str(folder) in str(caught.value)


def test_pickles_and_other_folders_are_refused(published, target, tmp_path, saved_target):
    folder = published(EAGLE3, {"fc.weight": torch.ones(2)})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match="pickles are not read: convert them to safetensors"):
        import_head(folder, target)
    (tmp_path / "run").mkdir()
    (tmp_path / "head.pt").touch()
    save_head(build_head(EagleConfig(), target), tmp_path / "run" / "final")
    for where, problem in (
        (tmp_path / "nowhere", "no such folder$"),
        (tmp_path / "head.pt", "a file, not a folder$"),
        (tmp_path, "no config.json in it$"),
        (tmp_path / "run", f"no config.json in it; the head of that run is {tmp_path / 'run' / 'final'}$"),
    ):
        with pytest.raises(BadInput, match=problem):
            import_head(where, target)
    for config, problem in (({"model_type": "t5"}, "neither its config nor its tensors"), ([1], "no JSON object")):
        with pytest.raises(BadInput, match=problem):
            import_head(published(config, {"x": torch.ones(2)}), target)


def test_an_export_is_for_its_target_only(target, tiny_target, tmp_path):
    save_head(build_head(EagleConfig(), target), tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", to="vllm")
    with pytest.raises(BadInput, match="out: trained on target .* not on tiny-llama"):
        import_head(tmp_path / "out", tiny_target(vocab_size=61, tie_word_embeddings=True))


def test_a_start_may_differ_in_what_training_alone_reads(target, tmp_path):
    save_head(build_head(BlockConfig(blocks_per_row=8), target), tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", to="vllm")
    start_head(BlockConfig(blocks_per_row=16), target, tmp_path / "out")
    with pytest.raises(BadInput, match="computes otherwise than this config: set head.sample_from_anchor=true$"):
        start_head(BlockConfig(sample_from_anchor=False), target, tmp_path / "out")


@dataclass(kw_only=True)
class OwnConfig(MedusaConfig):
    type: str = "own"


class OwnServing(Serving):
    computes = ("num_residual_blocks",)

    def write(self, head, folder, *, to):
        config = {key.replace("medusa_", "own_"): value for key, value in head.config.items()}
        write_config(folder, {**config, "model_type": "own", **head.provenance})
        write_tensors(folder, head.tensors)

    def recognises(self, config, stored):
        return config.get("model_type") == "own"

    def contract(self, folder, config, stored, *, to):
        return Contract("own", shapes=stored.shapes)

    def read(self, folder):
        keys = {"num_depths": "own_num_heads", "num_residual_blocks": "own_num_layers"}
        return Imported({key: folder.config.need(name, int) for key, name in keys.items()}, folder.tensors())


class OwnHead(MedusaHead):
    config_class = OwnConfig


def test_a_family_owns_its_serving(target, tmp_path, monkeypatch):
    """Export, check, import and a start of training know a further family by its lines in tables."""
    monkeypatch.setitem(HEADS, "own", OwnHead)
    monkeypatch.setitem(SERVINGS, "own", OwnServing())
    monkeypatch.setitem(METHODS, "own", "own")
    config = OwnConfig(num_depths=2, num_residual_blocks=2, depth_decay=0.7)
    ours = perturb(build_head(config, target, seed=2), 0.1, seed=1)
    save_head(ours, tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", to="vllm")
    assert check_folder(tmp_path / "out").problems == []
    head = import_head(tmp_path / "out", target)
    assert type(head) is OwnHead and head.config == config
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in ours.state_dict().items())
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "headstart_export": None}))
    assert import_head(tmp_path / "out", target).config == OwnConfig(num_depths=2, num_residual_blocks=2)
    start_head(config, target, tmp_path / "out")
    with pytest.raises(BadInput, match="out: computes otherwise than this config: set head.num_residual_blocks=2$"):
        start_head(OwnConfig(num_depths=2), target, tmp_path / "out")
