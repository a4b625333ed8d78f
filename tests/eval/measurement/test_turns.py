"""Each turn of a chat is asked behind the target's own answers to the turns before it, once and for all sides."""

import json
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pytest
from headstart.base.errors import BadInput
from headstart.eval.decoding import generate
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.measurement.measure import measure
from headstart.eval.measurement.turns import with_every_turn
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.served.questions import Questions
from headstart.eval.suites.prompts import ChatOptions, load_suite
from headstart.targets.chat.messages import for_api
from transformers.utils import chat_template_utils

CONFIG = MeasureConfig(max_new_tokens=6)
SINGLE = {"prompt": "w5 w6"}
TURNS = {"turns": ["w5 w6", "w7", "w30"], "category": "own"}


def said(role, content):
    return {"role": role, "content": content}


MESSAGES = {
    "messages": [
        said("user", "w5 w6"), said("assistant", "w40 w41"), said("user", "w7"), said("assistant", "w42"),
        said("user", "w30"),
    ]
}  # fmt: skip
SHAREGPT = {
    "conversations": [
        {"from": {"user": "human", "assistant": "gpt"}[turn["role"]], "value": turn["content"]}
        for turn in MESSAGES["messages"]
    ]
}


def by_hand(target, questions, system=()):
    """The prompts of a chat's turns, from greedy answers of the target."""
    ids, prompts = list(system), []
    for question in questions:
        ids = [*ids, 10, *question, 2, 11]
        prompts.append(ids)
        [answer] = generate(target, None, [ids], max_new_tokens=6).token_ids
        text = " ".join(f"w{token}" for token in (answer[:-1] if answer[-1] == 2 else answer))
        ids = [*ids, *target.tokenizer(text).input_ids, 2]
    return prompts


@pytest.mark.parametrize("row", [TURNS, MESSAGES, SHAREGPT], ids=["turns", "messages", "conversations"])
def test_a_turns_prompt_has_the_targets_own_answers(row, chat_target, written):
    suite = load_suite(written("a.jsonl", SINGLE, row, SINGLE), chat_target, max_new_tokens=6)
    whole = with_every_turn(suite, chat_target, CONFIG)
    assert whole.prompts == [[5, 6], *by_hand(chat_target, [[5, 6], [7], [30]]), [5, 6]]
    assert [(one.number, one.row, one.turn) for one in whole.sources] == [
        (0, "a.jsonl:1", 1), (1, "a.jsonl:2", 1), (2, "a.jsonl:2", 2), (3, "a.jsonl:2", 3), (4, "a.jsonl:3", 1),
    ]  # fmt: skip
    assert [one.question for one in whole.sources] == ["w5 w6", "w5 w6", "w7", "w30", "w5 w6"]
    assert with_every_turn(suite, chat_target, CONFIG, batch_size=4).digest == whole.digest


def test_the_system_prompt_and_variables_are_in_every_turn(chat_target, written):
    chat = ChatOptions(system="w30", thinking=True)
    suite = load_suite(written("a.jsonl", TURNS), chat_target, max_new_tokens=6, chat=chat)
    whole = with_every_turn(suite, chat_target, CONFIG)
    assert len(whole.prompts) == 3 and all(ids[:3] == [9, 30, 2] and ids[-1] == 12 for ids in whole.prompts)


CALL = {
    **said("assistant", "w40"),
    "tool_calls": [{"type": "function", "function": {"name": "w3", "arguments": {"x": "w4"}}}],
}
TOOLS = [{"type": "function", "function": {"name": "w3", "parameters": {"type": "object", "properties": {}}}}]
AGENT = [
    said("system", "w30"),
    said("user", "w5"),
    CALL,
    said("tool", "w8"),
    said("assistant", "w41"),
    said("user", "w7"),
]
RECORDED = ChatOptions(has_recorded_turns=True)


@pytest.fixture
def tool_target(chat_target):
    """`chat_target` whose template writes tools and calls, and takes what tools give back as it takes questions."""
    template = chat_target.tokenizer.chat_template.replace("m.role == 'tool'", "false")
    calls = "{% for c in m.tool_calls or [] %}w15 {{ c.function.name }} {{ c.function.arguments.x }} {% endfor %}"
    tools = "{% for t in tools or [] %}w14 {{ t.function.name }} {% endfor %}"
    chat_target.tokenizer.chat_template = tools + template.replace("{{ m.content }} ", "{{ m.content }} " + calls)
    return chat_target


@pytest.mark.parametrize(
    ("messages", "kinds"),
    [
        (AGENT, {2: "call", 4: "answer", 6: "answer"}),
        (AGENT[:-1], {2: "call", 4: "answer"}),
        (AGENT[:3], {2: "call"}),
        (
            [said("assistant", "w9"), said("user", "w5"), said("assistant", "w6"), said("assistant", "w7")],
            {2: "answer"},
        ),
    ],
    ids=["a last question", "answered", "a call alone", "two messages are one answer"],
)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
def test_a_recorded_turns_prompt_is_the_templates_own_rendering(messages, kinds, tools, tool_target, written):
    row = {"messages": [for_api(message) for message in messages], "tools": tools}  # arguments as JSON, as servers say
    suite = load_suite(written("a.jsonl", row), tool_target, max_new_tokens=6, chat=RECORDED)
    whole, template = with_every_turn(suite, tool_target, CONFIG), tool_target.tokenizer.apply_chat_template
    told = {"tools": tools, "add_generation_prompt": True, "return_dict": False}
    assert whole.prompts == [template(messages[:at], **told) for at in kinds]
    assert [(one.turn, one.kind) for one in whole.sources] == list(enumerate(kinds.values(), start=1))


