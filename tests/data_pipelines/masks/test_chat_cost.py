"""Masks cost a number of renderings that does not grow with the conversation, and equal those found turn by turn."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from headstart.configs.errors import BadInput
from headstart.data_pipelines.config import DataConfig
from headstart.data_pipelines.masks import assistant_masks, rendering
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.sources import Row

CONFIG = DataConfig(train="train.jsonl", max_length=10_000_000, think_markers=["<think>", "</think>"])
WORDS = ["ok.", "\n", "\n\n", " ", "hi", "0", "Z", "é", "</s", "assistant\n", "1. ", "the"]
CONTROL = ["<|im_start|>", "<|im_end|>", "<eos>"]  # the user may imitate a template


def dialogue(num_turns: int, *, tools: bool = False, seed: int = 0) -> dict[str, Any]:
    """Random turns, every second one the assistant's, some with a trace or a tool call."""
    source = random.Random(seed)

    def text(num_words: int, words: list[str] = WORDS) -> str:
        return "".join(source.choices(words, k=num_words))

    messages: list[dict[str, Any]] = []
    while len(messages) < num_turns:
        messages.append({"role": "user", "content": "q" + text(6, [*WORDS, *CONTROL])})
        if tools and source.random() < 0.3:
            function = {"name": "add", "arguments": {"a": source.randrange(9), "b": text(2)}}
            call = {"id": "call00001", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": source.choice(["", "Calling."]), "tool_calls": [call]})
            messages.append({"role": "tool", "content": "r" + text(2), "tool_call_id": "call00001"})
        trace = f"<think>\n{text(4)}\n</think>\n\n" if source.random() < 0.4 else ""
        messages.append({"role": "assistant", "content": trace + "a" * source.randrange(2) + text(5)})
    return {"messages": messages}


def rendered_characters(row: dict[str, Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How much text the template writes for one row."""
    apply, written = tokenizer.apply_chat_template, []

    def counted(*args: Any, **options: Any) -> Any:
        text = apply(*args, **options)
        written.append(len(text))
        return text

    with monkeypatch.context() as patched:
        patched.setattr(tokenizer, "apply_chat_template", counted)
        encode_row(Row(row, "train.jsonl:1"), tokenizer, CONFIG)
    return sum(written)


@pytest.mark.parametrize("tools", [False, True])
def test_twice_the_turns_cost_twice_the_rendering(
    tools: bool, template_name: str, chat_tokenizer: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if tools and template_name not in ("llama-3.1", "qwen2.5", "qwen3"):
        pytest.skip("knows no tool calls, or, mistral, has no generation prompt: then a call is found turn by turn")
    tokenizer = chat_tokenizer(template_name)
    short, long = (
        rendered_characters(dialogue(num_turns, tools=tools), tokenizer, monkeypatch) for num_turns in (200, 400)
    )
    assert long < 2.4 * short


@pytest.mark.parametrize("tools", [False, True])
def test_masks_equal_those_found_turn_by_turn(
    tools: bool, template_name: str, chat_tokenizer: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, num_proved, rows = chat_tokenizer(template_name), 0, range(12)
    for seed in rows:
        row = Row(dialogue(6, tools=tools, seed=seed), "train.jsonl:1")
        with monkeypatch.context() as patched:
            patched.setattr(assistant_masks, "spans_turn_by_turn", fail)
            try:
                by_marks = encode_row(row, tokenizer, CONFIG)
            except (NotProvedError, BadInput):
                continue
        with monkeypatch.context() as patched:
            patched.setattr(assistant_masks.Chat, "_spans_by_marks", unproved)
            assert by_marks == encode_row(row, tokenizer, CONFIG)
        num_proved += 1
    if not tools or template_name in ("llama-3.1", "qwen2.5", "qwen3"):
        assert num_proved == len(rows)


class NotProvedError(Exception):
    """The marks did not prove the spans."""


def fail(*_: Any, **__: Any) -> None:
    raise NotProvedError


def unproved(*_: Any) -> None:
    raise rendering.Unproved


def test_a_template_that_the_marks_would_change_is_read_turn_by_turn(chat_tokenizer: Callable[[str], Any]) -> None:
    """Here an answer is written in capitals, and its length beside it: no mark can stand in for that."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content", "message.content | upper ~ message.content | length"
    )
    row = Row({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok."}]}, "a:1")
    [sample] = encode_row(row, tokenizer, CONFIG)
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == "OK.3<|im_end|>"


def test_text_that_has_the_marks_itself_is_read_turn_by_turn(chat_tokenizer: Callable[[str], Any]) -> None:
    tokenizer, mark = chat_tokenizer("chatml"), chr(assistant_masks.FIRST_MARK + 1)
    messages = [{"role": "user", "content": mark}, {"role": "assistant", "content": f"o{mark}k"}]
    [sample] = encode_row(Row({"messages": messages}, "a:1"), tokenizer, CONFIG)
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == f"o{mark}k<|im_end|>"
