"""The examples run as their first lines say."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from headstart.heads.registry import HEADS, build_head, save_head
from headstart.heads.target import Target

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("head", [True, False])
def test_decode(head, saved_target, tmp_path, capsys):
    folder = tmp_path / "head"
    save_head(build_head(HEADS["medusa"].config_class(type="medusa"), Target.load(saved_target)), folder)
    load("decode").main(str(saved_target), "w1 w5", *([str(folder)] if head else []))
    said = capsys.readouterr().out
    assert said.startswith("w1 w5") and re.search(
        r"(medusa|ngram): \d+ forwards of the target, \d\.\d\d tokens each", said
    )


def test_own_drafter(saved_target, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w9"}) + "\n" for i in range(3, 6)))
    load("own_drafter").main(str(saved_target), str(prompts))
    said = capsys.readouterr().out
    assert "3 of 3 texts equal the baseline's" in said and "tokens per forward; speedup" in said


def test_own_head(saved_target, tmp_path, capsys):
    before = dict(HEADS)
    try:
        rows = saved_target.with_name("rows.jsonl")
        module = load("own_head")
        module.main(str(saved_target), str(rows), str(tmp_path / "run"), "train.max_steps=3", "train.device=cpu")
        assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
        assert re.search(r"3,072 parameters, \d\.\d\d tokens per forward", capsys.readouterr().out)
    finally:
        HEADS.clear()
        HEADS.update(before)


def test_the_readme_names_every_example():
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))
