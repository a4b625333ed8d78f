"""The same row gives the same prompt ids in regeneration, training and evaluation: over templates, rows, variables."""

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from headstart.configs.errors import BadInput
from headstart.data_pipelines.answers.conversations import Failure, SamplingConfig, exchanges
from headstart.data_pipelines.config import DataConfig
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.sources import Row
from headstart.eval.suites.prompts import build_suite
from headstart.scripts.data.engine_answers import EngineAnswers

pytest.importorskip("hypothesis", reason="the dev extra has it")
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

NAMES = ("chatml", "qwen2.5", "qwen3", "llama-3.1", "mistral", "gemma-2", "deepseek-r1")
SAYS = {  # what else the template says, before the conversation and at the end of the prompt
    "nothing": ("", ""),
    "thinking": ("{{ '/think' if enable_thinking else '/no_think' }}", ""),
    "an empty trace": ("", "{% if enable_thinking == false %}<think>\n\n</think>\n\n{% endif %}"),
    "an open trace": ("", "{% if enable_thinking %}<think>\n{% endif %}"),
    "the day": ("Today is {{ strftime_now('%d %B %Y') }}.", ""),
    "effort": ("{% if reasoning_effort is defined %}effort: {{ reasoning_effort }}{% endif %}", ""),
    "tools": ("{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}", ""),
}  # fmt: skip
CONFIG = DataConfig(train="a.jsonl", max_length=10**6, turns="last")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

words = st.sampled_from(["ok", " ", "\n", "hi", "é", ".", "1", "<think>", "a"])
texts = st.lists(words, min_size=1, max_size=6).map("".join)
answers = texts.map(lambda text: f"x{text}")
traces = st.one_of(st.none(), st.sampled_from(["Hm.", "1+2\n=3"]))


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """Chats of every shape, with what rows record beside them."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    num_turns, is_sharegpt = draw(st.integers(1, 3)), draw(st.booleans())
    for _ in range(num_turns):
        messages.append({"role": "user", "content": f"q{draw(texts)}"})
        if draw(st.booleans()) and not is_sharegpt:
            arguments = draw(st.sampled_from(['{"a": 1}', {"a": 1}]))
            call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}
            messages.append({"role": "assistant", "content": draw(st.sampled_from([None, ""])), "tool_calls": [call]})
            messages.append({"role": "tool", "content": "3", "tool_call_id": "call00001"})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(answers)}
        trace = draw(traces)
        if trace and draw(st.booleans()):
            answer["content"] = f"<think>\n{trace}\n</think>\n\n{answer['content']}"
        elif trace:
            answer[draw(st.sampled_from(["reasoning_content", "reasoning"]))] = trace
        messages.append(answer)
    row: dict[str, Any] = {"messages": messages}
    if is_sharegpt:
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        turns = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
        row = {"conversations": turns}
    if draw(st.booleans()):
        row["system"] = draw(texts)
    row["tools"] = draw(st.sampled_from([None, [], [TOOL], json.dumps([TOOL])]))
    variables = {
        "enable_thinking": draw(st.sampled_from([None, True, False])),
        "reasoning_effort": draw(st.sampled_from([None, "low"])),
        "strftime_now": draw(st.sampled_from([None, "2026-03-17"])),
    }
    row["chat_template_kwargs"] = draw(st.sampled_from([None, variables]))
    return row


@cache
def target(make: Any, name: str, says: str) -> Any:
    """A stand-in for a target with such a template."""
    tokenizer = make(name)
    before, behind = SAYS[says]
    behind = f"{{% if add_generation_prompt %}}{behind}{{% endif %}}"
    tokenizer.chat_template = f"{before}{tokenizer.chat_template}{behind}"
    num = len(tokenizer)
    return SimpleNamespace(
        name=name, tokenizer=tokenizer, eos_token_ids=frozenset(), vocab_size=num, num_positions=10**6, context="-"
    )


def regenerated(row: Row, target: Any) -> list[int] | Failure:
    [exchange] = exchanges(row, SamplingConfig(), turns="last")
    return EngineAnswers(target).prompt(next(exchange.talk()))


def check(row: dict[str, Any], target: Any) -> None:
    told = Row(row, "a.jsonl:1")
    prompt = regenerated(told, target)
    suite = build_suite("a", [(told.origin, row)], target, max_new_tokens=1)
    if isinstance(prompt, Failure):
        assert not suite.prompts and suite.failed[0].reason == str(prompt)
        with pytest.raises(BadInput):
            encode_row(told, target.tokenizer, CONFIG)
        return
    assert suite.prompts == [prompt]
    try:
        samples = encode_row(told, target.tokenizer, CONFIG)
    except BadInput:  # the template takes the question but not the answer, or has no place for its trace
        return
    assume(samples)  # a template that leaves out tool calls
    [sample] = samples
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert not sample.loss_mask[: len(prompt)].any() and sample.loss_mask[len(prompt) :].any()


how: dict[str, Any] = {
    "database": None,
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
}


@settings(max_examples=60, **how)
@given(row=rows(), name=st.sampled_from(NAMES), says=st.sampled_from(sorted(SAYS)))
def test_a_row_has_one_prompt(row, name, says, chat_tokenizer):
    check(row, target(chat_tokenizer, name, says))


@pytest.mark.slow
@settings(max_examples=2000, **how)
@given(row=rows(), name=st.sampled_from(NAMES), says=st.sampled_from(sorted(SAYS)))
def test_two_thousand_rows_have_one_prompt_each(row, name, says, chat_tokenizer):
    check(row, target(chat_tokenizer, name, says))
