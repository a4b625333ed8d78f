"""MTP modules of published checkpoints are read, fine-tuned and put back under the names that engines load them by.

The names are those that vLLM's loaders read (qwen3_5_mtp.py, glm4_moe_mtp.py, mimo_v2_mtp.py, nemotron_h_mtp.py); the
weights are random. No published checkpoint was opened for this.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.engines.check import check_folder
from headstart.engines.export import export_head
from headstart.engines.heads import build_head, save_head
from headstart.engines.importers import import_head
from headstart.heads.base import DraftBatch
from headstart.heads.mtp import MtpConfig
from headstart.targets.target import Target
from headstart.targets.weights.mtp_checkpoint import stitch
from run_files import tensors_of
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Glm4MoeConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

D, INNER, NARROW, V, E = 32, 48, 16, 61, 4  # hidden, MLP, an expert's MLP, vocabulary, experts
SIZES: dict[str, Any] = {
    **dict(vocab_size=V, hidden_size=D, intermediate_size=INNER, num_hidden_layers=4, num_attention_heads=4),
    **dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64, bos_token_id=1, eos_token_id=2),
    **dict(moe_intermediate_size=NARROW, num_experts_per_tok=2),
}
LINEAR: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
)
QWEN: dict[str, Any] = {**SIZES, **LINEAR}
QWEN_MOE: dict[str, Any] = {**QWEN, "num_experts": E, "shared_expert_intermediate_size": NARROW}
GLM: dict[str, Any] = {**SIZES, "n_routed_experts": E, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
VISION = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=D, patch_size=14)
KINDS: dict[str, tuple[Any, str, dict[str, Any]]] = {  # config, layout, keys under which the published one counts
    "dense": (lambda: Qwen3_5TextConfig(**QWEN), "qwen3_next", {"mtp_num_hidden_layers": 1}),
    "moe": (lambda: Qwen3_5MoeTextConfig(**QWEN_MOE), "qwen3_next", {"mtp_num_hidden_layers": 1}),
    "wrapper": (
        lambda: Qwen3_5Config(text_config=QWEN, vision_config=VISION),
        "qwen3_next",
        {"mtp_num_hidden_layers": 1},
    ),
    "moe wrapper": (
        lambda: Qwen3_5MoeConfig(text_config=QWEN_MOE, vision_config=VISION),
        "qwen3_next",
        {"mtp_num_hidden_layers": 1},
    ),
    "mimo": (lambda: Qwen2Config(**SIZES), "mimo", {"num_nextn_predict_layers": 1}),
    "glm": (lambda: Glm4MoeConfig(**GLM), "deepseek_v3", {"num_nextn_predict_layers": 1}),
}


def experts(place: str, each: bool) -> dict[str, tuple[int, ...]]:
    """A layer's experts one by one, or all in one tensor."""
    if not each:
        return {f"{place}.gate_up_proj": (E, 2 * NARROW, D), f"{place}.down_proj": (E, D, NARROW)}
    shapes = {"gate_proj": (NARROW, D), "up_proj": (NARROW, D), "down_proj": (D, NARROW)}
    return {f"{place}.{i}.{name}.weight": shape for i in range(E) for name, shape in shapes.items()}


def mlp(place: str, width: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (width, D), "up_proj": (width, D), "down_proj": (D, width)}
    return {f"{place}.{name}.weight": shape for name, shape in shapes.items()}


