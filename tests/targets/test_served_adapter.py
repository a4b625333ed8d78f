"""A target with a served adapter computes what peft computes, and adapters that do not fit are refused in one line."""

import json
import shutil

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS, build_head, head_record, load_head, save_head
from headstart.eval.decoding import generate
from headstart.targets.bare import BareTarget
from headstart.targets.frozen_model import OutputUse
from headstart.targets.loading import TargetConfig
from headstart.targets.target import Target
from headstart.targets.weights.served_adapter import ServedAdapter
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    PreTrainedConfig,
    Qwen3_5Config,
)

IDS = torch.arange(3, 40)[None]
PROMPT = [1, 7, 8, 3, 22, 40]


@pytest.fixture(scope="module")
def adapter(saved_target, lora):
    return lora(saved_target)


def plain(folder):
    """transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def peft_logits(folder, adapter):
    with torch.no_grad():
        return PeftModel.from_pretrained(plain(folder), adapter)(IDS).logits


def our_logits(target):
    return target.logits(target.forward(IDS).post_norm)


def rewritten(adapter, folder, change, **keys):
    """A copy of an adapter. Args: change: of its tensors, in place. keys: of adapter_config.json."""
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **keys}))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"target_modules": ["q_proj", "down_proj"]},
        {
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 3},
            "alpha_pattern": {"layers.1.self_attn.q_proj": 5},
        },
    ],
    ids=["plain", "rsLoRA", "two layers", "patterns"],
)
def test_merged_logits_are_those_of_peft(saved_target, lora, config):
    adapter = lora(saved_target, **config)
    target = Target.load(saved_target, adapter=adapter)
    ours, theirs = our_logits(target), peft_logits(saved_target, adapter)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (ours - our_logits(Target.load(saved_target))).abs().max() > 0.1, "and the adapter does something"


UNLIKE: dict[str, tuple[PreTrainedConfig, list[str]]] = {
    "weights lie the other way": (
        GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
        ["c_attn", "c_proj"],
    ),
    "trained on the language model alone": (
        Qwen3_5Config(
            text_config={
                **dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=8),
                **dict(num_attention_heads=4, num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4),
                **dict(linear_key_head_dim=8, linear_value_head_dim=8, bos_token_id=1, eos_token_id=2),
            },
            vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32},
        ),
        ["q_proj", "in_proj_qkv", "down_proj"],
    ),
}


@pytest.mark.parametrize(("config", "layers"), UNLIKE.values(), ids=UNLIKE)
def test_adapters_of_unlike_models_are_merged_too(tmp_path, lora, config, layers):
    torch.manual_seed(0)
    kind = AutoModelForCausalLM if isinstance(config, GPT2Config) else AutoModelForImageTextToText
    kind.from_config(config).save_pretrained(tmp_path / "target")
    adapter = lora(tmp_path / "target", target_modules=layers)
    target = Target.load(tmp_path / "target", adapter=adapter)
    torch.testing.assert_close(our_logits(target), peft_logits(tmp_path / "target", adapter), rtol=1e-4, atol=1e-4)


def test_texts_are_those_that_transformers_and_peft_write(saved_target, adapter):
    model = PeftModel.from_pretrained(plain(saved_target), adapter)
    inputs = torch.tensor([PROMPT])
    theirs = model.generate(input_ids=inputs, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    target, base = Target.load(saved_target, adapter=adapter), Target.load(saved_target)
    head = build_head(HEADS["eagle3"].config_class(type="eagle3"), target)
    for drafter in (None, head.eval()):
        [ours] = generate(target, drafter, [PROMPT], max_new_tokens=24, eos_token_ids=[]).token_ids
        assert ours == theirs[0, len(PROMPT) :].tolist()
    [without] = generate(base, None, [PROMPT], max_new_tokens=24, eos_token_ids=[]).token_ids
    assert ours != without


def test_weights_in_half_precision_are_rounded_once(saved_target, adapter):
    whole, half = (Target.load(saved_target, adapter=adapter, dtype=dtype) for dtype in ("float32", "bfloat16"))
    names = dict(whole.model.named_parameters())
    stored = Target.load(saved_target, dtype="bfloat16").model.state_dict()
    layer = "model.layers.1.self_attn.q_proj.weight"
    change = names[layer] - Target.load(saved_target).model.state_dict()[layer]
    rounded = (stored[layer].float() + change).bfloat16()
    found = dict(half.model.named_parameters())[layer]
    assert (found == rounded).float().mean() > 0.99 and torch.allclose(found.float(), rounded.float(), rtol=2**-7)


def test_an_adapted_target_is_another_one_but_takes_the_heads_of_its_base(saved_target, lora, tmp_path):
    base = Target.load(saved_target)
    first, again, other = (Target.load(saved_target, adapter=lora(saved_target, seed=seed)) for seed in (1, 1, 2))
    assert len({base.fingerprint, first.fingerprint, other.fingerprint}) == 3
    assert first.fingerprint == again.fingerprint, "wherever the adapter lies"
    assert {each.stored_fingerprint for each in (base, first, other)} == {base.fingerprint}
    config = rewritten(lora(saved_target, seed=1), tmp_path / "scaled", lambda tensors: None, lora_alpha=1)
    assert Target.load(saved_target, adapter=config).fingerprint != first.fingerprint, "its scale counts"
    folder = save_head(build_head(HEADS["medusa"].config_class(type="medusa"), base), tmp_path / "head")
    for target in (first, other):
        save_head(load_head(folder, target), tmp_path / "again")
        assert head_record(tmp_path / "again").fingerprint == base.fingerprint
        load_head(tmp_path / "again", base)


def test_a_target_without_its_layers_is_known_as_with_them(saved_target, adapter):
    bare = BareTarget.read(TargetConfig(path=str(saved_target), adapter=str(adapter)), OutputUse())
    whole = Target.load(saved_target, adapter=adapter)
    assert (bare.fingerprint, bare.full_name) == (whole.fingerprint, whole.full_name)
    torch.testing.assert_close(bare.logits(whole.forward(IDS).post_norm), our_logits(whole))


# What is refused

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def cut(tensors):
    tensors[f"{Q}.lora_B.weight"] = tensors[f"{Q}.lora_B.weight"][:5].contiguous()


def renamed(tensors):
    for part in "AB":
        tensors[f"{Q.replace('layers.0', 'layers.9')}.lora_{part}.weight"] = tensors.pop(f"{Q}.lora_{part}.weight")


def halved(tensors):
    del tensors[f"{Q}.lora_B.weight"]


def embedding(tensors):
    tensors["base_model.model.model.embed_tokens.weight"] = torch.zeros(63, 32)


def output(tensors):
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 32)
    tensors["base_model.model.lm_head.lora_B.weight"] = torch.zeros(61, 4)


def as_it_is(tensors):
    pass


REFUSED = [
    (as_it_is, {"peft_type": "IA3"}, "adapter_config.json: peft_type IA3: expected LORA"),
    (as_it_is, {"use_dora": True}, "adapter_config.json: use_dora True: expected plain LoRA"),
    (as_it_is, {"modules_to_save": ["embed_tokens"]}, "modules_to_save ['embed_tokens']: expected plain LoRA"),
    (as_it_is, {"bias": "all"}, "bias 'all': expected plain LoRA"),
    (as_it_is, {"init_lora_weights": "pissa"}, "init_lora_weights 'pissa': expected plain LoRA"),
    (as_it_is, {"r": 7}, "of rank 7 as adapter_config.json says"),
    (as_it_is, {"lora_alpha": None}, "adapter_config.json: lora_alpha: missing"),
    (as_it_is, {"lora_alpha": "much"}, "adapter_config.json: lora_alpha: expected a number"),
    (as_it_is, {"base_model_name_or_path": "OTHER"}, "other: has other weights than target"),
    (cut, {}, "layers.0.self_attn.q_proj: changes a layer of shape (5, 32), the target's is (32, 32)"),
    (renamed, {}, "layers.9.self_attn.q_proj: expected a linear layer: the target has no linear layer of that name"),
    (halved, {}, "layers.0.self_attn.q_proj: lora_A [4, 32] and lora_B None: expected both"),
    (embedding, {}, "tensor base_model.model.model.embed_tokens.weight: expected lora_A and lora_B of linear layers"),
    (output, {}, "lm_head: changes the output layer, which heads share with the target"),
]


@pytest.mark.parametrize(("change", "keys", "line"), REFUSED, ids=[line for _, _, line in REFUSED])
def test_what_is_refused_is_named_in_one_line(saved_target, tiny_model, adapter, tmp_path, change, keys, line):
    if keys.get("base_model_name_or_path"):
        tiny_model("llama", vocab_size=63).save_pretrained(tmp_path / "other")
        keys = {"base_model_name_or_path": str(tmp_path / "other")}
    adapter = rewritten(adapter, tmp_path / "adapter", change, **keys)
    for load in (
        lambda: Target.load(saved_target, adapter=adapter),
        lambda: BareTarget.read(TargetConfig(path=str(saved_target), adapter=str(adapter)), OutputUse()),
    ):
        with pytest.raises(BadInput) as caught:
            load()
        assert line in str(caught.value)
        assert "adapter_config.json" in str(caught.value) or "adapter_model.safetensors" in str(caught.value)


def test_folders_without_an_adapter_are_refused(saved_target, adapter, tmp_path):
    with pytest.raises(BadInput, match="no such folder"):
        ServedAdapter.read(tmp_path / "gone")
    with pytest.raises(BadInput, match=r"no adapter_config\.json in it"):
        ServedAdapter.read(saved_target)
    adapter = rewritten(adapter, tmp_path / "adapter", as_it_is)
    (adapter / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(BadInput, match=r"adapter_model\.safetensors: damaged"):
        ServedAdapter.read(adapter)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(BadInput, match=r"adapter_config\.json: no JSON object"):
        ServedAdapter.read(adapter)
