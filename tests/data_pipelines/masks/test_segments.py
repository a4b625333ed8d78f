"""Every token of an answer is told apart: a reasoning trace with its markers, or the answer itself."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from chats import chat
from headstart.configs.errors import BadInput
from headstart.data_pipelines.config import DataConfig
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.masks.segments import token_table
from headstart.data_pipelines.sources import Row
from headstart.data_pipelines.storage.samples import ANSWER, SEGMENTS, Sample
from headstart.heads.chat.reasoning import CHANNEL, think_markers, think_tokens, trace_finder

Tokenizers = Callable[[str], Any]
TRACE = "<think>\nhm\n</think>\n\nok."


def encode(row: dict[str, Any], tokenizer: Any, **options: Any) -> list[Sample]:
    return encode_row(Row(row, "a.jsonl:1"), tokenizer, DataConfig(train="a.jsonl", **options))


def runs(sample: Sample, tokenizer: Any) -> list[tuple[str, str]]:
    """The text of each run of one segment, behind the prompt's first one."""
    pairs = zip(sample.input_ids.tolist(), sample.segments.tolist(), strict=True)
    return [
        (SEGMENTS[segment], tokenizer.decode([token for token, _ in run]))
        for segment, run in groupby(pairs, key=lambda pair: pair[1])
    ][1:]


@pytest.mark.parametrize(
    ("name", "markers", "are_tokens"),
    [
        ("qwen3", ("<think>", "</think>"), True),
        ("deepseek-r1", ("<think>", "</think>"), True),
        ("gemma-2", None, False),
    ],
)
def test_markers_are_found_in_the_tokenizer(
    name: str, markers: tuple[str, str] | None, are_tokens: bool, chat_tokenizer: Tokenizers
) -> None:
    tokenizer = chat_tokenizer(name)
    assert think_markers(tokenizer) == markers
    assert (think_tokens(tokenizer) is not None) == are_tokens


def test_markers_that_are_no_tokens_are_found_in_the_template(chat_tokenizer: Tokenizers) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template += "{# [THINK] and [/THINK] #}"
    assert think_markers(tokenizer) == ("[THINK]", "[/THINK]") and think_tokens(tokenizer) is None


@pytest.mark.parametrize("name", ["qwen3", "gemma-2"])  # markers are tokens; there are none, so they are plain text
def test_where_a_text_is_inside_a_trace(name: str, chat_tokenizer: Tokenizers) -> None:
    """Of two traces in one text, the second cut off, each token behind the opening marker is inside."""
    tokenizer = chat_tokenizer(name)
    texts = ["hi ", "<think>", "one < two", "</think>", "so", "<think>", "and"]
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    flags = trace_finder(tokenizer)(sum(parts, []))
    ends = [sum(map(len, parts[:count])) for count in range(len(parts) + 1)]
    assert [flags[end] for end in ends] == [False, False, True, True, False, False, True, True]
    assert len(flags) == ends[-1] + 1 and all(flags[ends[2] : ends[3] + 1]) and not any(flags[ends[4] : ends[5] + 1])


def test_the_channels_of_gpt_oss_are_markers_of_several_tokens(chat_tokenizer: Tokenizers) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.add_tokens(["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>"], special_tokens=True)
    assert think_markers(tokenizer) == CHANNEL and think_tokens(tokenizer) is None
    opened = tokenizer.encode("<|start|>assistant<|channel|>analysis<|message|>hm", add_special_tokens=False)
    assert trace_finder(tokenizer)(opened)[-1]
    assert not trace_finder(tokenizer)([*opened, *tokenizer.encode("<|end|>", add_special_tokens=False)])[-1]
    final = "<|start|>assistant<|channel|>final<|message|>ok.<|return|>"
    row = {"prompt": "<|start|>assistant", "response": f"<|channel|>analysis<|message|>hm<|end|>{final}"}
    [sample] = encode(row, tokenizer)
    assert runs(sample, tokenizer) == [("think", "<|channel|>analysis<|message|>hm<|end|>"), ("answer", final)]
    earlier = {"prompt": "<|start|>assistant", "response": "<|channel|>final<|message|>ok.<|end|>"}
    [sample] = encode(earlier, tokenizer)
    assert set(sample.segments[sample.loss_mask]) == {ANSWER}


def test_markers_that_the_config_names_may_be_any_text(chat_tokenizer: Tokenizers) -> None:
    tokenizer = chat_tokenizer("chatml")
    row = chat("hi", "Reasoning: hm. Reply: ok.")
    [sample] = encode(row, tokenizer, think_markers=["Reasoning:", "Reply:"])
    assert runs(sample, tokenizer)[0] == ("think", "Reasoning: hm. Reply: ")  # `: ` is one token
    assert runs(sample, tokenizer)[1][0] == "answer"
    [sample] = encode(row, tokenizer)
    assert [segment for segment, _ in runs(sample, tokenizer)] == ["answer", "prompt"]


