"""At load a target is held against its model: what our reading would get wrong is one line, before anything is done."""

from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.eval.decoding import generate
from headstart.targets.caches import cache as caches
from headstart.targets.check import SHORT, check_text, lengths
from headstart.targets.layers.documents import Documents
from headstart.targets.layers.target_output import TargetOutput
from headstart.targets.target import Target
from transformers import (
    AutoModelForImageTextToText,
    DogeConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxM3VLTextConfig,
    RwkvConfig,
    RwkvForCausalLM,
    xLSTMConfig,
    xLSTMForCausalLM,
)
from wrong_slots import hiding_a_slot, one_further

pytestmark = pytest.mark.usefixtures("checking")
WRITE = caches.SlotLayer.update


def stale(self, keys, values, *rest, **how):
    """A stale state: what is read behind the rejected drafts of a round is not written."""
    is_behind = keys.shape[2] == 2 and int(rest[0].positions.max()) == SHORT - 1
    return self.readable_slots(rest[0].extent) if is_behind else WRITE(self, keys, values, *rest, **how)


FAULTS: dict[str, Any] = {
    "a prompt": (caches, "visibility_mask", hiding_a_slot),
    "the newest token": (Target, "read_slots", one_further),
    "a round behind rejected drafts": (caches.SlotLayer, "update", stale),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_behind_the_cache_is_named_and_nothing_is_decoded(what, tiny_target, monkeypatch):
    monkeypatch.setattr(*FAULTS[what])
    target = tiny_target("llama")
    assert target.undecodable == f"{what} has another state than in the model's own forward"
    with pytest.raises(BadInput, match=f"^target tiny-llama: {what} .* can be trained on, but not decoded$"):
        generate(target, None, [1, 5, 9])


def test_a_fault_in_trees_alone_leaves_chains(tiny_target, monkeypatch):
    monkeypatch.setattr(
        caches.SlotCache, "tree_mask", lambda self, positions, *_, **how: self.mask(positions, dtype=how["dtype"])
    )
    target = tiny_target("llama")
    assert target.can_decode and not target.decodes_trees


@pytest.mark.parametrize(("family", "length"), [("llama", SHORT), ("mistral", 8 + SHORT), ("gemma3", 8 + SHORT)])
def test_the_text_is_longer_than_every_window(family, length, tiny_target):
    assert check_text(tiny_target(family)).shape == (1, length)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (DogeConfig(), {"keep_window_size": 2048}),
        (Llama4TextConfig(), {"attention_chunk_size": 8192}),
        (MiniMaxM3VLTextConfig(), {"index_topk_blocks * index_block_size": 16 * 128}),
        (LlamaConfig(), {}),
    ],
)
def test_lengths_at_which_attention_changes_are_found_under_every_name(config, found):
    assert lengths(config) == found


SIZES: dict[str, Any] = {
    **dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
}


def scaled_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = GraniteConfig(**SIZES, num_key_value_heads=2, **{"logits_scaling": 6.0, **changes})
    return GraniteForCausalLM(config).eval()


def test_a_scale_of_the_logits_is_read_off_the_models_own():
    model, ids = scaled_model(), torch.tensor([[1, 7, 8, 3]])
    target = Target.of(model, name="scaled", fingerprint="")
    assert target.logit_scale == 1 / 6, "the config's own number, not one that rounding moved"
    torch.testing.assert_close(target.logits(target.forward(ids).post_norm), model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_capped_in_the_models_own_dtype(dtype):
    """In bf16 that moves them by more than rounding would elsewhere."""
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=8, final_logit_softcapping=2.0)
    model, ids = Gemma2ForCausalLM(config).to(dtype).eval(), torch.tensor([[1, 7, 8, 3]])
    target = Target.of(model, name="capped", fingerprint="")
    assert torch.equal(target.logits(target.forward(ids).post_norm), model(ids).logits.float())


