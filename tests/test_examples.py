"""The examples run as their first lines say."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from headstart.base.jsonl import read_jsonl
from headstart.data_pipelines.prepare import PrepareConfig, prepare
from headstart.engines.heads import HEADS, build_head, load_head, save_head
from headstart.targets.chat.messages import script_of
from headstart.targets.target import Target
from openai_server import answered, serving
from safetensors.torch import load_file, save_file

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["float32", "bfloat16"])
def target(request, saved_target, tmp_path):
    """The folder of a target that is stored in this dtype, as most published ones are in bf16, with rows beside it."""
    if request.param == "float32":
        return saved_target
    folder = shutil.copytree(saved_target, tmp_path / "stored" / "target")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    shutil.copy(saved_target.with_name("rows.jsonl"), folder.with_name("rows.jsonl"))
    assert Target.load(folder).dtype == torch.bfloat16
    return folder


@pytest.mark.parametrize("head", [True, False])
def test_decode(head, saved_target, tmp_path, capsys):
    folder = tmp_path / "head"
    save_head(build_head(HEADS["medusa"].config_class(type="medusa"), Target.load(saved_target)), folder)
    load("decode").main(str(saved_target), "w1 w5", *([str(folder)] if head else []))
    said = capsys.readouterr().out
    assert said.startswith("w1 w5") and re.search(
        r"(medusa|ngram): \d+ forwards of the target, \d\.\d\d tokens each", said
    )


def test_own_drafter(target, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w9"}) + "\n" for i in range(3, 6)))
    load("own_drafter").main(str(target), str(prompts))
    said = capsys.readouterr().out
    assert "3 of 3 texts equal the baseline's" in said and "tokens per forward; speedup" in said


def test_own_family(target, tmp_path, capsys):
    before = dict(HEADS)
    try:
        rows = target.with_name("rows.jsonl")
        module = load("own_family")
        module.main(str(target), str(rows), str(tmp_path / "run"), "train.max_steps=3", "train.device=cpu")
        assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
        assert re.search(r"9,312 parameters, \d\.\d\d tokens per forward", capsys.readouterr().out)
    finally:
        HEADS.clear()
        HEADS.update(before)


@pytest.fixture
def rl(saved_target, tmp_path):
    """Words behind an example of RL, the folder of a head, and that of its output."""
    head, prompts, output = tmp_path / "head", tmp_path / "prompts.jsonl", tmp_path / "out"
    save_head(build_head(HEADS["medusa"].config_class(type="medusa"), Target.load(saved_target)), head)
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w9", "answer": "w7"}) + "\n" for i in range(3, 9)))
    words = [*map(str, (saved_target, head, prompts, output)), "--prompts-per-step", "2", "--samples", "4"]
    words += ["--max-new-tokens", "16", "--save-every", "1", "--share", "1", "--rate", "1e-3"]
    return words, head, output


def assert_moved(target, head, output, first, last):
    """The policy's weights between two checkpoints, and the head's from its start on."""
    policies = [load_file(folder / "model.safetensors") for folder in (first, last)]
    assert any(not torch.equal(policies[0][name], tensor) for name, tensor in policies[1].items())
    moved = Target.load(target, adapter=last)
    followed = load_head(output / "following" / "head", moved).state_dict()
    assert any(not torch.equal(followed[name], tensor) for name, tensor in load_head(head, moved).state_dict().items())


def test_rl_with_a_head_that_follows(rl, saved_target, capsys):
    """Two steps, as if killed behind them, and a third: the policy and the head go on from what was saved."""
    words, head, output = rl
    for steps, of_a_kill in (("2", '{"step": 3, "of a step behind the last sa'), ("3", "")):
        load("rl/grpo").main([*words, "--steps", steps, "--draft-tokens", "1"])
        with (output / "log.jsonl").open("a") as log:
            log.write(of_a_kill)
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert capsys.readouterr().out.count("\n") == len(log) == 3
    assert [row["step"] for row in log] == [1, 2, 3] and sum(row["head_steps"] for row in log) > 2
    assert all(0 < row["reward"] < 1 and row["acceptance_length"] >= 1 for row in log)
    assert_moved(saved_target, head, output, *(output / "policy" / f"step_{step:06d}" for step in (1, 3)))
    told = load("rl/grpo").reward
    assert [told("12 and 1,234.5", "1234.5"), told("none", "3"), told("w7 w8", "w7"), told("w8", "w7")] == [1, 0, 1, 0]


def agent(server, body, attempt):
    """A stand-in's answers: it searches, calculates in a call that only its text has, and answers; but for questions of
    other kinds, see `ENDS`."""
    question, *later = [message["content"] for message in body["messages"][1:] if message["role"] != "assistant"]
    call = {"type": "function", "id": "c", "function": {"name": "search", "arguments": json.dumps({"query": question})}}
    if "worth" in question:
        return 400, {}, {"error": {"message": "too long"}}
    if "together" in question:
        return answered(body, content='<tool_call>{"name": "search"')
    if not later or "left in stock" in question:
        return answered(body, finish_reason="tool_calls", content="", tool_calls=[call])
    number, price = question.split()[2], later[0].split(": ")[1].split()[0]
    if len(later) == 1:
        expression = f"{number} * {price}" if "discount" not in question else "open('x')"
        called = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
        return answered(body, content=f"Now {called}")
    return answered(body, content=f"They cost {later[1].split()[-1]} euros.")


# by what a question has: the roles behind it, by their first letters, the calls, whether the answer is right
ENDS = {
    "discount": ("atata", 2, False),
    "What do": ("atata", 2, True),
    "left in stock": ("atatatata", 4, False),
    "together": ("a", 0, False),
}


def test_agents(tmp_path, capsys):
    """Tools are run until there is an answer or four calls were made; what cannot be asked is left out, and counted."""
    file = tmp_path / "trajectories.jsonl"
    with serving(agent) as server:
        load("agents").main("tiny", str(file), server.url)
    rows, said = read_jsonl(file), capsys.readouterr().out
    assert 60 < len(rows) < 95 and f"{100 - len(rows)} left out: " in said and "400" in said
    seen = set()
    for row in rows:
        question, *later = row["messages"][1:]
        kind = "together" if "together" in question["content"] else next(k for k in ENDS if k in question["content"])
        roles = "".join(message["role"][0] for message in later)
        assert (roles, row["num_calls"], row["is_right"]) == ENDS[kind]
        assert script_of(row["messages"], turns="recorded").count(None) == roles.count("a")
        seen.add(kind)
    assert seen == set(ENDS)
    refused = next(row["messages"][5] for row in rows if "discount" in row["messages"][1]["content"])
    assert refused["content"] == "error: ValueError: not arithmetic: open('x')"
    card = prepare(PrepareConfig(sources=str(file), output=str(tmp_path / "data"), validation_share=0.2))
    assert (card.kept, sum(split["rows"] for split in card.splits.values())) == (len(rows), len(rows))


@pytest.mark.parametrize("chats", [False, True])
def test_long_prompts(chats, saved_target, tmp_path, capsys, monkeypatch):
    """A place's prompts end alike, and a longer one has more in front."""
    module, folder, output = load("long_prompts"), tmp_path / "texts", tmp_path / "prompts.jsonl"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text(" ".join(f"w{3 + (i * 7 + j) % 40}" for j in range(60)))
    monkeypatch.setattr(module, "FEWEST", 20)
    if chats:
        told = shutil.copytree(saved_target, tmp_path / "chats")
        (told / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        saved_target = told
    module.main(str(saved_target), str(folder), str(output), "64", "24")
    rows, said = read_jsonl(output), capsys.readouterr().out
    assert said.startswith(f"{len(rows)} prompts of ") and len(rows) >= 2
    if not chats:
        assert [row["category"] for row in rows] == ["24", "64"] * (len(rows) // 2)
        assert all(long["prompt"].endswith(short["prompt"]) for short, long in zip(rows[::2], rows[1::2], strict=True))
        assert [len(rows[i]["prompt"].split()) for i in (0, 1)] == [24, 64]
        return
    assert {row["category"] for row in rows} == {f"{kind} {n}" for kind in ("summary", "needle") for n in (24, 64)}
    needle = next(row for row in rows if row["category"] == "needle 64")["messages"][0]["content"]
    assert needle.startswith("The access code is 17919.") and needle.endswith(module.NEEDLE)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_rl_by_trl(rl, saved_target):
    """As above, in a process of its own: folders of our tests are called as packages are that TRL looks for."""
    words, head, output = rl
    for steps in ("2", "3"):
        command = [sys.executable, str(EXAMPLES / "rl" / "trl_grpo.py"), *words, "--steps", steps]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    log = json.loads((output / "policy" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in log] == [1, 2, 3]
    assert all(row["acceptance_length"] > 1 and row["completions/max_length"] <= 16 for row in log)
    assert any(0 < row["reward"] < 1 for row in log)
    assert_moved(saved_target, head, output, *(output / "policy" / f"checkpoint-{step}" for step in (1, 3)))


def test_the_readme_names_every_example():
    listed = re.findall(r"\]\(([\w/]+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py"))
