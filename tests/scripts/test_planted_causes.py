"""Seven causes of low acceptance, planted one by one under a really trained head: the page names the planted one."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from headstart.benchmarks.quickstart.toy_answers import answer
from headstart.benchmarks.quickstart.toy_target import Recipe, make_target
from headstart.configs.jsonl import read_jsonl
from headstart.heads.chat.prompts import prompt_ids
from headstart.heads.target import Target
from headstart.scripts.cli import app
from headstart.train.config import load_run
from headstart.train.trainer import train
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

RECIPE = Recipe(steps=220, layers=8, width=96, train_prompts=400, eval_prompts=24)
TEMPLATE = (
    "{% for m in messages %}### {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant: {% endif %}"
)
LONGEST_ROW = 128  # tokens; the planted contexts begin behind it

# what the page calls each planted cause; the last is a refusal, before anything is measured
CAUSES = {
    "template": "Template: prompts are rendered unlike in training",
    "temperature": "Sampling: temperature above 0",
    "domain": "Domain: prompts are not like the training rows",
    "vocabulary": "Vocabulary: the head cannot draft what the target writes",
    "context": "Contexts beyond the training length",
    "drafts": "K may be too large: late positions add little",
}
# of several plants of one cause
OTHER_TEMPLATE = "retemplated"


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_suites(folder: Path, texts: list[str]) -> None:
    """The clean suite, and those of the plants; texts: rendered answers to put in front of a question."""
    asked = [row["messages"][0]["content"] for row in read_jsonl(folder / "data" / "reasoning.jsonl")]
    code = [row["prompt"] for row in read_jsonl(folder / "data" / "contrast.jsonl")]
    told = [re.match(r"<\|user\|>(.*?)<\|end\|><\|assistant\|>(.*?)<\|end\|>", text, re.S) for text in texts]
    pairs = [[{"role": "user", "content": one[1]}, {"role": "assistant", "content": one[2]}] for one in told if one]
    history = [sum((pairs[(5 * i + j) % len(pairs)] for j in range(5)), []) for i in range(len(asked))]
    as_user = [{"role": "user", "content": text} for text in asked]
    write_rows(folder / "clean.jsonl", [{"messages": [one]} for one in as_user])
    write_rows(folder / "plain.jsonl", [{"prompt": text} for text in asked])
    write_rows(folder / "code.jsonl", [{"messages": [{"role": "user", "content": text}]} for text in code])
    long = [{"messages": [*turns, one]} for turns, one in zip(history, as_user, strict=True)]
    write_rows(folder / "long.jsonl", long)


def write_answers(folder: Path) -> list[str]:
    """The target's own answers, as rows to train and to validate on; returns them as text."""
    target = Target.load(folder / "target", dtype="float32")
    rows = read_jsonl(folder / "data" / "reasoning_prompts_train.jsonl")
    prompts = [prompt_ids(row, target.tokenizer, origin="prompts") for row in rows]
    answers = answer(target, prompts, max_new_tokens=96)
    pairs = list(zip(prompts, answers, strict=True))
    rows = [{"input_ids": prompt + new, "prompt_length": len(prompt)} for prompt, new in pairs]
    write_rows(folder / "train.jsonl", rows[:-48])
    write_rows(folder / "validation.jsonl", rows[-48:])
    return [target.tokenizer.decode(row["input_ids"]) for row in rows[:120]]


def write_other_targets(folder: Path) -> None:
    """The target with another chat template; and one of the same shapes whose weights are a little others."""
    shutil.copytree(folder / "target", folder / OTHER_TEMPLATE)
    (folder / OTHER_TEMPLATE / "chat_template.jinja").write_text(TEMPLATE)
    shutil.copytree(folder / "target", folder / "other")
    source = torch.Generator().manual_seed(0)
    weights = load_file(folder / "other" / "model.safetensors")
    weights = {name: value + 0.001 * torch.randn(value.shape, generator=source) for name, value in weights.items()}
    save_file(weights, folder / "other" / "model.safetensors", metadata={"format": "pt"})


