"""Packed bf16 layers compute what the model's own do, as near to fp32 as those, through caches, batches and trees."""

import pytest
import torch
from headstart.heads.nn.packed import multiplies_bf16, pack_linears
from headstart.heads.nn.packed_decoder import PackedDecoder
from headstart.heads.target import Target
from torch import nn

needs_bf16 = pytest.mark.skipif(not multiplies_bf16(), reason="this processor has no products of bf16")
KNOWN = ["llama", "qwen2", "qwen3"]


@pytest.fixture(scope="module", params=KNOWN)
def targets(request, tiny_model):
    """The same weights in fp32, and in bf16 as it decodes on a CPU."""
    wide = tiny_model(request.param, hidden_size=64, intermediate_size=96)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.copy_(parameter.to(torch.bfloat16) * 0.5 if parameter.ndim > 1 else parameter)
    narrow = tiny_model(request.param, hidden_size=64, intermediate_size=96)
    narrow.load_state_dict(wide.state_dict())
    return Target(wide, name="wide", fingerprint=""), Target(narrow.to(torch.bfloat16), name="narrow", fingerprint="")


def read(target, ids, split, *, layers=(1, 3), is_round=False, seen=None):
    """Post-norm states, features and logits of ids [B, T], read in pieces of these lengths through a cache."""
    cache, outputs, start = target.new_cache(64), [], 0
    for width in split:
        positions = torch.arange(start, start + width).expand(len(ids), -1)
        part, start = ids[:, start : start + width], start + width
        outputs.append(
            target.forward(
                part, feature_layers=layers, cache=cache, positions=positions, extent=start, is_round=is_round
            )
        )
    post_norm = torch.cat([output.post_norm for output in outputs], 1)
    return post_norm, torch.cat([output.features for output in outputs], 1), target.logits(post_norm)


@needs_bf16
@pytest.mark.parametrize("split", [(20,), (12, 1, 6, 1), (1,) * 20], ids=str)
@torch.no_grad()
def test_states_features_and_logits_are_the_models_own(targets, split):
    wide, narrow = targets
    ids = torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    exact, ours = read(wide, ids, split), read(narrow, ids, split)
    assert narrow._packed is not None, "the packed layers were used"
    theirs = narrow.model(ids, output_hidden_states=True)
    their_features = torch.stack([theirs.hidden_states[i] for i in (1, 3)], 2)
    for true, packed, plain in zip(exact, ours, (theirs.hidden_states[-1], their_features, theirs.logits), strict=True):
        error, usual = (packed.float() - true).norm(), (plain.float() - true).norm()
        assert error <= 1.5 * usual + 1e-3, "no further from fp32 than the model in bf16"


@needs_bf16
@pytest.mark.slow
@torch.no_grad()
def test_the_compiled_layer_computes_what_it_does_uncompiled(targets):
    _, narrow = targets
    ids = torch.randint(3, 61, (1, 18), generator=torch.Generator().manual_seed(1))
    plain = read(narrow, ids, (12, 6))
    narrow.packed.compiles = True  # so small a target is not compiled by itself
    compiled = read(narrow, ids, (12, 6), is_round=True)
    assert torch.allclose(plain[0].float(), compiled[0].float(), rtol=0.05, atol=0.05)
    assert (1, 6, False) in narrow._packed.compiled


@needs_bf16
def test_other_layers_and_other_precisions_are_left_to_the_model(tiny_model):
    for family, dtype in (("gemma3", torch.bfloat16), ("llama", torch.float32), ("gpt_neox", torch.bfloat16)):
        target = Target(tiny_model(family).to(dtype), name=family, fingerprint="")
        assert not PackedDecoder.takes(target.layers, target.config, target.output_layer.weight)


@needs_bf16
@pytest.mark.parametrize("biases", [{"attention_bias": True}, {"mlp_bias": True}], ids=str)
@torch.no_grad()
def test_biases_that_it_does_not_add_are_left_to_the_model(tiny_model, biases):
    """Llama's attention_bias is of the output product, too."""
    model = tiny_model("llama", **biases)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    target = Target(model.to(torch.bfloat16), name="biased", fingerprint="")
    ids = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(2))
    _, _, logits = read(target, ids, (9,))
    assert target._packed is None
    assert torch.allclose(logits, target.model(ids).logits.float(), rtol=0.05, atol=0.1)


@needs_bf16
def test_packed_linears_give_the_same_product_and_leave_gradients_alone():
    layers = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 48, bias=False)).to(torch.bfloat16)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = layers(x)
    pack_linears(layers)
    with torch.no_grad():
        assert torch.allclose(layers(x), wanted, rtol=0.02, atol=0.02)
    layers(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())
