"""Rows with pictures in vLLM: the prompts that it reads, its texts and what a head drafts are ours."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dense import rope
from headstart.engines.check import check_folder
from headstart.engines.export import export_head
from headstart.engines.heads import load_head
from headstart.eval.decoding import generate
from headstart.eval.suites.prompts import load_suite
from headstart.targets.chat.messages import for_api, normalise
from headstart.targets.target import Target
from kind import Kind, kind
from vllm_runs import LENGTH, asked_vllm, job_of, same_drafts, speculation, trained
from wrappers import WRAPPERS

pytest.importorskip("PIL")
pictured = pytest.importorskip("pictured")
NUM_ROWS, NUM_DRAFT = 6, 3
HEAD = {"type": "eagle3", "num_depths": 3}
SECTIONS: dict[str, Any] = {"mrope_section": [4, 6, 6]}


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
}
pytestmark = pytest.mark.timeout(3600)


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
    run = trained(tmp_path, "run", HEAD, max_steps=60)
    export_head(run, tmp_path / "head", to="vllm", dtype="float32")
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
    job = {name: {**job_of(path, prompts, **how), "prompts": asked}}
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