def published(kind: str, *, each: bool = True) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the module that engines load."""
    place = {"glm": "model.layers.4", "mimo": "model.mtp_layers.0"}.get(kind, "mtp.layers.0")
    queries = 32 if kind in ("glm", "mimo") else 64  # Qwen3.5's have a gate
    attention = {"q_proj": (queries, D), "k_proj": (16, D), "v_proj": (16, D), "o_proj": (D, 32)}
    shapes: dict[str, tuple[int, ...]] = {f"{place}.self_attn.{k}.weight": shape for k, shape in attention.items()}
    shapes |= {f"{place}.{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    if kind == "mimo":
        shapes |= {f"{place}.{name}_layernorm.weight": (D,) for name in ("token", "hidden", "final")}
        shapes |= {f"{place}.self_attn.{name}_proj.bias": attention[f"{name}_proj"][:1] for name in "qkv"}
        return shapes | {f"{place}.input_proj.weight": (D, 2 * D)} | mlp(f"{place}.mlp", INNER)
    if kind == "glm":
        shapes |= {f"{place}.{name}.weight": (D,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes |= {f"{place}.eh_proj.weight": (D, 2 * D), f"{place}.embed_tokens.weight": (V, D)}
        shapes |= {f"{place}.shared_head.head.weight": (V, D), f"{place}.mlp.gate.weight": (E, D)}
        shapes |= {f"{place}.mlp.gate.e_score_correction_bias": (E,)}
        return shapes | mlp(f"{place}.mlp.shared_experts", NARROW) | experts(f"{place}.mlp.experts", each)
    shapes |= {f"mtp.{name}.weight": (D,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes |= {"mtp.fc.weight": (D, 2 * D)}
    shapes |= {f"{place}.self_attn.{name}_norm.weight": (8,) for name in "qk"}
    if "moe" not in kind:
        return shapes | mlp(f"{place}.mlp", INNER)
    shapes |= {f"{place}.mlp.gate.weight": (E, D), f"{place}.mlp.shared_expert_gate.weight": (1, D)}
    return shapes | mlp(f"{place}.mlp.shared_expert", NARROW) | experts(f"{place}.mlp.experts", each)


def save_model(config: PreTrainedConfig, folder: Path) -> None:
    torch.manual_seed(0)
    is_text = config.get_text_config() is config
    model = (AutoModelForCausalLM if is_text else AutoModelForImageTextToText).from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.bfloat16().save_pretrained(folder)


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A target's tensors with all experts of a layer in one, as Qwen3.5's published checkpoints have them."""
    whole = {name: value for name, value in tensors.items() if ".experts." not in name}
    for stem in sorted({name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}):
        part = {kind: [tensors[f"{stem}.{i}.{kind}_proj.weight"] for i in range(E)] for kind in ("gate", "up", "down")}
        whole[f"{stem}.gate_up_proj"] = torch.stack([torch.cat(x) for x in zip(part["gate"], part["up"], strict=True)])
        whole[f"{stem}.down_proj"] = torch.stack(part["down"])
    return whole


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(kind): the folder of a target as published, and the tensors of its MTP module."""

    def make(kind: str, *, each: bool = True, target_each: bool = True) -> tuple[Path, dict[str, torch.Tensor]]:
        folder, (config, _, count) = tmp_path / "target", KINDS[kind]
        save_model(config(), folder)
        main = load_file(folder / "model.safetensors")
        main = main if target_each else joined(main)
        source = torch.Generator().manual_seed(1)
        shapes = published(kind, each=each)
        module = {name: (0.3 * torch.randn(shape, generator=source)).bfloat16() for name, shape in shapes.items()}
        for name, value in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            if kind == "glm":
                module[f"model.layers.4.{name}.weight"] = main[f"{value}.weight"].clone()
        save_file(main, folder / "model-1.safetensors", {"format": "pt"})
        save_file(module, folder / "model-2.safetensors", {"format": "pt"})
        (folder / "model.safetensors").unlink()
        where = dict.fromkeys(main, "model-1.safetensors") | dict.fromkeys(module, "model-2.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
        change_config(folder, count | ({"architectures": ["MiMoForCausalLM"]} if kind == "mimo" else {}))
        return folder, module

    return make


def change_config(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Change keys of the language model's config; returns the whole config."""
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config).update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return config


CASES = [("dense", {}), ("mimo", {}), ("glm", {})]
CASES += [("moe wrapper", {"each": each, "target_each": False}) for each in (False, True)]
CASES += [("moe", {"each": False})]


