"""A target read without its layers is, in all that heads read of it, the whole one, on every kind of target."""

import json

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.targets.bare import BareTarget, NeedsLayers
from headstart.targets.frozen_model import OutputUse
from headstart.targets.loading import TargetConfig
from headstart.targets.target import Target
from kind import quietly
from kinds import KINDS
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_without_layers_a_target_reads_and_writes_the_same(name, tmp_path):
    with quietly():
        KINDS[name].model().bfloat16().save_pretrained(tmp_path)
    for dtype in ("auto", "float32"):
        try:
            whole = Target.load(tmp_path, dtype=dtype)
        except BadInput as error:
            pytest.skip(str(error))
        bare = BareTarget.read(TargetConfig(path=str(tmp_path), dtype=dtype), whole.output_use)
        known = [(each.fingerprint, each.dtype, each.eos_token_ids) for each in (whole, bare)]
        assert known[0] == known[1]
        ids = torch.arange(whole.vocab_size)[None]
        assert torch.equal(bare.embed(ids), whole.embed(ids)) and bare.embed(ids).dtype == whole.embed(ids).dtype
        assert torch.equal(bare.final_norm_scale(), whole.final_norm_scale())
        states = torch.randn(3, 5, whole.hidden_size, generator=torch.Generator().manual_seed(0))
        assert torch.equal(bare.logits(states), whole.logits(states))
        ours, theirs = bare.output_layer.weight, bare.input_embedding.weight
        assert (ours is theirs) == (whole.output_layer.weight is whole.input_embedding.weight)
        held = {id(value) for part in bare.parts for value in part.state_dict(keep_vars=True).values()}
        others = [value for value in bare.model.parameters() if id(value) not in held]
        assert all(value.device.type == "meta" for value in others if value.ndim > 1), "no other matrix is held"
        assert not any(value.requires_grad for value in bare.model.parameters())


def saved(folder, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, "num_attention_heads": 4, **changes})).bfloat16()
    with quietly():
        model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_quantised_output_layer_is_dequantised_as_in_the_whole_target(tmp_path):
    stored = saved(tmp_path, tie_word_embeddings=False)
    for name, value in list(stored.items()):
        if value.ndim == 2 and "embed" not in name:
            blocks = value.float().view(value.shape[0] // 128, 128, -1, 128)
            scale = blocks.abs().amax((1, 3)) / 448
            stored[name] = (blocks / scale[:, None, :, None]).view_as(value).to(torch.float8_e4m3fn)
            stored[name.replace("weight", "weight_scale_inv")] = scale
    rewrite(tmp_path, stored)
    config = json.loads((tmp_path / "config.json").read_text())
    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": []}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    whole = Target.load(tmp_path)
    bare = BareTarget.read(TargetConfig(path=str(tmp_path)), whole.output_use)
    assert torch.equal(bare.output_layer.weight, whole.output_layer.weight) and bare.dtype == torch.bfloat16
    assert whole.output_layer.weight.float().norm() > 1 and bare.layers[0].mlp.up_proj.weight.device.type == "meta"


def packed(weight: torch.Tensor, method: str) -> dict[str, torch.Tensor]:
    """What a checkpoint of that method has in a layer's weight's place [O, I], by what takes `weight`'s place in its
    name; zeros, as nothing of ours reads them."""
    (rows, columns), half = weight.shape, torch.bfloat16
    scales = {"weight_scale": torch.zeros(rows, columns // 16, dtype=half)}
    return {
        "W8A8": {"weight": weight.char(), "weight_scale": torch.zeros(rows, 1, dtype=half)},
        "W4A16": {"weight_packed": torch.zeros(rows, columns // 8).int(), **scales},
        "FP8": {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.zeros(rows, 1, dtype=half)},
        "AWQ": {"qweight": torch.zeros(columns, rows // 8).int(), "qzeros": torch.zeros(1, rows // 8).int()},
        "GPTQ": {"qweight": torch.zeros(columns // 8, rows).int(), "g_idx": torch.zeros(columns).int()},
        "NVFP4": {"weight": torch.zeros(rows, columns // 2).byte(), "weight_scale_2": torch.zeros(())},
    }[method]


PACKED = {
    "W8A8": {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]},
    "W4A16": {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]},
    "FP8": {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
    "NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
}


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("method", PACKED)
def test_of_packed_layers_embedding_norm_and_output_layer_are_read_as_they_are(method, is_tied, tmp_path):
    """Without the method's package: a server computes these layers, in which our process has no part."""
    stored = saved(tmp_path, tie_word_embeddings=is_tied)
    whole, ids = Target.load(tmp_path), torch.arange(256)[None]
    for name, value in list(stored.items()):
        if value.ndim == 2 and ".layers." in name:
            del stored[name]
            stored |= {name.replace("weight", part): tensor for part, tensor in packed(value, method).items()}
    rewrite(tmp_path, stored)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": PACKED[method]}))
    bare = BareTarget.read(TargetConfig(path=str(tmp_path)))
    assert bare.final_norm is not None and whole.final_norm is not None
    assert bare.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert bare.dtype == whole.dtype and torch.equal(bare.embed(ids), whole.embed(ids))
    states = torch.randn(3, whole.hidden_size, dtype=whole.dtype)
    assert torch.equal(bare.logits(bare.final_norm(states)), whole.logits(whole.final_norm(states)))


@pytest.mark.parametrize("kept", ["both", "lm_head", "embed_tokens"])
def test_tied_tables_are_found_under_either_name(kept, tmp_path):
    stored = saved(tmp_path, tie_word_embeddings=True)
    table = stored.pop("model.embed_tokens.weight")
    names = {"lm_head.weight": kept != "embed_tokens", "model.embed_tokens.weight": kept != "lm_head"}
    rewrite(tmp_path, stored | {name: table.clone() for name, is_there in names.items() if is_there})
    bare = BareTarget.read(TargetConfig(path=str(tmp_path)), OutputUse())
    assert bare.output_layer.weight is bare.input_embedding.weight and torch.equal(bare.output_layer.weight, table)


def test_two_tables_that_differ_are_two_whatever_the_config_says(tmp_path):
    stored = saved(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, stored | {"lm_head.weight": 2 * stored["model.embed_tokens.weight"]})
    whole, bare = Target.load(tmp_path), BareTarget.read(TargetConfig(path=str(tmp_path)), OutputUse())
    assert torch.equal(bare.output_layer.weight, whole.output_layer.weight)
    ids = torch.arange(256)[None]
    assert torch.equal(bare.embed(ids), whole.embed(ids))


def test_missing_and_misfitting_tensors_are_one_line(tmp_path):
    stored = saved(tmp_path, tie_word_embeddings=False)
    output = stored.pop("lm_head.weight")
    rewrite(tmp_path, stored)
    with pytest.raises(NeedsLayers, match="^no weights for lm_head.weight under a known name$"):
        BareTarget.read(TargetConfig(path=str(tmp_path)), OutputUse())
    rewrite(tmp_path, stored | {"lm_head.weight": output[:-1]})
    with pytest.raises(BadInput, match=r"tensor lm_head.weight: expected \(256, 128\), found \(255, 128\)"):
        BareTarget.read(TargetConfig(path=str(tmp_path)), OutputUse())
    whole = (tmp_path / "model.safetensors").read_bytes()
    for content in (whole[:-10], whole[:4], b"", b"x" * 100):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(BadInput, match="model.safetensors: damaged"):
            BareTarget.read(TargetConfig(path=str(tmp_path)), OutputUse())
