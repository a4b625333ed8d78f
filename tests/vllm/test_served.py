"""Exported heads in vLLM itself: they load, the text stays the target's, and the drafts are those that we measured."""

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from headstart.eval.engine import Engine
from headstart.eval.generate import Stop, decode, generate
from headstart.eval.sampling import Sampling
from headstart.heads.export.check import check_folder
from headstart.heads.export.write import export_head
from headstart.heads.registry import load_head
from headstart.heads.target import Target
from headstart.train.config import load_run
from headstart.train.trainer import train
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

World = dict[str, tuple[Path, list[list[int]]]]  # of each kind of target a folder, and the prompts
SIZE = 120  # tokens of the vocabulary
LENGTH = 40  # tokens of an answer
TARGETS: dict[str, Callable[..., Any]] = {
    "llama": LlamaConfig,
    "qwen3": partial(Qwen3Config, head_dim=32),
    "qwen2": partial(Qwen2Config, architectures=["Qwen2ForCausalLM"]),
}
HEADS = {  # name: target, config, vLLM's method, K
    "eagle3": ("llama", {"type": "eagle3", "num_depths": 4}, "eagle3", 4),
    "eagle": ("llama", {"type": "eagle", "num_depths": 3}, "eagle", 3),
    "medusa": ("llama", {"type": "medusa", "num_depths": 3, "output": "own"}, "medusa", 3),
    "draft_lm": ("llama", {"type": "draft_lm"}, "draft_model", 3),
    "eagle3 of qwen3": ("qwen3", {"type": "eagle3", "num_depths": 3}, "eagle3", 3),
    "cut vocabulary": ("qwen3", {"type": "eagle3", "num_depths": 3, "draft_vocab_size": 60}, "eagle3", 3),
    "mtp": ("qwen2", {"type": "mtp", "layout": "mimo", "num_depths": 1}, "mtp", 1),
}
OFFLINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
pytestmark = pytest.mark.timeout(3600)  # an engine starts for every head


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    found = request.config.getoption("--vllm-python", default=None)
    if not found:
        pytest.skip("needs an environment with vLLM: make test-vllm")
    return str(found)


@pytest.fixture(scope="module")
def world(python: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Targets, and prompts whose greedy answers stand in rows.jsonl beside each: a head can learn them by heart."""
    source = torch.Generator().manual_seed(3)
    prompts = [[1, *torch.randint(3, SIZE, (4 + i,), generator=source).tolist()] for i in range(6)]
    return {kind: (make_target(kind, tmp_path_factory.mktemp(f"served-{kind}"), prompts), prompts) for kind in TARGETS}


def make_target(kind: str, folder: Path, prompts: list[list[int]]) -> Path:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(TARGETS[kind](**sizes, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder / "target")
    target = Target.load(folder / "target", dtype="float32")
    answers = generate(target, None, prompts, max_new_tokens=LENGTH, eos_token_ids=[]).token_ids
    rows = [{"input_ids": p + a, "prompt_length": len(p)} for p, a in zip(prompts, answers, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def served(python: str, world: World, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What vLLM made of every head."""
    job: dict[str, Any] = {
        kind: {"folder": str(folder / "target"), "prompts": prompts, "max_new_tokens": LENGTH, "heads": {}}
        for kind, (folder, prompts) in world.items()
    }
    for i, (name, (kind, config, method, num_draft)) in enumerate(HEADS.items()):
        folder, _ = world[kind]
        export_head(trained(folder, f"run{i}", config), folder / f"head{i}", to="vllm")
        assert check_folder(folder / f"head{i}").problems == []
        where = "within" if method == "mtp" else "model"
        speculation = {"method": method, where: str(folder / f"head{i}"), "num_speculative_tokens": num_draft}
        job[kind]["heads"][name] = speculation
        (folder / f"{name}.txt").write_text(str(folder / f"run{i}" / "final"))
    work = tmp_path_factory.mktemp("job")
    (work / "job.json").write_text(json.dumps(job))
    command = [python, str(Path(__file__).with_name("client.py")), str(work / "job.json"), str(work / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**OFFLINE, "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((work / "out.json").read_text())


def trained(folder: Path, name: str, head: dict[str, Any]) -> Path:
    if head["type"] == "draft_lm":
        head = {**head, "path": str(folder / "target")}
    how = {"max_steps": 60, "batch_size": 6, "learning_rate": 3e-3, "warmup_steps": 5, "device": "cpu"}
    config = {"target": {"path": str(folder / "target"), "dtype": "float32"}, "head": head}
    config |= {"data": {"train": str(folder / "rows.jsonl")}, "train": {**how, "output_dir": str(folder / name)}}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return train(load_run(folder / f"{name}.yaml"))


@pytest.mark.parametrize("name", list(HEADS))
def test_vllm_drafts_and_accepts_what_we_measure(name: str, world: World, served: dict, figures: list) -> None:
    kind, _, _, num_draft = HEADS[name]
    folder, prompts = world[kind]
    theirs = served[name]
    assert "error" not in theirs, theirs["error"]
    target = Target.load(folder / "target", dtype="float32")
    head = load_head(Path((folder / f"{name}.txt").read_text()), target)
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
    counted = {"num_rounds": num_rounds, "accepted_at": accepted_at, "vllm_accepted_at": theirs["accepted_at"]}
    of = {"head": name, "target": kind, "method": HEADS[name][2], "num_draft_tokens": num_draft}
    figures.append({**of, "num_texts_equal": len(prompts), **counted, "vllm_num_drafts": theirs["num_drafts"]})
