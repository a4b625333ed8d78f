"""Exactly the assistant's tokens of a conversation are supervised, whatever its chat template does.

What real templates do with plain conversations, tools, traces and imitations is in test_chat_golden.py.
"""

from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest
from chats import turns
from headstart.data_pipelines.config import DataConfig
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.sources import Row

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


@pytest.fixture
def supervised(chat_tokenizer: Callable[[str], Any]) -> Supervised:
    """supervised(template, messages, bos=None): the text of each run of supervised tokens, after checking that the ids
    are those of the whole conversation, behind the ids of the last prompt as the target is given it.

    Args: template: a name in templates/, or a template.
    """

    def find(template: str, messages: list[dict[str, Any]], *, bos: str | None = None) -> list[str]:
        tokenizer = chat_tokenizer("chatml" if "{" in template else template)
        if "{" in template:
            tokenizer.add_tokens(SPECIAL, special_tokens=True)
            tokenizer.chat_template, tokenizer.bos_token = template, bos
        config = DataConfig(train="train.jsonl", max_length=100_000)
        [sample] = encode_row(Row({"messages": messages}, "train.jsonl:17"), tokenizer, config)
        if messages[-1]["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
            whole = str(tokenizer.apply_chat_template(messages, tokenize=False))
            asked = str(tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False))
            assert sample.input_ids.tolist()[: len(prompt)] == prompt
            assert not whole.startswith(asked) or tokenizer.decode(sample.input_ids) == whole
        else:
            assert sample.input_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
        pairs = zip(sample.input_ids, sample.loss_mask, strict=True)
        runs = [
            [token for token, _ in run] for is_supervised, run in groupby(pairs, key=itemgetter(1)) if is_supervised
        ]
        return [str(tokenizer.decode(run)) for run in runs]

    return find


def test_mistral_supervises_answers_although_the_system_prompt_moves(supervised: Supervised) -> None:
    messages = turns("hi", "ok.", "again?", "sure", system="Be kind.")
    assert supervised("mistral", messages) == ["ok.</s>", "sure</s>"]


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


@pytest.mark.parametrize("template", ["qwen2.5", "llama-3.1", GLM])
def test_a_conversation_may_begin_with_the_assistant(template: str, supervised: Supervised) -> None:
    messages = [{"role": "assistant", "content": "Welcome."}, *turns("hi", "ok.")]
    runs = supervised(template, messages)
    assert [run.split("<|")[0] for run in runs] == ["Welcome.", "ok."]


def test_a_greeting_that_no_prompt_asks_for_is_supervised(supervised: Supervised) -> None:
    messages = [{"role": "assistant", "content": "Welcome."}, {"role": "user", "content": "hi"}]
    assert supervised("qwen2.5", messages) == ["Welcome.<|im_end|>"]


def test_messages_after_the_last_answer_are_not_supervised(supervised: Supervised) -> None:
    assert supervised("qwen2.5", turns("hi", "ok.", "and?")) == ["ok.<|im_end|>"]


def test_two_answers_in_a_row_are_both_supervised(supervised: Supervised) -> None:
    messages = [*turns("hi", "ok."), {"role": "assistant", "content": "More."}]
    assert supervised("qwen2.5", messages) == ["ok.<|im_end|>", "More.<|im_end|>"]


def test_the_token_that_ends_an_answer_is_supervised_when_it_opens_the_next_turn(supervised: Supervised) -> None:
    assert supervised(GLM, turns("hi", "ok.", "again?", "sure")) == ["ok.<|user|>", "sure"]


def test_another_closing_token_at_the_end_does_not_hide_an_answer(supervised: Supervised) -> None:
    assert supervised(HARMONY, turns("hi", "ok.", "again?", "sure")) == [
        "<|final|>ok.<|end|>",
        "<|final|>sure<|return|>",
    ]


def test_the_mask_starts_at_or_before_an_answer_whose_tokens_merge_with_the_prompt(supervised: Supervised) -> None:
    """`: ` and ` ok` are tokens, so is a newline pair: the first answer token holds a piece of the prompt."""
    assert supervised(PLAIN, turns("hi", "ok.", "again?", "sure")) == ["ok.\n", "sure\n"]
    assert supervised(PLAIN.replace("'assistant: '", "'assistant:'"), turns("hi", "ok"))[0].endswith(" ok\n")
    chat = supervised("qwen2.5", turns("hi", "\n\nok.", "again?", "\nsure"))
    assert chat == ["\n\n\nok.<|im_end|>", "\nsure<|im_end|>"]  # the last one behind its own prompt


def test_a_bos_that_opens_the_next_turn_is_not_supervised(supervised: Supervised) -> None:
    opened = PLAIN.replace("{{ message.role", "{{ (bos_token if message.role == 'user' else '') + message.role")
    assert supervised(opened, turns("hi", "ok.", "again?", "sure"), bos="<s>") == ["ok.\n", "sure\n"]


def test_the_token_after_a_conversation_closed_by_eos_is_not_supervised(supervised: Supervised) -> None:
    """Phi-3 closes the last turn twice; in between stands the opening of the next one."""
    twice = HARMONY.replace("'<|return|>' if loop.last and message.role == 'assistant' else '<|end|>'", "'<|end|>\\n'")
    chat = supervised(twice + "{{ '' if add_generation_prompt else '</s>' }}", turns("hi", "ok.", "again?", "sure"))
    assert chat == ["<|final|>ok.<|end|>", "<|final|>sure<|end|>"]


def test_an_emptied_think_block_before_an_earlier_answer_is_supervised(
    supervised: Supervised, chat_tokenizer: Callable[[str], Any]
) -> None:
    template = chat_tokenizer("qwen3").chat_template
    always = template.replace("{{- content -}}", "{{- '<think></think>' ~ content -}}")
    assert always != template
    chat = supervised(always, turns("hi", "<think>hm</think>ok.", "again?", "sure"))
    assert chat[0] == "<think></think>ok.<|im_end|>"