def test_a_trace_that_the_prompt_opens_begins_with_the_answer(chat_tokenizer: Tokenizers) -> None:
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "'<|im_start|>assistant\\n' ~ (", "'<|im_start|>assistant\\n<think>\\n' ~ ("
    )
    [sample] = encode(chat("hi", TRACE), tokenizer)
    assert runs(sample, tokenizer)[:2] == [("think", "hm\n</think>"), ("answer", "\n\nok.<|im_end|>")]


def test_a_trace_without_its_opening_marker_is_one_all_the_same(chat_tokenizer: Tokenizers) -> None:
    tokenizer = chat_tokenizer("qwen3")
    [sample] = encode({"prompt": "hi", "response": "hm\n</think>\n\nok."}, tokenizer)
    assert runs(sample, tokenizer) == [("think", "hm\n</think>"), ("answer", "\n\nok.")]


def test_a_trace_that_never_ends_goes_to_the_end(chat_tokenizer: Tokenizers) -> None:
    tokenizer = chat_tokenizer("qwen3")
    [sample] = encode({"prompt": "hi", "response": "So: <think>hm"}, tokenizer)
    assert runs(sample, tokenizer) == [("answer", "So: "), ("think", "<think>hm")]


def test_several_traces_in_one_answer_are_told_apart(chat_tokenizer: Tokenizers) -> None:
    tokenizer = chat_tokenizer("qwen3")
    [sample] = encode({"prompt": "hi", "response": "<think>a</think>b<think>c</think>d"}, tokenizer)
    assert [segment for segment, _ in runs(sample, tokenizer)] == ["think", "answer", "think", "answer"]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1"])
def test_reasoning_beside_the_content_is_rendered(key: str, name: str, chat_tokenizer: Tokenizers) -> None:
    row = chat("hi", "ok.")
    row["messages"][1][key] = "hm"
    tokenizer = chat_tokenizer(name)
    assert encode(row, tokenizer) == encode(chat("hi", TRACE), tokenizer)


def test_reasoning_that_can_go_nowhere_is_refused(chat_tokenizer: Tokenizers) -> None:
    row = chat("hi", "ok.")
    row["messages"][1]["reasoning_content"] = "hm"
    with pytest.raises(
        BadInput, match="^a.jsonl:1: the chat template has no place for reasoning_content; set data.thi"
    ):
        encode(row, chat_tokenizer("gemma-2"))
    [sample] = encode(row, chat_tokenizer("gemma-2"), think_markers=["<think>", "</think>"])
    assert "think" in [SEGMENTS[segment] for segment in set(sample.segments)]


def test_the_trace_of_the_last_turn_is_kept_where_the_template_drops_it(chat_tokenizer: Tokenizers) -> None:
    """DeepSeek-R1's template drops every trace, but its target writes one, behind a prompt that opens it."""
    tokenizer = chat_tokenizer("deepseek-r1")
    [sample] = encode(chat("hi", TRACE, "again?", TRACE), tokenizer)
    first, second = "\n\nok.<｜end▁of▁sentence｜>", "<｜User｜>again?<｜Assistant｜><think>\n"
    assert [text for _, text in runs(sample, tokenizer)] == [first, second, "hm\n</think>", first]
    prompt = tokenizer.apply_chat_template(chat("hi", TRACE, "again?")["messages"], add_generation_prompt=True)
    assert sample.input_ids[: len(prompt["input_ids"])].tolist() == prompt["input_ids"]


@pytest.mark.parametrize("supervised", [["think"], ["answer"], ["think", "answer"]])
def test_only_the_segments_asked_for_are_supervised(supervised: list[str], chat_tokenizer: Tokenizers) -> None:
    tokenizer = chat_tokenizer("qwen3")
    [sample] = encode(chat("hi", TRACE), tokenizer, supervised=supervised)
    assert {SEGMENTS[segment] for segment in sample.segments[sample.loss_mask]} == set(supervised)
    [whole] = encode(chat("hi", TRACE), tokenizer)
    assert (sample.segments == whole.segments).all() and (sample.input_ids == whole.input_ids).all()


def test_a_row_without_the_segments_asked_for_is_dropped(chat_tokenizer: Tokenizers) -> None:
    assert encode({"prompt": "hi", "response": "ok."}, chat_tokenizer("qwen3"), supervised=["think"]) == []


def test_the_last_turn_alone_is_supervised_where_that_is_asked_for(chat_tokenizer: Tokenizers) -> None:
    tokenizer = chat_tokenizer("chatml")
    [sample] = encode(chat("hi", "ok.", "again?", "sure"), tokenizer, turns="last")
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == "sure<|im_end|>"
    assert tokenizer.decode(sample.input_ids[sample.segments == ANSWER]) == "ok.<|im_end|>sure<|im_end|>"


def test_a_token_of_half_a_character_has_a_text(chat_tokenizer: Tokenizers) -> None:
    tokenizer = chat_tokenizer("chatml")
    table = token_table(tokenizer)
    first, second = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert table.text(first) == table.text(second) == "\ufffd"
    assert table is token_table(tokenizer)
