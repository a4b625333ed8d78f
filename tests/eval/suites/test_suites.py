"""Rows become prompts as the chat template has it; prompts that cannot be asked are named, and the others stand."""

import pytest
from headstart.base.errors import BadInput
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.storage.features import origin_of
from headstart.eval.suites.prompts import (
    ChatOptions,
    PromptSource,
    Suite,
    distinct_names,
    file_names,
    full_batches,
    load_suite,
)

TURNS = {"turns": ["w5 w6", "w7"]}
CHAT = {"messages": [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]}
OWN_SYSTEM = {"messages": [{"role": "system", "content": "w30"}, {"role": "user", "content": "w5"}]}


def load(path, target, **how):
    return load_suite(path, target, **{"max_new_tokens": 8, **how})


def test_the_first_turn_is_asked_through_the_chat_template(chat_target, written):
    suite = load(written("a.jsonl", TURNS, CHAT), chat_target)
    assert suite.prompts == [[10, 5, 6, 2, 11], [10, 5, 2, 11]]


@pytest.mark.parametrize("request_", [TURNS, CHAT, OWN_SYSTEM, {"prompt": "w5 w6"}], ids=str)
def test_of_a_servers_log_the_requests_are_asked(request_, chat_target, written):
    logged = {"category": "w", "request": {**request_, "temperature": 0.7}, "response": {"choices": []}}
    suites = load(written("a.jsonl", request_), chat_target), load(written("b.jsonl", logged), chat_target)
    assert suites[0].prompts == suites[1].prompts and suites[1].sources[0].domain == "w"


def test_a_system_prompt_is_put_in_front_of_chats_without_one(chat_target, written):
    suite = load(written("a.jsonl", TURNS, OWN_SYSTEM), chat_target, chat=ChatOptions(system="w31 w32"))
    assert suite.prompts == [[9, 31, 32, 2, 10, 5, 6, 2, 11], [9, 30, 2, 10, 5, 2, 11]]
    assert suite.chat.system == "w31 w32" and suite.template_hash


def test_thinking_is_told_to_the_template(chat_target, written):
    path = written("a.jsonl", TURNS)
    tails = [load(path, chat_target, chat=ChatOptions(thinking=how)).prompts[0][-1] for how in (None, True, False)]
    assert tails == [11, 12, 13]
    assert load(path, chat_target, chat=ChatOptions(thinking=False)).chat.thinking is False


def test_the_template_is_named_as_training_names_it(chat_target, written):
    suite = load(written("a.jsonl", TURNS), chat_target)
    trained = origin_of(DataConfig(train=["a.jsonl"]), chat_target.tokenizer)
    assert suite.template_hash == trained["template_hash"]
    assert load(written("b.jsonl", {"prompt": "w5"}), chat_target).template_hash is None


