"""Which turns of a row are asked anew, of whatever shape it is, and what their keys depend on."""

import pytest
from headstart.configs.errors import BadInput
from headstart.data_pipelines.answers.conversations import SamplingConfig, exchanges
from headstart.data_pipelines.sources import Row
from headstart.heads.chat.messages import script_of


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


SYSTEM, TOOL = {"role": "system", "content": "be brief"}, {"role": "tool", "content": "7"}
CALL = assistant("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}])


@pytest.mark.parametrize(
    ("messages", "every", "last"),
    [
        ([user("a")], [user("a"), None], [user("a"), None]),
        ([user("a"), assistant("b")], [user("a"), None], [user("a"), None]),
        (
            [SYSTEM, user("a"), assistant("b"), user("c"), assistant("d")],
            [SYSTEM, user("a"), None, user("c"), None],
            [SYSTEM, user("a"), assistant("b"), user("c"), None],
        ),
        (
            [user("a"), assistant("b"), user("c")],
            [user("a"), None, user("c"), None],
            [user("a"), assistant("b"), user("c"), None],
        ),
        ([user("a"), assistant("b"), assistant("c")], [user("a"), None], [user("a"), None]),
        ([SYSTEM, assistant("hi"), user("a")], [SYSTEM, assistant("hi"), user("a"), None], None),
        ([user("a"), CALL, TOOL, assistant("b")], [user("a"), CALL, TOOL, None], None),
        ([user("a"), CALL, TOOL], [user("a"), CALL, TOOL, None], None),
    ],
)
def test_the_turns_that_are_asked(messages, every, last):
    assert script_of(messages, turns="all") == every
    assert script_of(messages, turns="last") == (last or every)


@pytest.mark.parametrize(
    ("data", "questions"),
    [
        ({"prompt": "a"}, ["a"]),
        ({"instruction": "a", "input": "b", "output": "c"}, ["a\n\nb"]),
        ({"instruction": "a", "input": ""}, ["a"]),
        ({"turns": ["a", "b"]}, ["a", "b"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a"]),
    ],
)
def test_every_shape_of_a_prompt_is_read(data, questions):
    [one] = exchanges(Row(data, "x:1"), SamplingConfig(), turns="all")
    assert one.script == [message for text in questions for message in (user(text), None)]
    assert one.source_id == "x:1"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"text": "a"}, "x:1: no prompt among the keys text"),
        ({"messages": [SYSTEM]}, "x:1: no user turn to answer"),
        ({"messages": [assistant("a")]}, "x:1: no user turn to answer"),
        ({"prompt": 3}, "x:1: `prompt` should be text"),
        ({"turns": []}, "x:1: `turns` should be a list"),
        ({"messages": [{"role": "poet", "content": "a"}]}, "x:1: turn 0 has the role 'poet'"),
        ({"prompt": "a", "tools": "{"}, "x:1: `tools` is text, but not JSON"),
    ],
)
def test_a_row_that_cannot_be_asked_is_named(data, problem):
    with pytest.raises(BadInput, match=problem):
        list(exchanges(Row(data, "x:1"), SamplingConfig(), turns="all"))


def test_a_key_depends_on_all_that_an_answer_depends_on():
    def keys(data, *, turns="all", epoch=0, **sampling):
        row = Row(data, "x:1", epoch=epoch)
        return {one.key for one in exchanges(row, SamplingConfig(**sampling), turns=turns)}

    data = {"id": 1, "messages": [user("a"), assistant("b"), user("c")]}
    base = keys(data)
    others = [
        keys({**data, "id": 2}),
        keys({**data, "messages": [user("A"), *data["messages"][1:]]}),
        keys({**data, "tools": [{"type": "function"}]}),
        keys(data, turns="last"),
        keys(data, epoch=1),
        *(keys(data, **{name: value}) for name, value in {"temperature": 0.5, "seed": 1, "thinking": True}.items()),
    ]
    assert len(base.union(*others)) == 1 + len(others)
    changed = {**data, "messages": [user("a"), assistant("other"), user("c")], "note": "x"}
    assert keys(changed) == base, "an answer that is asked anew says nothing about the row"
    assert len(keys(data, num_samples=3)) == 3