def test_logits_capped_in_fp32_are_known_too():
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2}
    config = xLSTMConfig(**sizes, qk_dim_factor=1.0, output_logit_soft_cap=0.1)
    model, ids = xLSTMForCausalLM(config).bfloat16().eval(), torch.tensor([[1, 7, 8, 3]])
    target = Target.of(model, name="capped", fingerprint="")
    assert target.caps_wide and torch.equal(target.logits(target.forward(ids).post_norm), model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_other_kernels_round_differently_are_the_models_own_in_16_bits_alone(dtype, monkeypatch):
    """A GPU chooses kernels by shape, so the same product has other roundings here than in the model's forward."""
    exact, noise = Target.output_values, torch.Generator().manual_seed(0)

    def rounded(self, states):
        values = exact(self, states)
        return values * (1 + 2**-8 * torch.randn(values.shape, generator=noise)).to(values.dtype)

    monkeypatch.setattr(Target, "output_values", rounded)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype)
    if dtype == torch.bfloat16:
        assert Target.of(model, name="llama", fingerprint="").logit_scale == 1
        return
    with pytest.raises(BadInput, match="^target llama: LlamaForCausalLM: its logits are computed in an unknown way$"):
        Target.of(model, name="llama", fingerprint="")


def test_states_that_leave_layers_are_known_from_those_that_enter_them(monkeypatch):
    """A Mamba lists the former; in bf16 it passes on fp32 ones, which are not more exact for that."""
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=3, state_size=8)).bfloat16()
    target = Target.of(model, name="mamba", fingerprint="")
    assert target.can_decode and target.forward(torch.tensor([[1, 7]])).post_norm.dtype == torch.float32
    read = Target.forward

    def mixed_up(self, ids, **how):
        output = read(self, ids, **how)
        return TargetOutput(output.features.flip(2), output.post_norm, output.best)

    monkeypatch.setattr(Target, "forward", mixed_up)
    with pytest.raises(BadInput, match="^target mamba: MambaForCausalLM: the state that enters layer 1 is computed"):
        Target.of(model, name="mamba", fingerprint="")


def test_states_in_no_cache_of_transformers_are_trained_on_but_not_decoded():
    config = RwkvConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2)
    target = Target.of(RwkvForCausalLM(config), name="rwkv", fingerprint="")
    with pytest.raises(BadInput, match="^target rwkv: its layers keep states in an unknown way.* but not decoded$"):
        generate(target, None, [1, 5, 9])
    with pytest.raises(BadInput, match="^target rwkv: a recurrent layer reads a row as one text"):
        two = Documents(torch.tensor([[0, 0, 0, 1]]), torch.tensor([[0, 1, 2, 0]]))
        target.forward(torch.tensor([[1, 5, 9, 1]]), documents=two)


def test_logits_that_are_no_multiple_of_the_output_layers_are_refused(monkeypatch):
    monkeypatch.setattr(Target, "as_logits", lambda self, values: values)
    with pytest.raises(
        BadInput, match="^target scaled: GraniteForCausalLM: its logits are computed in an unknown way$"
    ):
        Target.of(scaled_model(), name="scaled", fingerprint="")


def test_the_text_model_of_a_wrapper_is_loaded_without_its_vision_tower(tmp_path):
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {**sizes, "vocab_size": 61, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60)
    )
    whole.save_pretrained(tmp_path)
    target = Target.load(tmp_path)
    assert target.model.model.vision_tower is None and target.num_layers == 2
    ids = torch.tensor([[1, 7, 8, 3, 9, 2, 5, 5, 6, 1, 4]])
    torch.testing.assert_close(target.logits(target.forward(ids).post_norm), whole.eval()(input_ids=ids).logits)


LONGROPE: dict[str, Any] = {
    **{"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0] * 8, "long_factor": [8.0] * 8},
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("rope", "why"),
    [
        ({"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}, r"change with every token \(dynamic\)"),
        (LONGROPE, r"change \(longrope\)"),
    ],
)
def test_frequencies_that_change_end_the_context(rope, why, tiny_target):
    context = 32 if rope["rope_type"] == "dynamic" else 256
    target = tiny_target("qwen3", rope_parameters=rope, max_position_embeddings=context)
    assert target.can_decode and target.decodes_trees and target.num_positions == 32
    with pytest.raises(BadInput, match=f"exceed the context of 32, where its rotary frequencies {why}$"):
        generate(target, None, [1] * 30, max_new_tokens=3)
    assert len(generate(target, None, [1] * 29, max_new_tokens=3, eos_token_ids=[]).token_ids[0]) == 3
