"""The smoke run's target keeps its promises: an exact tokenizer, a loadable folder, nothing after an interruption."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from headstart.benchmarks.quickstart import toy_target
from headstart.benchmarks.quickstart.toy_corpus import python_sources, reasoning_problems
from headstart.benchmarks.quickstart.toy_target import (
    IGNORED,
    Recipe,
    chat_rows,
    code_rows,
    make_target,
    train_tokenizer,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow
TINY = Recipe(steps=2, layers=2, width=32, rows=2, code_rows=1, row_tokens=64, train_prompts=20, eval_prompts=4)
PROBLEMS = reasoning_problems(100, 0)


@pytest.fixture(scope="module")
def tokenizer():
    texts = [message["content"] for problem in PROBLEMS for message in problem["messages"]]
    return train_tokenizer([*texts, *python_sources(0)[0][:10]], vocab_size=800)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("quickstart") / "target"
    make_target(output, recipe=TINY)
    return output


def test_text_survives_the_tokenizer(tokenizer) -> None:
    texts = [PROBLEMS[0]["messages"][1]["content"], python_sources(0)[1][0][:3000], "naïve  ☃\n\n\t 12:30", " x "]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, verbose=False)) == text


def test_small_numbers_are_single_tokens(tokenizer) -> None:
    assert tokenizer.tokenize(" 7 + 5 = 12") == ["Ġ7", "Ġ+", "Ġ5", "Ġ=", "Ġ12"]


def test_think_tags_are_single_tokens_that_decoding_keeps(tokenizer) -> None:
    ids = tokenizer.encode("<think></think><|end|>")
    assert len(ids) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think></think>"


def test_the_chat_template_renders_exactly(tokenizer) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"
    answered = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "Yo"}], tokenize=False)
    assert answered == prompt + "Yo<|end|>"
    assert tokenizer.encode(answered)[-1] == tokenizer.eos_token_id


def test_chat_rows_label_answers_only_and_open_with_a_question(tokenizer) -> None:
    rows = chat_rows(tokenizer, PROBLEMS, row_tokens=96)
    assert rows
    for ids, labels in rows:
        assert ids.shape == labels.shape == (96,)
        assert ids[0] == tokenizer.convert_tokens_to_ids("<|user|>") and labels[0] == IGNORED
        assert torch.equal(labels[labels != IGNORED], ids[labels != IGNORED])
        answers = tokenizer.decode(labels[labels != IGNORED])
        assert answers.startswith("<think>") and "<|assistant|>" not in answers


def test_code_rows_hold_the_texts_in_order(tokenizer) -> None:
    rows = code_rows(tokenizer, ["def one(): pass\n" * 9, "x = 2\n" * 9], row_tokens=8)
    ids = [token for row in rows for token in row[0].tolist()]
    assert all(torch.equal(row[0], row[1]) for row in rows)
    assert tokenizer.decode(ids).startswith("def one(): pass\n" * 9 + "<|end|>x = 2\n")


def test_a_tiny_run_leaves_a_loadable_target(made: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(made), AutoModelForCausalLM.from_pretrained(made)
    assert model.dtype == torch.float32 and model.config.num_hidden_layers == 2
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.config.vocab_size == len(tokenizer)
    turns = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<|user|>Hi<|end|>"


def test_a_tiny_run_writes_quality_and_prompt_files(made: Path) -> None:
    quality = json.loads((made / "quality.json").read_text())
    assert quality["num_answers"] == 4 and 0 <= quality["right"] <= 1 and 0 <= quality["repeated_4grams"] <= 1
    files = {path.name: path.read_text().splitlines() for path in (made.parent / "data").iterdir()}
    rows = {name: [json.loads(line) for line in lines] for name, lines in files.items()}
    assert {name: len(lines) for name, lines in rows.items()} == {
        "reasoning_prompts_train.jsonl": 20,
        "reasoning.jsonl": 4,
        "contrast.jsonl": 8,
    }
    assert all(set(row) == {"messages", "answer", "kind"} for row in rows["reasoning.jsonl"])
    assert all(set(row) == {"prompt"} for row in rows["contrast.jsonl"])
    assert all([turn["role"] for turn in row["messages"]] == ["user"] for row in rows["reasoning_prompts_train.jsonl"])
    assert {path.name for path in made.parent.iterdir()} == {"target", "data"}


def test_a_second_call_skips_and_another_recipe_does_not(made: Path, monkeypatch, capsys) -> None:
    def fail(*args, **kwargs):
        raise AssertionError("built again")

    monkeypatch.setattr(toy_target, "build_target", fail)
    capsys.readouterr()
    make_target(made, recipe=TINY)
    assert capsys.readouterr().out.count("\n") == 1
    with pytest.raises(AssertionError, match="built again"):
        make_target(made, recipe=Recipe(steps=3))
    assert (made / "model.safetensors").is_file()


def test_without_code_rows_nothing_depends_on_the_text_of_the_machine(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(toy_target, "python_sources", lambda *args, **kwargs: pytest.fail("sources were read"))
    make_target(tmp_path / "target", recipe=replace(TINY, code_rows=0, contrast_rows=0))
    assert (tmp_path / "data" / "contrast.jsonl").read_text() == ""


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(toy_target, "measure", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_target(tmp_path / "target", recipe=TINY)
    assert list(tmp_path.iterdir()) == []


def test_the_same_seed_gives_the_same_target(made: Path, tmp_path: Path, monkeypatch) -> None:
    arguments = [f"--{name}={getattr(TINY, name)}".replace("_", "-") for name in vars(TINY) if name != "version"]
    monkeypatch.setattr(sys, "argv", ["toy_target", str(tmp_path / "target"), *arguments])
    toy_target.main()
    for name in ("model.safetensors", "tokenizer.json", "recipe.json"):
        assert (tmp_path / "target" / name).read_bytes() == (made / name).read_bytes()