@pytest.mark.fast_only(kind=["dense", "mimo"])
@pytest.mark.parametrize(("kind", "stored"), CASES)
def test_modules_are_read_trained_and_put_back(checkpoint, make_batch, tmp_path, kind, stored):
    folder, module = checkpoint(kind, **stored)
    assert check_folder(folder).problems == []
    target, layout = Target.load(folder), KINDS[kind][1]
    head: Any = build_head(MtpConfig(init="checkpoint", num_depths=2), target)
    assert head.config.layout == layout, "that of the target's own modules"
    before = tensors_of(folder)
    for untrained in (True, False):
        if not untrained:
            head.loss(make_batch(target, head)).loss.backward()
            assert all(parameter.grad is not None for parameter in head.parameters())
            with torch.no_grad():
                for parameter in head.parameters():
                    parameter.sub_(0.1 * parameter.grad + 0.1)
        save_head(head, tmp_path / str(untrained))
        out = tmp_path / f"out {untrained}"
        export_head(tmp_path / str(untrained), out, to="vllm")
        after = tensors_of(out)
        assert after.keys() == before.keys()
        assert all(after[name].dtype == torch.bfloat16 for name in module)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        tables = {f"model.layers.4.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
        router = {"model.layers.4.mlp.gate.e_score_correction_bias"}  # chooses experts, and has no gradient
        assert changed == (set() if untrained else module.keys() - tables - router)
        assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
        assert check_folder(out).problems == []
    again = Target.load(tmp_path / "out False")
    assert again.fingerprint == target.fingerprint
    for read in (build_head(head.config, again), import_head(tmp_path / "out False", again)):
        for ours, theirs in zip(head.parameters(), read.parameters(), strict=True):
            assert torch.equal(ours.bfloat16().float(), theirs)


@pytest.mark.parametrize("kind", ["dense", "moe wrapper"])
def test_the_first_draft_is_the_formula(checkpoint, kind):
    """Norms have a gain of 1 + w, the embedding is in front and not masked, and the block is a layer with attention."""
    folder, module = checkpoint(kind)
    target = Target.load(folder, dtype="float32")
    head: Any = build_head(MtpConfig(layout="qwen3_next", init="checkpoint"), target).eval()
    ids = torch.tensor([[5, 9, 14, 33, 20, 7]])
    hidden = target.forward(ids).post_norm[:, :-1]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + module[name].float())

    halves = (target.embed(ids[:, 1:]), "mtp.pre_fc_norm_embedding.weight"), (hidden, "mtp.pre_fc_norm_hidden.weight")
    x = torch.cat([norm(*half) for half in halves], -1) @ module["mtp.fc.weight"].float().T
    layer = target.layers[3]  # the last one, and the only one with attention
    own = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(head.module.block.state_dict())
    positions = torch.arange(5)[None]
    rotated = target.base.rotary_emb(x, positions)
    out = layer(x, position_embeddings=rotated, attention_mask=None, position_ids=positions)
    layer.load_state_dict(own)
    wanted = target.logits(norm(out[0] if isinstance(out, tuple) else out, "mtp.norm.weight"))
    batch = DraftBatch(ids, torch.ones_like(ids).bool(), target.forward(ids))
    starts, logits = head.teacher_forced_logits(batch)
    for at, position in enumerate(starts.positions[0].tolist()):
        if starts.valid[0, at, 0]:
            torch.testing.assert_close(logits[0, at, 0], wanted[0, position], rtol=1e-4, atol=1e-4)
    assert starts.valid[0, :, 0].any()


