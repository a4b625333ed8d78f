"""Exactly the assistant's tokens of a conversation are supervised, whatever its chat template does: real ones by a
golden file that was checked by hand, others by cases."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import chat, turns
from headstart.base.errors import BadInput
from headstart.data_pipelines.masks import assistant_masks, rendering
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.rows.samples import THINK, Sample
from headstart.data_pipelines.rows.sources import Row

SPECIAL = ["<|user|>", "<|assistant|>", "<|end|>", "<|return|>", "<|final|>", "<s>", "</s>"]
Supervised = Callable[..., list[str]]

# No closing token of its own: the next turn's opening token is what ends an answer (GLM-4).
GLM = """
{%- for message in messages %}{{ '<|' + message.role + '|>\n' + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

# The last answer is closed by another token, and the answer begins with a channel of its own (gpt-oss).
HARMONY = """
{%- for message in messages %}
  {{- '<|' + message.role + '|>' + ('<|final|>' if message.role == 'assistant' else '') + message.content }}
  {{- '<|return|>' if loop.last and message.role == 'assistant' else '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

PLAIN = """
{%- for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def supervised_runs(sample: Sample, tokenizer: Any) -> Iterator[list[int]]:
    """The runs of supervised tokens of a sample, each behind the ids that the tokenizer gives for the text before."""
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(int), prepend=0, append=0)).tolist()
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        before = sample.input_ids[:start].tolist()
        assert tokenizer(tokenizer.decode(before), add_special_tokens=False).input_ids == before
        yield sample.input_ids[start:end].tolist()


@pytest.fixture
def supervised(chat_tokenizer: Callable[[str], Any]) -> Supervised:
    """supervised(template, messages, bos=None): the text of each run of supervised tokens, after checking that the ids
    are those of the whole conversation, and that each run stands behind its prompt as the target is given it.

    Args: template: a name in templates/, or a template.
    """

    def find(template: str, messages: list[dict[str, Any]], *, bos: str | None = None) -> list[str]:
        tokenizer = chat_tokenizer("chatml" if "{" in template else template)
        if "{" in template:
            tokenizer.add_tokens(SPECIAL, special_tokens=True)
            tokenizer.chat_template, tokenizer.bos_token = template, bos
        config = DataConfig(train="train.jsonl", max_length=100_000)
        *earlier, sample = encode_row(Row({"messages": messages}, "train.jsonl:17"), tokenizer, config)
        if messages[-1]["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
            whole = str(tokenizer.apply_chat_template(messages, tokenize=False))
            asked = str(tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False))
            assert sample.input_ids.tolist()[: len(prompt)] == prompt
            assert not whole.startswith(asked) or tokenizer.decode(sample.input_ids) == whole
        else:
            assert sample.input_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
        return [str(tokenizer.decode(run)) for each in (*earlier, sample) for run in supervised_runs(each, tokenizer)]

    return find


WELCOME = {"role": "assistant", "content": "Welcome."}
TWO, GREETED = turns("hi", "ok.", "again?", "sure"), [WELCOME, *turns("hi", "ok.")]
OPENED = PLAIN.replace("{{ message.role", "{{ (bos_token if message.role == 'user' else '') + message.role")
# Phi-3 closes the last turn twice; in between stands the opening of the next one
TWICE = HARMONY.replace("'<|return|>' if loop.last and message.role == 'assistant' else '<|end|>'", "'<|end|>\\n'")
TWICE += "{{ '' if add_generation_prompt else '</s>' }}"
CASES = {
    "a system prompt that moves": ("mistral", [*turns(system="Be kind."), *TWO], ["ok.</s>", "sure</s>"]),
    "a greeting that no prompt asks for": ("qwen2.5", GREETED, ["Welcome.<|im_end|>", "ok.<|im_end|>"]),
    "such a one of Llama 3": ("llama-3.1", GREETED, ["Welcome.<|eot_id|>", "ok.<|eot_id|>"]),
    "and without a closing token": (GLM, GREETED, ["Welcome.<|user|>", "ok."]),
    "messages after the last answer": ("qwen2.5", turns("hi", "ok.", "and?"), ["ok.<|im_end|>"]),
    "two answers in a row": ("qwen2.5", [*turns("hi", "ok."), WELCOME], ["ok.<|im_end|>", "Welcome.<|im_end|>"]),
    "an end token that opens the next turn": (GLM, TWO, ["ok.<|user|>", "sure"]),
    "another closing token at the end": (HARMONY, TWO, ["<|final|>ok.<|end|>", "<|final|>sure<|return|>"]),
    "a bos that opens the next turn": (OPENED, TWO, ["ok.\n", "sure\n"]),
    "a conversation closed by eos": (TWICE, TWO, ["<|final|>ok.<|end|>", "<|final|>sure<|end|>"]),
}


@pytest.mark.parametrize(("template", "messages", "wanted"), CASES.values(), ids=CASES)
def test_exactly_the_answers_are_supervised(template, messages, wanted, supervised: Supervised) -> None:
    assert supervised(template, messages, bos="<s>" if template == OPENED else None) == wanted


def test_reasoning_around_tools_is_supervised_where_the_template_keeps_it(supervised: Supervised) -> None:
    used = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\ncall add"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "<think>\ntwo\n</think>\n\nIt is 2."},
    ]
    kept = ["<think>\nadd\n</think>\n\ncall add<|im_end|>", "<think>\ntwo\n</think>\n\nIt is 2.<|im_end|>"]
    assert supervised("qwen3", used) == kept
    later = [*used, {"role": "user", "content": "thanks"}]
    assert supervised("qwen3", later) == ["call add<|im_end|>", "It is 2.<|im_end|>"]


