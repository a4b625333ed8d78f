"""Rows with pictures in vLLM: the prompts that it reads, its texts and what a head drafts are ours."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense import rope
from headstart.engines.check import check_folder
from headstart.engines.export import export_head
from headstart.engines.heads import load_head
from headstart.eval.decoding import generate
from headstart.eval.suites.prompts import load_suite
from headstart.targets.chat.messages import for_api, normalise
from headstart.targets.images.image_rows import own_inputs
from headstart.targets.images.pictures import pictures_of
from headstart.targets.target import Target
from kind import Kind, kind
from transformers import AutoModelForImageTextToText
from vllm_runs import LENGTH, asked_vllm, job_of, same_drafts, speculation, trained
from wrappers import WRAPPERS

pytest.importorskip("PIL")
pictured = pytest.importorskip("pictured")
NUM_ROWS, NUM_DRAFT = 6, 3
HEAD = {"type": "eagle3", "num_depths": 3}
SECTIONS: dict[str, Any] = {"mrope_section": [4, 6, 6]}
HALF = rope(mrope_interleaved=True, mrope_section=[3, 3, 2], partial_rotary_factor=0.5)


def sized(name: str, text: Kind, **vision: Any) -> Kind:
    """A kind whose heads are as wide as vLLM's kernels for CPUs ask."""
    whole = WRAPPERS[name]
    return replace(
        whole, text=text, changes={**whole.changes, "vision_config": {**whole.changes["vision_config"], **vision}}
    )


KINDS = {
    "llava": sized("llava", kind("", "llama", head_dim=32), hidden_size=64),
    "qwen2_5_vl": sized(
        "qwen2_5_vl",
        kind("", "qwen2_5_vl_text", num_attention_heads=2, rope_parameters=rope(**SECTIONS)),
        hidden_size=64,
    ),
    "qwen3_vl": sized(
        "qwen3_vl",
        kind("", "qwen3_vl_text", head_dim=32, rope_parameters=rope(mrope_interleaved=True, **SECTIONS)),
        hidden_size=64,
    ),
    "qwen3_5_full": sized(
        "qwen3_5_full",
        kind("", "qwen3_5_text", rope_parameters=HALF, head_dim=32, linear_key_head_dim=128, linear_value_head_dim=128),
        hidden_size=64,
    ),
}
pytestmark = pytest.mark.timeout(3600)


def learn_by_heart(path: Path, target: Target, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Train the target in that folder on its own answers until it is sure of them."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(30):
        optimizer.zero_grad()
        for prompt, new in zip(prompts, answers, strict=True):
            ids, labels = torch.tensor([[*prompt, *new]]), torch.tensor([[*(-100 for _ in prompt), *new]])
            given = own_inputs(target, ids[0].tolist(), pictures_of(prompt))
            (model(input_ids=ids, labels=labels, **given).loss / len(prompts)).backward()
        optimizer.step()
    model.save_pretrained(path)


@pytest.mark.parametrize("name", KINDS)
def test_vllm_reads_pictures_and_drafts_as_we_do(name: str, python: str, tmp_path: Path, figures: list) -> None:
    if name != "llava":
        pytest.importorskip("torchvision")
    path = pictured.image_target(name, tmp_path / "target", KINDS[name])
    rows = pictured.image_rows(tmp_path, NUM_ROWS)
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = Target.load(path, dtype="float32")
    prompts = load_suite(tmp_path / "asked.jsonl", target, max_new_tokens=LENGTH).prompts
    answers = generate(target, None, prompts, max_new_tokens=LENGTH, eos_token_ids=[]).token_ids
    for row, new in zip(rows, answers, strict=True):
        row["messages"].append({"role": "assistant", "content": target.tokenizer.decode(new)})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dtype = "float32"
    if name == "qwen3_5_full":  # vLLM's kernels for it on CPUs take bfloat16, whose rounding would decide random texts
        dtype = "bfloat16"
        learn_by_heart(path, target, prompts, answers)
        target = Target.load(path, dtype=dtype)
    run = trained(tmp_path, "run", HEAD, max_steps=60)
    export_head(run, tmp_path / "head", to="vllm", dtype=dtype)
    assert check_folder(tmp_path / "head").problems == []
    asked = [
        {
            "messages": [
                for_api(one) for one in normalise(row["messages"][:-1], f"{tmp_path}/_:1", row.get("images", ()))
            ]
        }
        for row in rows
    ]
    how: dict[str, Any] = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}}
    job = {name: {**job_of(path, prompts, dtype=dtype, **how), "prompts": asked}}
    speculations = {num: speculation(tmp_path / "head", HEAD, "eagle3", num) for num in (1, NUM_DRAFT)}
    if name != "llava":  # the second draft is the first that vLLM writes into a wrong place
        speculations[NUM_DRAFT]["mended"] = "slots_by_length"
    job[name]["heads"] = {str(num): one for num, one in speculations.items()}
    served = asked_vllm(python, job, tmp_path)
    for num in speculations:
        theirs = served[str(num)]
        assert theirs.get("read") == prompts, theirs.get("error")
        found = same_drafts(target, load_head(run, target), prompts, theirs, num_draft=num)
        figures.append({"head": "eagle3", "target": f"{name}, with pictures", "num_draft_tokens": num, **found})
