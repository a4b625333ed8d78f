"""Each turn of a chat is asked behind the target's own answers to the turns before it, once and for all sides."""

import json
from datetime import datetime
from types import SimpleNamespace

import pytest
from headstart.eval.decoding import generate
from headstart.eval.measurement.config import MeasureConfig
from headstart.eval.measurement.tree_search import hold_out
from headstart.eval.suites.prompts import ChatOptions, load_suite
from headstart.eval.suites.turns import with_every_turn
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


def test_a_turn_for_which_there_is_no_room_is_named_and_ends_its_chat(chat_target, written):
    long = {"turns": ["w5", "w6 " * 240, "w7"]}
    suite = load_suite(written("a.jsonl", long, SINGLE), chat_target, max_new_tokens=6)
    whole = with_every_turn(suite, chat_target, CONFIG)
    assert [one.number for one in whole.sources] == [0, 3]
    [failed] = whole.failed
    assert (failed.prompt, failed.row) == (1, "a.jsonl:1") and failed.reason.startswith("turn 2 of 3: 25")


def test_trees_are_shaped_on_other_chats_than_are_measured(chat_target, written):
    suite = load_suite(written("a.jsonl", *[TURNS] * 4), chat_target, max_new_tokens=6)
    rest = hold_out(with_every_turn(suite, chat_target, CONFIG))
    assert len(rest.calibration) == 3 and len({one.first for one in rest.sources}) == 3 and len(rest.prompts) == 9


def test_a_suite_has_one_digest_on_all_days(chat_target, written, monkeypatch):
    chat_target.tokenizer.chat_template = "w{{ strftime_now('%d') }} " + chat_target.tokenizer.chat_template
    rows = written("a.jsonl", TURNS, {**MESSAGES, "chat_template_kwargs": {"strftime_now": "2026-03-17"}})
    suite = load_suite(rows, chat_target, max_new_tokens=6)
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: datetime(2031, 12, 24)))
    assert chat_target.tokenizer.apply_chat_template([said("user", "w7")], tokenize=False).startswith("w24 ")
    assert load_suite(rows, chat_target, max_new_tokens=6).digest == suite.digest
    assert suite.prompts[1][0] == 17 and suite.prompts[0][0] == 0  # w01 is no word
    assert json.dumps(suite.variables) == "{}", "the rows were written on different days"