@pytest.mark.fast_only(kind=["dense", "moe wrapper", "glm"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_target_without_modules_gets_them_as_published(kind, tmp_path):
    config, _, count = KINDS[kind]
    save_model(config(), tmp_path / "target")
    before = tensors_of(tmp_path / "target")
    save_head(build_head(MtpConfig(), Target.load(tmp_path / "target")), tmp_path / "head")
    export_head(tmp_path / "head", tmp_path / "out", to="vllm")
    after = tensors_of(tmp_path / "out")
    added = {name: tuple(value.shape) for name, value in after.items() if name not in before}
    assert added == published(kind)
    whole = json.loads((tmp_path / "out" / "config.json").read_text())
    found = whole.get("text_config", whole)
    assert {key: found[key] for key in found if "mtp" in key or "nextn" in key} == count
    assert check_folder(tmp_path / "out").problems == []


def test_what_a_checkpoint_lacks_is_refused(checkpoint, tmp_path):
    folder, module = checkpoint("mimo")
    target = Target.load(folder)
    other = build_head(MtpConfig(layout="deepseek_v3"), target)
    with pytest.raises(BadInput, match=r"no tensor model.layers.\d+.enorm"):
        stitch(other.state_dict(), folder, tmp_path / "stitched")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target"], "nothing half-written stays"
    name = "model.mtp_layers.0.input_proj.weight"
    narrow, quantised = module[name][:, :8].contiguous(), module[name].char()
    for bad, message in ((narrow, r"expected \(32, 64\), found \(32, 8\)"), (quantised, "is quantised")):
        save_file({**module, name: bad}, folder / "model-2.safetensors", {"format": "pt"})
        with pytest.raises(BadInput, match=message):
            build_head(MtpConfig(layout="mimo", init="checkpoint"), target)


def test_engines_count_the_modules_under_the_models_own_key(checkpoint):
    folder, _ = checkpoint("wrapper")
    change_config(folder, {"mtp_num_hidden_layers": None, "num_nextn_predict_layers": 1})
    assert check_folder(folder).problems == ["mtp_num_hidden_layers: expected the number of modules, found None"]


def test_a_missing_or_misplaced_expert_is_found(checkpoint):
    folder, module = checkpoint("moe wrapper", target_each=False)
    kept = {name: value for name, value in module.items() if "experts.3.up_proj" not in name}
    save_file(kept, folder / "model-2.safetensors", {"format": "pt"})
    problems = check_folder(folder).problems
    assert any("mtp.layers.0.mlp.experts.3.up_proj.weight: missing, expected [16, 32]" in line for line in problems)


NEMOTRON: dict[str, Any] = dict(
    **dict(vocab_size=V, hidden_size=D, intermediate_size=INNER, num_attention_heads=4, num_key_value_heads=2),
    **dict(head_dim=8, layers_block_type=["mamba", "attention", "mlp"], ssm_state_size=8, mamba_num_heads=4),
    **dict(mamba_head_dim=8, n_groups=1, chunk_size=8),
)


def test_what_is_no_module_of_ours_is_refused_by_name(tiny_model, tmp_path):
    save_model(NemotronHConfig(**NEMOTRON), tmp_path / "nemotron")
    for name in ("mimo", "step"):
        tiny_model("qwen2").save_pretrained(tmp_path / name)
    cases = {
        "nemotron": (["mtp.layers.0.eh_proj", "mtp.layers.0.mixer.q_proj"], "Nemotron 3's MTP module is two layers"),
        "mimo": (["model.mtp.layers.0.eh_proj", "model.mtp.layers.0.pre_mlp_layernorm"], "MiMo-V2's MTP modules have"),
        "step": (["model.layers.4.eh_proj", "model.layers.4.shared_head.output"], "Step 3.5's MTP modules have"),
    }
    for where, (names, why) in cases.items():
        folder = tmp_path / where
        main = load_file(folder / "model.safetensors") | {f"{name}.weight": torch.ones(2) for name in names}
        save_file(main, folder / "model.safetensors", {"format": "pt"})
        target = Target.load(folder)
        with pytest.raises(BadInput, match=why):
            build_head(MtpConfig(init="checkpoint"), target)
        with pytest.raises(BadInput, match=why):
            import_head(folder, target)
        assert [line for line in check_folder(folder).problems if why in line]


def test_another_layout_than_the_checkpoints_is_named(checkpoint, tmp_path):
    folder, _ = checkpoint("dense")
    with pytest.raises(BadInput, match="head.layout deepseek_v3: .* its MTP modules are of layout qwen3_next"):
        build_head(MtpConfig(layout="deepseek_v3", init="checkpoint"), Target.load(folder))
    save_head(build_head(MtpConfig(layout="deepseek_v3"), Target.load(folder)), tmp_path / "head")
    with pytest.raises(BadInput, match=r"with a qwen3_5_text target, .*train with head.layout=qwen3"):
        export_head(tmp_path / "head", tmp_path / "out", to="vllm")