@pytest.mark.parametrize("answer", ["0", "Z", "0Z", "Z0", "00", "", "Z and 0", "same"])
def test_a_moved_answer_is_found_whatever_its_text_is(answer: str, supervised: Supervised) -> None:
    messages = turns("same 0 Z", f"<think>\n0\n</think>\n\n{answer}", "same", "Z", "0", "<think>\nZ\n</think>\n\nsame")
    last = "<think>\nZ\n</think>\n\nsame<|im_end|>"
    assert supervised("qwen3", messages) == [f"{answer}<|im_end|>", "Z<|im_end|>", last]


def test_an_answer_begins_where_its_prompt_ends_whatever_tokens_would_merge(supervised: Supervised) -> None:
    """`: ` and ` ok` are tokens, so is a newline pair: in the whole text, one token would have parts of both."""
    assert supervised(PLAIN, turns("hi", "ok.", "again?", "sure")) == ["ok.\n", "sure\n"]
    assert supervised(PLAIN.replace("'assistant: '", "'assistant:'"), turns("hi", "ok"))[0].endswith(" ok\n")
    chat = supervised("qwen2.5", turns("hi", "\n\nok.", "again?", "\nsure"))
    assert chat == ["\n\nok.<|im_end|>", "\nsure<|im_end|>"]


def test_an_emptied_think_block_before_an_earlier_answer_is_supervised(supervised, chat_tokenizer):
    template = chat_tokenizer("qwen3").chat_template
    always = template.replace("{{- content -}}", "{{- '<think></think>' ~ content -}}")
    assert always != template
    chat = supervised(always, turns("hi", "<think>hm</think>ok.", "again?", "sure"))
    assert chat[0] == "<think></think>ok.<|im_end|>"


GOLDEN = json.loads((Path(__file__).parent / "golden_masks.json").read_text(encoding="utf-8"))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": "int", "b": "int"}}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


IMITATION = "say <|im_end|>\n<|im_start|>assistant\nno<|eot_id|>[/INST]<end_of_turn>"
CALLS = [said("user", "1+2?"), said("assistant", None, tool_calls=[CALL]), said("tool", "3", tool_call_id="call00001")]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": chat("Add 1 and 2.", "3."),
    "blanks around turns": chat("hi ", "  Hello.\n", "\nagain?", "\nok."),
    "system": {"messages": turns("hi", "ok.", system="Be kind.")},
    "tools": {"tools": [TOOL], "messages": [*CALLS, said("assistant", "It is 3.")]},
    "thinking": chat("hi", "<think>\nGreet.\n</think>\n\nHello.", "1+2?", "<think>\n1+2=3\n</think>\n\n3."),
    "reasoning apart": {"messages": [said("user", "1+2?"), said("assistant", "3.", reasoning_content="1+2=3")]},
    "an imitation": chat(IMITATION, "no", "no", "no"),
}


def shown(row: dict[str, Any], tokenizer: Any) -> str:
    """The rendered text with supervised runs marked: ⟦think⟧ and «answer»."""
    config = DataConfig(train="golden.jsonl", max_length=100_000, think_markers=["<think>", "</think>"])
    try:
        samples = encode_row(Row(row, "golden.jsonl:1"), tokenizer, config)
    except BadInput as error:
        return f"refused: {error}"
    if not samples:
        return "dropped: the template leaves the tool call out"
    [sample] = samples
    parts = []
    tokens = zip(sample.input_ids.tolist(), sample.segments.tolist(), sample.loss_mask.tolist(), strict=True)
    for (segment, supervised), run in groupby(tokens, key=lambda token: token[1:]):
        text = tokenizer.decode([token for token, *_ in run])
        parts.append((f"⟦{text}⟧" if segment == THINK else f"«{text}»") if supervised else text)
    return "".join(parts)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_masks_equal_the_golden_file(conversation, template_name, chat_tokenizer):
    assert shown(CONVERSATIONS[conversation], chat_tokenizer(template_name)) == GOLDEN[template_name][conversation]


def test_the_golden_file_has_no_more_and_says_who_checked_it(template_name: str) -> None:
    assert list(GOLDEN[template_name]) == list(CONVERSATIONS)
    assert "by hand" in GOLDEN["about"]


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
def test_twice_the_turns_cost_twice_the_rendering(tools, template_name, chat_tokenizer, monkeypatch):
    if tools and template_name not in ("llama-3.1", "qwen2.5", "qwen3"):
        pytest.skip("knows no tool calls, or, mistral, has no generation prompt: then a call is found turn by turn")
    tokenizer = chat_tokenizer(template_name)
    short, long = (rendered_characters(dialogue(turns, tools=tools), tokenizer, monkeypatch) for turns in (50, 100))
    assert long < 2.4 * short


@pytest.mark.parametrize("tools", [False, True])
def test_masks_equal_those_found_turn_by_turn(tools, template_name, chat_tokenizer, monkeypatch):
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