def test_rows_of_plain_text_and_of_tokens(chat_target, written):
    rows = [{"prompt": "w5 w6"}, {"input_ids": [7, 8, 9], "prompt_length": 2}, {"input_ids": [4]}]
    path = written("three.test.jsonl", *rows)
    suite = load(path, chat_target)
    assert suite.prompts == [[5, 6], [7, 8], [4]] and suite.name == "three"
    assert load(path, chat_target, limit=2).prompts == [[5, 6], [7, 8]]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "a"}, "a prompt row needs `prompt`, `messages` or `turns`, found ['text']"),
        ({"prompt": ""}, "empty prompt"),
        ({"prompt": 7}, "`prompt` should be text"),
        ({"prompt": None}, "a prompt row needs `prompt`, `messages` or `turns`"),
        ({"turns": []}, "`turns` should be a list of texts"),
        ({"turns": [7]}, "`turns` should be a list of texts"),
        ({"input_ids": "abc"}, "`input_ids` should be a list of whole numbers"),
        ({"input_ids": [1, 61]}, "token id 61 is outside the vocabulary of 61"),
        ({"input_ids": [1, 2], "prompt_length": "1"}, "`prompt_length` should be between 0 and 2, got '1'"),
        ({"input_ids": [1, 2], "prompt_length": 0}, "empty prompt"),
        ({"prompt": "w5", "category": 7}, "`category` or `domain` should be text, got 7"),
        (CHAT, "the target's tokenizer has no chat template"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(row, problem, chat_target, written):
    chat_target.tokenizer.chat_template = None
    path = written("a.jsonl", {"prompt": "w5"}, row)
    with pytest.raises(BadInput) as caught:
        load(path, chat_target)
    assert str(caught.value).startswith(f"{path}:2: {problem}") and "\n" not in str(caught.value)


def test_a_base_model_reads_turns_as_plain_text(chat_target, written):
    chat_target.tokenizer.chat_template = None
    suite = load(written("a.jsonl", TURNS), chat_target)
    assert suite.prompts == [[5, 6]] and suite.template_hash is None


@pytest.mark.parametrize("row", [{"prompt": "w5"}, {"input_ids": [5]}, TURNS])
def test_a_system_prompt_that_nothing_reads_is_refused(row, chat_target, written):
    if "turns" in row:
        chat_target.tokenizer.chat_template = None
    for chat in (ChatOptions(system="w31"), ChatOptions(thinking=True)):
        with pytest.raises(BadInput, match=r"a\.jsonl:1: a system prompt, thinking or recorded turns need a chat"):
            load(written("a.jsonl", row), chat_target, chat=chat)


def test_prompts_that_cannot_be_asked_are_named_and_the_others_stand(chat_target, written):
    tool = {"messages": [{"role": "tool", "content": "w5"}]}
    path = written("a.jsonl", {**TURNS, "category": "one"}, tool, {"prompt": "w5 " * 250}, {**TURNS, "domain": "two"})
    suite = load(path, chat_target)
    assert [(one.number, one.row, one.domain) for one in suite.sources] == [
        (0, "a.jsonl:1", "one"),
        (3, "a.jsonl:4", "two"),
    ]
    assert [(one.prompt, one.row) for one in suite.failed] == [(1, "a.jsonl:2"), (2, "a.jsonl:3")]
    assert suite.failed[0].reason == "the chat template refuses the messages: no tools here"
    assert suite.failed[1].reason.startswith("250 prompt tokens + 8 new ones exceed the context of 256")
    assert load(path, chat_target, limit=1).failed == []


def test_a_part_of_a_suite_keeps_where_its_prompts_came_from():
    part = Suite("three", [[1], [2], [3]]).subset([2, 0])
    assert part.prompts == [[3], [1]] and [one.number for one in part.sources] == [2, 0]
    assert part.digest == Suite("two", [[1], [3]]).digest, "its prompts', in whatever order batches take them"


def test_names_are_the_shortest_that_differ():
    one, two, three = map(file_names, ("a/gsm8k.train.jsonl", "a/gsm8k.test.jsonl.gz", "b/chat.jsonl"))
    assert distinct_names([one, two, three]) == ["gsm8k.train", "gsm8k.test", "chat"]
    assert distinct_names([one, three]) == ["gsm8k", "chat"]
    assert distinct_names([["gsm8k"], one]) == ["gsm8k", "gsm8k.train"], "a suite of that name keeps it"
    assert distinct_names([file_names("a/x.jsonl"), file_names("b/x.jsonl")]) == ["a/x", "b/x"]
    assert distinct_names([file_names("x.jsonl"), file_names("x.jsonl.gz")])[0].endswith("/x.jsonl")
    with pytest.raises(BadInput, match="chat.jsonl: is given twice"):
        distinct_names([three, three])


def test_rows_repeat_until_a_batch_is_full():
    assert (
        full_batches(4, 16) == [0, 1, 2, 3] * 4
        and full_batches(5, 2) == [0, 1, 2, 3, 4, 0]
        and full_batches(4, 2) == [0, 1, 2, 3]
    )


@pytest.mark.parametrize(
    ("turns", "order"),
    [
        ([1] * 5, [[0, 1], [2, 3], [4, 0]]),
        ([1, 2, 1, 2], [[1, 2], [0, 3], [4, 5]]),
        ([3, 2, 3], [[3, 4], [0, 1], [2, 5], [6, 7]]),  # the two of three turns end together
        ([3, 2], [[3, 4], [0, 1], [2, 3]]),
    ],
    ids=["no chats", "a question waits", "two by two", "one cannot"],
)
def test_batches_end_where_chats_do_if_they_can(turns, order):
    """Else batches are joined by the chats that they share, all to one observation."""
    firsts = [first for chat, count in enumerate(turns) for first in [sum(turns[:chat])] * count]
    sources = [PromptSource(i, "a:1", chat=first) for i, first in enumerate(firsts)]
    suite = Suite("chats", [[i] for i in range(len(firsts))], sources=sources)
    filled = suite.filled(2)
    assert filled.prompts == [[i] for batch in order for i in batch] and filled.digest == suite.digest
    assert suite.filled(1).prompts == suite.prompts
