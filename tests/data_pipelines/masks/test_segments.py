"""Every token of an answer is told apart, a reasoning trace with its markers or the answer itself; a long row becomes
pieces in which each supervised token is supervised once."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from chats import chat
from headstart.base.errors import BadInput
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.masks.segments import token_table
from headstart.data_pipelines.masks.traces import segment_lengths, split_sample
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.rows.samples import ANSWER, FROM_ROW, NOT_ITS_IDS, PROMPT, SEGMENTS, THINK, Sample
from headstart.data_pipelines.rows.sources import Row
from headstart.targets.chat.reasoning import CHANNEL, think_markers, think_tokens, trace_finder

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
def test_markers_are_found_in_the_tokenizer(name, markers, are_tokens, chat_tokenizer):
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


TRACES = {
    "without its opening marker": ("hm\n</think>\n\nok.", [("think", "hm\n</think>"), ("answer", "\n\nok.")]),
    "that never ends": ("So: <think>hm", [("answer", "So: "), ("think", "<think>hm")]),
    "several": ("<think>a</think>b<think>c", [("think", "<think>a</think>"), ("answer", "b"), ("think", "<think>c")]),
}


@pytest.mark.parametrize(("response", "wanted"), TRACES.values(), ids=TRACES)
def test_traces_are_told_from_the_answer(response: str, wanted: list[tuple[str, str]], chat_tokenizer: Tokenizers):
    tokenizer = chat_tokenizer("qwen3")
    [sample] = encode({"prompt": "hi", "response": response}, tokenizer)
    assert runs(sample, tokenizer) == wanted


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
    with pytest.raises(BadInput, match="^a.jsonl:1: the chat template has no place for reasoning_content; set data"):
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
    first, second = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert token_table(tokenizer).text(first) == token_table(tokenizer).text(second) == "\ufffd"


def letters(text: str, *, prompt: int) -> Sample:
    """One token per character, its code point; the first `prompt` are the prompt."""
    return Sample.of([ord(letter) for letter in text], [place >= prompt for place in range(len(text))])


def new_text(piece: Sample) -> str:
    return "".join(map(chr, piece.input_ids[piece.loss_mask]))


def split(whole: Sample, max_length: int) -> list[Sample]:
    return split_sample(whole, max_length=max_length, text_of=chr)


@pytest.mark.parametrize("source", [FROM_ROW, NOT_ITS_IDS])
def test_pieces_have_their_ids_from_where_the_row_has_them(source: str) -> None:
    pieces = split(replace(letters("ab. cd. ef.", prompt=1), source=source), 6)
    assert len(pieces) > 1 and {piece.source for piece in pieces} == {source}


@pytest.mark.parametrize("seed", range(40))
def test_every_supervised_token_is_supervised_exactly_once(seed: int) -> None:
    source = random.Random(seed)
    length, max_length = source.randint(1, 400), source.randint(1, 64)
    prompt = source.randint(0, length)
    # unique ids, so that a token's place in the row can be told; turns of the user in between
    mask = [place >= prompt and (place // 17) % 3 > 0 for place in range(length)]
    whole = Sample.of(range(1000, 1000 + length), mask, segments=[source.randint(0, 2) for _ in mask])
    pieces = split_sample(whole, max_length=max_length, text_of=lambda token: source.choice(["a", ".", "\n", "\n\n"]))
    supervised = np.concatenate([piece.input_ids[piece.loss_mask] for piece in pieces] or [np.array([])])
    assert supervised.tolist() == whole.input_ids[whole.loss_mask].tolist()
    for piece in pieces:
        assert len(piece) <= max_length and piece.loss_mask.any()
        places = piece.input_ids - 1000
        assert (np.diff(places) > 0).all() and (piece.segments == whole.segments[places]).all()


def test_a_piece_is_the_prompt_then_what_came_before_then_new_tokens() -> None:
    pieces = split(letters("P" * 8 + "abcdefghijklmnopqrstuvwxyz", prompt=8), 24)
    assert [new_text(piece) for piece in pieces] == ["abcdefghijklmnop", "qrstuvwxyz"]
    assert "".join(map(chr, pieces[1].input_ids)) == "P" * 8 + "mnop" + "qrstuvwxyz"
    assert all(piece.num_cut == 0 for piece in pieces)


def test_a_later_piece_has_a_quarter_of_the_room_as_context() -> None:
    pieces = split(letters("P" * 10 + "x" * 500, prompt=10), 50)
    assert len(pieces) > 3
    for piece in pieces[1:]:
        assert not piece.loss_mask[:20].any() and piece.loss_mask[20:].all()


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("aaaaaaaaa. bbb\ncc\n\nddd\neee. fff ggggggg", "aaaaaaaaa. bbb\ncc\n\n"),
        ("aaaaaaaaa. bbb\nccccddd\neee. fff ggggggg", "aaaaaaaaa. bbb\nccccddd\n"),
        ("aaaaaaaaa. bbbccccddd 3.5 eee. fffggggggg", "aaaaaaaaa. bbbccccddd 3.5 eee."),
        ("aaaa\n\n" + "b" * 40, "aaaa\n\n" + "b" * 26),
    ],
)
def test_cuts_are_behind_paragraphs_else_lines_else_sentences(text: str, first: str) -> None:
    assert new_text(split(letters(text, prompt=0), 32)[0]) == first


def test_a_prompt_of_more_than_half_keeps_its_beginning_and_its_end() -> None:
    pieces = split(letters("B" + "x" * 50 + "question" + "answer", prompt=59), 18)
    assert [new_text(piece) for piece in pieces] == ["answer"]
    assert "".join(map(chr, pieces[0].input_ids)) == "Bquestionanswer"


def test_stretches_without_supervised_tokens_make_no_piece() -> None:
    whole = letters("Pab" + "u" * 100 + "cd", prompt=1)
    whole.loss_mask[3:103] = False
    pieces = split(whole, 16)
    assert [new_text(piece) for piece in pieces] == ["ab", "cd"]
    assert split(letters("PPP", prompt=3), 2) == []


def test_lengths_are_by_segment_of_the_samples_that_have_it() -> None:
    samples = [
        Sample.of(range(4), [False, True, True, True], segments=[PROMPT, THINK, THINK, ANSWER]),
        Sample.of(range(3), [False, False, True], segments=[PROMPT, PROMPT, ANSWER]),
    ]
    assert segment_lengths(samples) == {"prompt": [1, 2], "think": [2], "answer": [1, 1], "supervised": [3, 1]}
    assert segment_lengths([]) == {}
