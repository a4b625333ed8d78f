"""The same row gives the same prompt ids in regeneration, training and evaluation, at each of its turns: over
templates, rows, variables and tokenizers."""

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.data_pipelines.answers.conversations import Failure, SamplingConfig, exchanges
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.rows.sources import Row
from headstart.eval.suites.prompts import build_suite
from headstart.scripts.data.engine_answers import EngineAnswers
from headstart.targets.chat.prompts import RENDER_ERRORS, ChatTemplate, prompt_ids
from headstart.targets.chat.rows import chat_of
from tokenizers.processors import TemplateProcessing

pytest.importorskip("hypothesis", reason="the dev extra has it")
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

KINDS = ("bytes", "words", "numbers", "pieces")  # of tokenizers, by how they split a text
NAMES = ("chatml", "qwen2.5", "qwen3", "llama-3.1", "mistral", "gemma-2", "deepseek-r1")
CLOSED = "{% set ns = namespace(opens=enable_thinking == false) %}"
SAYS = {  # what else the template says, before the conversation and at the end of the prompt
    "nothing": ("", ""),
    "thinking": ("{{ '/think' if enable_thinking else '/no_think' }}", ""),
    "an empty trace": ("", "{% if enable_thinking == false %}<think>\n\n</think>\n\n{% endif %}"),
    "an open trace": ("", "{% if enable_thinking %}<think>\n{% endif %}"),
    "the day": ("Today is {{ strftime_now('%d %B %Y') }}.", ""),
    "effort": ("{% if reasoning_effort is defined %}effort: {{ reasoning_effort }}{% endif %}", ""),
    "an empty trace in all turns": (CLOSED, ""),
    "tools": ("{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}", ""),
}  # fmt: skip
CONFIG = DataConfig(train="a.jsonl", max_length=10**6, turns="last")
ALL_TURNS = DataConfig(train="a.jsonl", max_length=10**6)
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
def target(make: Any, name: str, says: str, kind: str) -> Any:
    """A stand-in for a target with such a template."""
    tokenizer = make(name, kind)
    before, behind = SAYS[says]
    if before == CLOSED:  # as if each answer were behind a trace that was closed at once
        behind = "{% if ns.opens %}<think>\n\n</think>\n\n{% endif %}"
        spoken = "message['content']" if "message['content']" in tokenizer.chat_template else "message.content"
        opened = f"('<think>\n\n</think>\n\n' if ns.opens and message.role == 'assistant' else '') ~ {spoken}"
        tokenizer.chat_template = tokenizer.chat_template.replace(spoken, f"({opened})")
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
    check_turns(told, target)


def check_turns(row: Row, target: Any) -> None:
    """Each answer that the whole text has behind the text of its prompt is learnt behind the ids of that prompt."""
    chat = chat_of(row.data, row.origin)
    template = ChatTemplate(target.tokenizer, chat.tools, chat.variables)
    messages = template.placed(chat.messages, row.origin)
    whole, samples = template.render_text(messages), encode_row(row, target.tokenizer, ALL_TURNS)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            text = template.render_text(messages[:index], generation_prompt=True)
        except RENDER_ERRORS:
            continue
        ids = template.ids(text)
        learnt = [one.loss_mask for one in samples if one.input_ids[: len(ids)].tolist() == ids]
        begun = any(not mask[len(ids) - 1] and mask[len(ids) : len(ids) + 1].any() for mask in learnt)
        assert begun or not whole.startswith(text), (text, whole)


how: dict[str, Any] = {"database": None, "deadline": None, "derandomize": True}
how["suppress_health_check"] = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]


over = {"row": rows(), "name": st.sampled_from(NAMES), "says": st.sampled_from(sorted(SAYS)),
        "kind": st.sampled_from(KINDS)}  # fmt: skip


@settings(max_examples=40, **how)
@given(**over)
def test_a_row_has_one_prompt_at_each_turn(row, name, says, kind, chat_tokenizer):
    check(row, target(chat_tokenizer, name, says, kind))


@pytest.mark.slow
@settings(max_examples=2000, **how)
@given(**over)
def test_two_thousand_rows_have_one_prompt_each(row, name, says, kind, chat_tokenizer):
    check(row, target(chat_tokenizer, name, says, kind))


@pytest.mark.parametrize("frame", ["", "b", "e", "be"], ids=["plain", "begins", "ends", "both"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, **how)
@given(prompt=texts, answer=texts, is_cut=st.booleans())
def test_a_plain_prompt_is_never_ended_and_a_cut_answer_neither(prompt, answer, is_cut, kind, frame, chat_tokenizer):
    """Tokenizers may put a token before each text, and append one (`add_eos_token`)."""
    tokenizer = chat_tokenizer("mistral", kind)
    begin, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<s>", "</s>"))
    parts = [*(["<s>"] if "b" in frame else []), "$A", *(["</s>"] if "e" in frame else [])]
    special = [("<s>", begin), ("</s>", end)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=parts, special_tokens=special)
    bare = tokenizer(prompt, add_special_tokens=False).input_ids
    row = {"prompt": prompt, "response": answer, "truncated": is_cut}
    assert prompt_ids(row, tokenizer, origin="a") == [begin] * ("b" in frame) + bare
    learnt = tokenizer(answer, add_special_tokens=False).input_ids + [end] * (not is_cut)
    for sample in encode_row(Row(row, "a:1"), tokenizer, CONFIG):
        assert sample.input_ids.tolist() == [begin] * ("b" in frame) + bare + learnt
        assert sample.input_ids[sample.loss_mask].tolist() == learnt
