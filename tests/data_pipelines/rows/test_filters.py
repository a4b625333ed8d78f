"""Every row shape becomes the same conversation, and every reason to drop one is given for what it names, no more."""

import inspect
import random
import re
from typing import Any

import pytest
from chats import chat
from headstart.base.errors import BadInput
from headstart.configs.loader import build
from headstart.data_pipelines.rows import filters
from headstart.data_pipelines.rows.filters import FilterConfig, reason_to_drop, repeated_lines, repeats_words
from headstart.data_pipelines.rows.row_shapes import Conversation, conversation_of, turns_digest
from headstart.data_pipelines.rows.sources import Row

USER, ASSISTANT = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
CHAT = {"messages": [USER, ASSISTANT]}
WORDS = "the cat sat on a mat and looked at one of many birds that flew over its garden in spring".split()


def read(data: dict[str, Any]) -> Conversation:
    return conversation_of(Row(data, "a.jsonl:7"))


def prose(num_words: int) -> str:
    return " ".join(random.Random(0).choices(WORDS, k=num_words))


def reason(data: dict[str, Any], **limits: Any) -> str | None:
    return reason_to_drop(read(data), FilterConfig(**limits))


@pytest.mark.parametrize(
    "data",
    [
        CHAT,
        {"messages": [USER, ASSISTANT], "conversations": None, "tools": None, "id": "x"},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}, ASSISTANT]},
        {"prompt": "Why?", "response": "Because."},
        {"prompt": "Why?", "completion": "Because.", "text": "Why? Because."},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"instruction": "Why?", "input": "", "output": "Because."},
    ],
)
def test_chats_instructions_and_prompts_with_responses_become_messages(data: dict[str, Any]) -> None:
    conversation = read(data)
    assert conversation.data == CHAT
    assert conversation.turns == [("user", "Why?"), ("assistant", "Because.")]
    assert list(conversation.answers) == ["Because."]


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        ({"text": "Once."}, {"text": "Once."}),
        ({"prompt": "Why?"}, {"prompt": "Why?"}),
        ({"prompt": [USER]}, {"messages": [USER]}),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, chat("Add.\n\n1 2", "3")),
        ({"system": "Be brief.", **CHAT}, {"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]}),
        ({"tools": '[{"name": "f"}]', **CHAT}, {**CHAT, "tools": [{"name": "f"}]}),
    ],
)
def test_other_rows_keep_what_they_say(data: dict[str, Any], kept: dict[str, Any]) -> None:
    assert read(data).data == kept


def test_reasoning_and_tool_calls_are_part_of_an_answer() -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    answer = {"role": "assistant", "reasoning": "Hm.", "content": "So.", "tool_calls": [call]}
    [text] = read({"messages": [USER, answer]}).answers
    assert text.startswith("Hm.\nSo.\n") and '"name": "f"' in text


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"query": "x"}, "unknown row shape with keys query; known are `messages`"),
        ({"text": 3}, "`text` should be text, got int"),
        ({"prompt": 3}, "`prompt` should be text, got int"),
    ],
)
def test_a_malformed_row_is_named(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput, match="^a.jsonl:7: ") as caught:
        read(data)
    assert problem in str(caught.value)


def test_digests_pass_over_case_and_white_space_and_ids_do_not() -> None:
    first, second = read(chat("Why  is it?\n", "So.")), read(chat("why is it?", "so."))
    assert turns_digest(first.turns) == turns_digest(second.turns) != turns_digest(read(chat("why is it? so.")).turns)
    assert first.id("1") != second.id("1") == read(chat("why is it?", "so.")).id("1")
    assert len({second.id("1"), second.id("2"), read(chat("why is it?", "so.", tools=[1])).id("1")}) == 3


BAD = [
    ("no_user_turn", {"messages": [ASSISTANT]}, {"require_user": False}),
    ("no_answer", {"prompt": "Why?"}, {"require_answer": False}),
    ("no_answer", {"messages": [USER]}, {"require_answer": False}),
    ("empty_answer", chat("Why?", "Because.", "And?", " \n"), {"drop_empty": False}),
    ("truncated", chat("Why?", "Becau", truncated=True), {"drop_truncated": False}),
    ("truncated", chat("Why?", "Becau", finish_reason="length"), {"drop_truncated": False}),
    ("echo", chat("Say it.", "It.", "Why?", "Why? "), {"drop_echo": False}),
    ("bad_characters", chat("Why?", "Bec\ufffduse of \x00"), {"max_bad_characters": 1.0}),
    (
        "repeated_lines",
        chat("Why?", "I am not sure about it.\n" * 30),
        {"max_repeated_lines": None, "max_repeated_words": 1.0},
    ),
    ("repeated_words", chat("Why?", prose(200) + " wait no" * 800), {"max_repeated_words": 1.0}),
    ("repeated_words", chat("Why?", "a" * 5000), {"max_repeated_words": None}),
    ("repeated_words", chat("为什么", "我不知道这是什么" * 200), {"max_repeated_words": None}),
    ("repeated_words", {"text": "!" * 500}, {"max_repeated_words": None}),
]


@pytest.mark.parametrize(("name", "data", "off"), BAD)
def test_each_filter_drops_what_it_names_and_can_be_switched_off(name: str, data: Any, off: dict[str, Any]) -> None:
    assert reason(data) == name
    assert reason(data, **off) is None


@pytest.mark.parametrize(
    ("name", "limits"),
    [("short", {"min_characters": 13}), ("long", {"max_characters": 11})],
)
def test_limits_count_the_whole_conversation(name: str, limits: dict[str, int]) -> None:
    assert reason(CHAT, **limits) == name
    assert reason(CHAT, min_characters=12, max_characters=12) is None


@pytest.mark.parametrize(
    "data",
    [
        CHAT,
        {"text": prose(400)},
        chat("Why?", "No, no, no, no!"),
        chat("Table?", "| a | b |\n|---|---|\n" + "".join(f"| {i} | {i * i} |\n" for i in range(60))),
        chat("Code?", "".join(f"    assert f({i}) == {i * 7}\n" for i in range(60))),
        chat("\tTabs?\r\n", "\tYes.\r\n"),
    ],
)
def test_good_rows_pass(data: dict[str, Any]) -> None:
    assert reason(data) is None


def test_every_filter_is_tested() -> None:
    names = set(re.findall(r'yield "(\w+)"', inspect.getsource(filters)))
    assert names <= {name for name, _, _ in BAD} | {"short", "long"}


@pytest.mark.parametrize("loops", [0, 3, 10, 40])
def test_the_shortcut_gives_the_plain_count(loops: int) -> None:
    words = [*prose(300).split(), *"and then it went on and on again".split() * loops]
    runs = [tuple(words[i : i + 8]) for i in range(len(words) - 7)]
    share = 1 - len(set(runs)) / len(runs)
    text = " ".join(words)
    assert not repeats_words(text, share) and (not share or repeats_words(text, share - 1e-9))


def test_repeated_lines_are_counted_in_characters() -> None:
    assert repeated_lines("x" * 50 + "\n\n" + "y" * 30 + "\n" + "x" * 50) == pytest.approx(50 / 130)
    assert repeated_lines("a\na\na") == 0


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"max_repeated_words": 1.5}, "filters: max_repeated_words 1.5: expected a share, 0 to 1"),
        ({"min_characters": 9, "max_characters": 3}, "filters: min_characters 9 is above max_characters 3"),
    ],
)
def test_limits_that_cannot_be_are_refused(raw: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput) as caught:
        build(FilterConfig, raw, where="filters")
    assert str(caught.value) == problem
