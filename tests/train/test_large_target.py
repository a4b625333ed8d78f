"""A run from extracted features on a target of 141 GB starts in seconds and in the memory of its output layer."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from headstart.base.jsonl import read_appended
from headstart.data_pipelines.rows.samples import Sample
from headstart.data_pipelines.storage.extract import ExtractConfig, fields_of
from headstart.data_pipelines.storage.features import Reads, origin_of
from headstart.data_pipelines.storage.quantise import pack
from headstart.data_pipelines.storage.shard_file import PackedStates, StoredSample
from headstart.data_pipelines.storage.shards import ShardWriter
from headstart.targets.bare import BareTarget
from headstart.targets.cpu.build import multiplies_bf16
from headstart.targets.frozen_model import OutputUse
from headstart.targets.loading import TargetConfig
from headstart.train.inputs.config import load_inputs
from transformers import LlamaConfig
from words import word_tokenizer

LAYERS, SIZE, WIDE, HEADS, KEYS, VOCABULARY = 80, 8192, 28672, 64, 8, 128256  # Llama-3.1-70B
GB = 2**30
WATCH = """
import resource, runpy, sys
sys.argv = ["headstart.train", *sys.argv[1:]]
try:
    runpy.run_module("headstart.train", run_name="__main__")
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"used {used.ru_maxrss * 1024} {used.ru_utime + used.ru_stime}")
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A folder whose files have the shapes of Llama-3.1-70B: holes, which read as zeros, but for a few values."""
    folder = tmp_path_factory.mktemp("large") / "target"
    sizes: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=SIZE, intermediate_size=WIDE)
    sizes |= dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KEYS)
    config = LlamaConfig(**sizes, tie_word_embeddings=False, eos_token_id=2, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    word_tokenizer(VOCABULARY).save_pretrained(folder)
    keys = SIZE // HEADS * KEYS
    layer = {"input_layernorm": (SIZE,), "post_attention_layernorm": (SIZE,), "mlp.down_proj": (SIZE, WIDE)}
    layer |= {"mlp.gate_proj": (WIDE, SIZE), "mlp.up_proj": (WIDE, SIZE), "self_attn.q_proj": (SIZE, SIZE)}
    layer |= {"self_attn.k_proj": (keys, SIZE), "self_attn.v_proj": (keys, SIZE), "self_attn.o_proj": (SIZE, SIZE)}
    parts = [{f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()} for i in range(LAYERS)]
    ends = {"model.embed_tokens.weight": (VOCABULARY, SIZE), "model.norm.weight": (SIZE,)}
    where: dict[str, str] = {}
    for number, shapes in enumerate([*parts, {**ends, "lm_head.weight": (VOCABULARY, SIZE)}]):
        file = f"model-{number:05d}.safetensors"
        where |= dict.fromkeys(shapes, file)
        write_holes(folder / file, shapes, ones="model.norm.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def write_holes(path: Path, shapes: dict[str, tuple[int, ...]], *, ones: str) -> None:
    """A safetensors file of bf16 tensors that take no room on the disk. ones: the tensor that has values."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        if ones in header:
            file.seek(8 + len(text) + header[ones]["data_offsets"][0])
            file.write(np.full(shapes[ones], 0x3F80, np.uint16).tobytes())


@pytest.mark.slow
def test_training_starts_in_the_memory_of_the_output_layer(large, tmp_path):
    rows, source = tmp_path / "rows.jsonl", np.random.default_rng(0)
    tokens = [source.integers(4, 400, 24).tolist() for _ in range(4)]
    rows.write_text("".join(json.dumps({"input_ids": ids, "prompt_length": 8}) + "\n" for ids in tokens))
    path, features = tmp_path / "run.yaml", tmp_path / "features"
    train = {"max_steps": 2, "batch_size": 1, "warmup_steps": 0, "device": "cpu", "output_dir": str(tmp_path / "run")}
    data = {"train": str(rows), "features": str(features), "max_length": 64}
    head = {"type": "medusa", "num_depths": 1, "output": "shared"}
    target = {"path": str(large), "dtype": "bfloat16"}
    path.write_text(yaml.safe_dump({"target": target, "head": head, "data": data, "train": train}))

    bare = BareTarget.read(TargetConfig(path=str(large), dtype="bfloat16"), OutputUse())
    assert bare.num_layers == LAYERS and not bare.embed(torch.tensor([[17]])).any() and bare.final_norm_scale().all()
    run, reads, stored = load_inputs(path), Reads((), "nowhere", "starts"), ExtractConfig()
    writer = ShardWriter(features, fields=fields_of(bare, reads, stored, origin_of(run.data, bare.tokenizer)))
    for ids in tokens:
        sample = Sample.of(ids, [i >= 8 for i in range(len(ids))])
        at = reads.positions(sample.loss_mask)
        states = torch.randn(int(at[1].sum()), SIZE)
        nothing, some = (pack(part, stored.storage_dtype) for part in (states.new_empty(0, 0, SIZE), states))
        writer.add(StoredSample(sample, PackedStates(at[0], nothing, at[1], some, torch.bfloat16)))
    writer.finish()

    began = time.time()
    line = [sys.executable, "-c", WATCH, str(path)]
    done = subprocess.run(line, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [row["loss"] for row in read_appended(tmp_path / "run" / "metrics.jsonl")]
    assert losses == pytest.approx([np.log(VOCABULARY)] * 2, rel=1e-3), "an output layer of zeros guesses evenly"
    memory, seconds = map(float, done.stdout.split("used ")[1].split())
    most = 4.5 if multiplies_bf16() else 8  # the latter keeps the output layer's panels in fp32: 7.1 GB with AVX2
    assert memory < most * GB, f"{memory / GB:.2f} GB, of which 2.1 are the output layer and 1.1 the head in training"
    assert seconds < 150, f"{seconds:.0f} s of a processor in all, after {time.time() - began:.0f} s"
