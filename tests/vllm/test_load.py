"""`headstart eval --engine vllm` under load, for real: the texts and the acceptance of our own engine."""

import json
from pathlib import Path

import pytest
import torch
from headstart.engines.heads import load_head
from headstart.eval.decoding.loop import generate
from headstart.eval.figures.metrics import acceptance
from headstart.scripts.evaluating.evaluate import evaluate
from headstart.targets.target import Target
from test_states import KINDS, SIZE
from transformers import AutoModelForCausalLM
from vllm_runs import LENGTH, OFFLINE, save_tokenizer, trained, write_rows

K = 3
ARGS = "--dtype float32 --max-model-len 256 --max-num-seqs 4 --enforce-eager --gpu-memory-utilization 0.1 "
ARGS += "--kv-cache-memory-bytes 67108864"
pytestmark = pytest.mark.timeout(3600)


def test_under_load_vllm_accepts_what_our_engine_accepts(python: str, tmp_path: Path, monkeypatch) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(KINDS["untied, without bias"]).save_pretrained(tmp_path / "target")
    save_tokenizer(tmp_path / "target", num_words=SIZE)
    prompts = [[1, 5 + 3 * i, 40 + i, 7] for i in range(6)]
    write_rows(tmp_path, prompts)
    run = trained(tmp_path, "eagle3_run", {"type": "eagle3", "num_depths": K})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"input_ids": prompt}) + "\n" for prompt in prompts))
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", "")
    evaluate(target=str(tmp_path / "target"), head=[str(run)], prompts=[str(tmp_path / "prompts.jsonl")], engine="vllm",
             engine_python=python, engine_args=ARGS, concurrency=[1, 4], max_new_tokens=LENGTH, repeats=1,
             output=tmp_path / "out")  # fmt: skip
    one, four = json.loads((tmp_path / "out" / "report.json").read_text())["served"]
    target = Target.load(tmp_path / "target", dtype="float32")
    decoded = generate(target, load_head(run, target), prompts, max_new_tokens=LENGTH, num_draft_tokens=K)
    ours = acceptance(decoded.rounds, num_draft_tokens=K).length
    for found in (one, four):
        assert found["texts"]["report"]["identical"] == found["texts"]["report"]["checked"] == 6, found["texts"]
        assert found["texts"]["by_ids"] == found["prompts"]["same"] == 6
        assert found["acceptance"]["acceptance_length"] == pytest.approx(ours, rel=0.01)
        assert (
            found["speedup"] > 0 and found["drafted"]["num_failed"] == 0 and found["drafted"]["tokens_per_second"] > 0
        )
