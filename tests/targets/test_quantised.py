"""Targets stored quantised run as transformers has them, and never cast; or one line names the method."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.eval.decoding import generate
from headstart.targets import loading
from headstart.targets.dtype import default_dtype
from headstart.targets.loading import TargetConfig
from headstart.targets.target import Target
from headstart.train.inputs.config import load_run
from headstart.train.trainer import train_head
from safetensors.torch import load_file, save_file

BLOCK, LARGEST = 8, 448.0  # FP8's largest number
METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # the package that reads it, and its config
    "awq": ("gptqmodel", {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "gptq": ("optimum", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
    "compressed-tensors": ("compressed_tensors", {"format": "pack-quantized", "config_groups": {}}),
    "bitsandbytes": ("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "wonderquant": ("wonderquant", {"bits": 3}),
}


def stored(source: Path, folder: Path, method: str, config: dict[str, Any]) -> Path:
    """A copy of a target whose config.json says that it is quantised."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": method, **config}})
    )
    return folder


@pytest.fixture
def fp8(saved_target, tmp_path) -> Path:
    """A target in FP8 with a scale per block, as DeepSeek's and Qwen's."""
    how = {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    folder = stored(saved_target, tmp_path / "fp8", "fp8", how)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj" in name]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / LARGEST
        values = (blocks / scale[:, None, :, None]).view(rows, columns)
        tensors[name] = values.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_fp8_target_is_dequantised_with_its_scales_and_measured(fp8, saved_target, tmp_path):
    config = TargetConfig(path=str(fp8), dtype=default_dtype(str(fp8), "cpu"))
    target, original = Target.load(**vars(config)), Target.load(saved_target)
    for (name, got), wanted in zip(target.model.named_parameters(), original.model.parameters(), strict=True):
        assert got.dtype in (torch.float32, torch.bfloat16), name
        assert (got.float() - wanted.float()).abs().max() <= 0.07 * wanted.abs().max(), name
    prompt = [1, 5, 9]
    own = target.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert generate(target, None, [prompt], max_new_tokens=8, eos_token_ids=[]).token_ids == [own[0, 3:].tolist()]
    run = tmp_path / "run.yaml"
    run.write_text(
        f"target: {{path: {fp8}}}\nhead: {{type: eagle3}}\ndata: {{train: {saved_target.with_name('rows.jsonl')}}}\n"
        f"train: {{max_steps: 2, batch_size: 2, warmup_steps: 1, device: cpu, output_dir: {tmp_path / 'out'}}}\n"
    )
    train_head(load_run(run, ()))
    assert list((tmp_path / "out").rglob("model.safetensors"))


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_be_read_is_refused_by_name(method, saved_target, tmp_path):
    package, config = METHODS[method]
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    folder = stored(saved_target, tmp_path / "target", method, config)
    with pytest.raises(BadInput, match=rf"target: stored quantised \({method}\): "):
        Target.load(folder, dtype=default_dtype(str(folder), "cpu"))


def test_weights_that_stay_quantised_are_not_cast(fp8, monkeypatch):
    """As on a device that computes in FP8."""
    monkeypatch.setattr(loading, "is_quantised", lambda model: True)
    assert default_dtype(str(fp8), "cpu") == "auto"
    for dtype in ("float32", "bfloat16"):
        problem = rf"target.dtype {dtype}: weights stored quantised \(fp8\) stay as stored: leave it at auto"
        with pytest.raises(BadInput, match=problem):
            Target.load(fp8, dtype=dtype)
    Target.load(fp8, dtype="auto")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32])
def test_packed_weights_are_known_by_their_dtype(dtype):
    layer = torch.nn.Linear(4, 4)
    assert not loading.is_quantised(layer)
    layer.register_buffer("qweight", torch.zeros(4, 4).to(dtype))
    assert loading.is_quantised(layer)