def test_figures_by_recorded_turn_add_up_to_the_whole(tool_target, written):
    suite = load_suite(written("a.jsonl", *[{"messages": AGENT}] * 2), tool_target, max_new_tokens=6, chat=RECORDED)
    whole = with_every_turn(suite, tool_target, CONFIG)
    result, _ = measure(tool_target, NgramDrafter(), whole, CONFIG, name="ngram")
    kinds = [result.by_turn[name] for name in ("call", "answer")]
    numbers = [result.by_turn[f"turn {number}"] for number in (1, 2, 3)]
    for figure in ("num_prompts", "num_rounds"):
        assert sum(getattr(part, figure) for part in kinds) == getattr(result, figure)
        assert sum(getattr(part, figure) for part in numbers) == getattr(result, figure)


@pytest.mark.parametrize("chat", [RECORDED, replace(RECORDED, system="w30")], ids=["as it is", "with a system prompt"])
def test_a_server_is_asked_every_recorded_turn_with_the_same_prompt(chat, tool_target, written):
    rows = written("a.jsonl", {"messages": AGENT}, {"messages": AGENT[1:3]})
    asked = Questions.read([str(rows)], tool_target.tokenizer, limit=None, chat=chat).asked
    suite = load_suite(rows, tool_target, max_new_tokens=6, chat=chat)
    assert [one.ids for one in asked] == with_every_turn(suite, tool_target, CONFIG).prompts
    assert [one.body["messages"][-1]["role"] for one in asked] == ["user", "tool", "user", "user"]
    assert asked[1].row == "a.jsonl:1, turn 2"


def test_a_server_is_asked_what_our_own_engine_would_be(chat_target, written):
    day = {"strftime_now": "2025-05-01", "tone": "dry"}
    system = {"role": "system", "content": "w9"}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x"}}]}
    rows = written(
        "a.jsonl",
        {"input_ids": [1, 5, 6, 7, 8], "prompt_length": 3},
        {"messages": [{"role": "user", "content": "w5"}], "chat_template_kwargs": day},
        {"messages": [system, image], "system": "w8"},
    )
    ready, chat, seen = Questions.read([str(rows)], chat_target.tokenizer, limit=None, chat=ChatOptions()).asked
    assert ready.ids == ready.body["prompt"] == [1, 5, 6]
    assert chat.body["chat_template_kwargs"] == {"tone": "dry"}, "a day as text would hide the server's function"
    assert seen.body["messages"] == [system, image]
    with pytest.raises(BadInput, match="need a chat template"):
        Questions.read([str(written("b.jsonl", {"prompt": "w5"}))], None, limit=None, chat=ChatOptions(system="w8"))


def test_recorded_turns_are_read_from_messages(chat_target, written):
    rows, problem = written("a.jsonl", TURNS), "a.jsonl:1: has no recorded answers; --turns recorded reads `messages`"
    with pytest.raises(BadInput, match=problem):
        load_suite(rows, chat_target, max_new_tokens=6, chat=RECORDED)
    with pytest.raises(BadInput, match=problem):
        Questions.read([str(rows)], chat_target.tokenizer, limit=None, chat=RECORDED)


LONG = [said("user", "w5"), said("assistant", "w6"), said("user", "w7 " * 250), said("assistant", "w8")]


@pytest.mark.parametrize(
    ("row", "chat", "num_turns"),
    [({"turns": ["w5", "w6 " * 240, "w7"]}, ChatOptions(), 3), ({"messages": LONG}, RECORDED, 2)],
    ids=["asked", "recorded, as traces of agents are"],
)
def test_a_turn_for_which_there_is_no_room_is_named_and_ends_its_chat(row, chat, num_turns, chat_target, written):
    suite = load_suite(written("a.jsonl", row, {"messages": LONG[:2]}), chat_target, max_new_tokens=6, chat=chat)
    whole = with_every_turn(suite, chat_target, CONFIG)
    assert [(one.number, one.turn) for one in whole.sources] == [(0, 1), (num_turns, 1)]
    [failed] = whole.failed
    assert (failed.prompt, failed.row) == (1, "a.jsonl:1")
    assert failed.reason.startswith(f"turn 2 of {num_turns}: 25")


def test_a_chat_without_a_question_is_left_out(chat_target, written):
    rows = [{"messages": [said("system", "w5"), said("assistant", "w6")]}, {"messages": MESSAGES["messages"][:2]}]
    suite = load_suite(written("a.jsonl", *rows), chat_target, max_new_tokens=6, chat=RECORDED)
    assert {one.number for one in with_every_turn(suite, chat_target, CONFIG).sources} <= {0, 1}


def test_a_suite_has_one_digest_on_all_days(chat_target, written, monkeypatch):
    chat_target.tokenizer.chat_template = "w{{ strftime_now('%d') }} " + chat_target.tokenizer.chat_template
    rows = written("a.jsonl", TURNS, {**MESSAGES, "chat_template_kwargs": {"strftime_now": "2026-03-17"}})
    suite = load_suite(rows, chat_target, max_new_tokens=6)
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: datetime(2031, 12, 24)))
    assert chat_target.tokenizer.apply_chat_template([said("user", "w7")], tokenize=False).startswith("w24 ")
    assert load_suite(rows, chat_target, max_new_tokens=6).digest == suite.digest
    assert suite.prompts[1][0] == 17 and suite.prompts[0][0] == 0  # w01 is no word
    assert json.dumps(suite.variables) == "{}", "the rows were written on different days"
