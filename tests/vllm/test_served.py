"""Exported heads in vLLM itself: they load, the text stays the target's, and the drafts are those that we measured."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from headstart.eval.engine import Engine
from headstart.eval.generate import decode, generate
from headstart.eval.stopping import Stop
from headstart.eval.verify import Sampling
from headstart.heads.export.write import export_head
from headstart.heads.registry import load_head
from headstart.heads.target import Target
from headstart.train.config import load_run
from headstart.train.trainer import train
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

World = tuple[Path, list[list[int]]]  # a folder, and the prompts
SIZE = 120  # tokens of the vocabulary
LENGTH = 40  # tokens of an answer
HEADS = {  # family: its config, vLLM's method, K
    "eagle3": ({"num_depths": 4}, "eagle3", 4),
    "eagle": ({"num_depths": 3}, "eagle", 3),
    "medusa": ({"num_depths": 3, "output": "own"}, "medusa", 3),
    "draft_lm": ({}, "draft_model", 3),
}
OFFLINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    found = request.config.getoption("--vllm-python", default=None)
    if not found:
        pytest.skip("needs an environment with vLLM: make test-vllm")
    return str(found)


@pytest.fixture(scope="module")
def world(python: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A folder with `target`, and prompts whose greedy answers stand in rows.jsonl: a head can learn them by heart."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
    }
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=SIZE, num_key_value_heads=2, head_dim=32, **sizes, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder / "target")
    source = torch.Generator().manual_seed(3)
    prompts = [[1, *torch.randint(3, SIZE, (4 + i,), generator=source).tolist()] for i in range(6)]
    target = Target.load(folder / "target", dtype="float32")
    answers = generate(target, None, prompts, max_new_tokens=LENGTH, eos_token_ids=[]).token_ids
    rows = [{"input_ids": p + a, "prompt_length": len(p)} for p, a in zip(prompts, answers, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, prompts


@pytest.fixture(scope="module")
def served(python: str, world: World) -> dict:
    """What vLLM made of every head."""
    folder, prompts = world
    heads: dict[str, Any] = {}
    for family, (options, method, num_draft) in HEADS.items():
        head = {"type": family, **options}
        if family == "draft_lm":
            head["path"] = str(folder / "target")
        how = {"max_steps": 60, "batch_size": 6, "learning_rate": 3e-3, "warmup_steps": 5, "device": "cpu"}
        config = {"target": {"path": str(folder / "target"), "dtype": "float32"}, "head": head}
        config |= {"data": {"train": str(folder / "rows.jsonl")}}
        config |= {"train": {**how, "output_dir": str(folder / f"run-{family[0]}{len(family)}")}}
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        trained = train(load_run(folder / "run.yaml"))
        export_head(trained, folder / f"head{len(heads)}", to="vllm")
        heads[family] = {"method": method, "model": str(folder / f"head{len(heads)}")}
        heads[family]["num_speculative_tokens"] = num_draft
        (folder / f"{family}.txt").write_text(str(trained))
    job = {"target": str(folder / "target"), "prompts": prompts, "max_new_tokens": LENGTH, "heads": heads}
    (folder / "job.json").write_text(json.dumps(job))
    command = [python, str(Path(__file__).with_name("client.py")), str(folder / "job.json"), str(folder / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**OFFLINE, "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("family", sorted(HEADS))
def test_vllm_drafts_and_accepts_what_we_measure(family: str, world: World, served: dict) -> None:
    folder, prompts = world
    theirs, num_draft = served["heads"][family], HEADS[family][2]
    assert "error" not in theirs, theirs["error"]
    assert theirs["texts"] == served["texts"]
    target = Target.load(folder / "target", dtype="float32")
    head = load_head(Path((folder / f"{family}.txt").read_text()), target)
    num_rounds, accepted_at = 0, [0] * num_draft
    for prompt, text, drafted in zip(prompts, theirs["texts"], theirs["rounds"], strict=True):
        how: dict[str, Any] = {
            "batch_size": 1,
            "max_length": len(prompt) + LENGTH,
            "num_draft_tokens": num_draft,
            "tree": None,
        }
        engine = Engine(target, head, **how, sampling=Sampling(), generator=None)
        ours: list[list[int]] = []
        draft = engine.draft

        def kept(read, draft=draft, ours=ours):
            proposal = draft(read)
            ours.append(proposal.tokens[0].tolist())
            return proposal

        engine.draft = kept  # type: ignore[method-assign]
        done = decode(engine, [prompt], max_new_tokens=LENGTH, stop=Stop.of(target))
        assert done.token_ids[0] == text
        assert drafted[: len(ours)] == ours and len(drafted) - len(ours) <= 1  # vLLM may draft behind the end too
        num_rounds += len(ours)
        for one in done.rounds[1:]:
            for k in range(one.num_accepted[0]):
                accepted_at[k] += 1
    assert theirs["num_drafts"] == num_rounds
    assert sum(accepted_at) > num_rounds / 4  # it did learn: equal drafts that never stand would show little
    for ours_at, theirs_at in zip(accepted_at, theirs["accepted_at"], strict=True):
        assert 0 <= theirs_at - ours_at <= len(prompts)  # drafts behind the end of a text count there