def train_head(folder: Path, name: str, **changes) -> None:
    config = {
        "target": {"path": str(folder / "target"), "dtype": "float32"},
        "head": {"type": "eagle3", "num_depths": 4, "loss": {"soft_ce": 1.0}, **changes},
        "data": {"train": str(folder / "train.jsonl"), "validation": str(folder / "validation.jsonl")},
        "train": {"output_dir": str(folder / name), "max_steps": 130, "batch_size": 8, "learning_rate": 3e-3},
    }
    config["data"]["max_length"] = LONGEST_ROW
    config["train"] |= {"warmup_steps": 30, "max_grad_norm": 1.0, "device": "cpu"}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    train(load_run(path))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A target pretrained here, its answers, two heads trained on them, and what the plants need."""
    folder = tmp_path_factory.mktemp("planted")
    make_target(folder / "target", recipe=RECIPE)
    write_suites(folder, write_answers(folder))
    write_other_targets(folder)
    train_head(folder, "run")
    train_head(folder, "cut", draft_vocab_size=80)
    return folder


def evaluated(
    world: Path, name: str, *, target="target", head="run", suite="clean", num_draft_tokens=3, temperature=0.0
):
    """`headstart eval` as typed; returns the outcome and the headings under Diagnosis, in order."""
    output = world / f"out-{name}"
    line = ["eval", "--target", world / target, "--head", world / head / "final", "--prompts", world / f"{suite}.jsonl"]
    line += ["--output", output, "--max-new-tokens", 64, "--repeats", 2, "--device", "cpu"]
    line += ["--num-draft-tokens", num_draft_tokens, "--temperature", temperature]
    done = CliRunner().invoke(app, list(map(str, line)))
    page = (output / "report.html").read_text() if (output / "report.html").is_file() else ""
    return done, re.findall(r"<h3>(.*?)</h3>", page.partition('id="diagnosis"')[2].partition("</section>")[0])


PLANTS: dict[str, dict[str, Any]] = {
    "template": {"suite": "plain"},
    "temperature": {"temperature": 1.0},
    "domain": {"suite": "code"},
    "drafts": {"num_draft_tokens": 12},
    "vocabulary": {"head": "cut"},
    "context": {"suite": "long"},
}


def first_named(headings: list[str]) -> str | None:
    """The first planted cause on a page. How many drafts are too many follows from how few are accepted, so K counts
    only where no cause of low acceptance is named."""
    named = [cause for cause in CAUSES for heading in headings if heading == CAUSES[cause]]
    of_acceptance = [heading for heading in headings if heading in CAUSES.values() and heading != CAUSES["drafts"]]
    return next((cause for cause in named if CAUSES[cause] in of_acceptance[:1]), "drafts" if named else None)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_page_names_the_cause_that_was_planted(world):
    done, headings = evaluated(world, "control")
    assert done.exit_code == 0, done.output
    assert not set(headings) & set(CAUSES.values()), "nothing was planted"

    found = {}
    for cause, how in PLANTS.items():
        done, headings = evaluated(world, cause, **how)
        assert done.exit_code == 0, done.output
        found[cause] = headings
    done, _ = evaluated(world, "target", target="other")
    refused = str(done.exception) if done.exit_code else ""
    names = [str(world / "run" / "final"), str(world / "target"), str(world / "other")]
    right = {cause for cause, headings in found.items() if first_named(headings) == cause}
    right |= {"target"} if all(name in refused for name in names) and "\n" not in refused else set()
    assert len(right) >= 6, (sorted(right), found, refused)
    assert not (world / "out-target").exists(), "refused before anything was measured"


@pytest.mark.soak
def test_a_template_of_the_same_target_that_was_changed_is_named(world):
    _, headings = evaluated(world, OTHER_TEMPLATE, target=OTHER_TEMPLATE)
    assert first_named(headings) == "template"
