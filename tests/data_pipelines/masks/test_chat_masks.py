"""Exactly the assistant's tokens of a conversation are supervised, whatever its chat template does."""

from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest
from headstart.data_pipelines.config import DataConfig
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.sources import Row
from headstart.data_pipelines.storage.samples import Sample
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]"),
    *("<|user|>", "<|assistant|>", "<|end|>", "<|return|>", "<|final|>"),
]
MERGES = [("Ċ", "Ċ"), (".", "Ċ"), (":", "Ġ"), ("Ġ", "o"), ("o", "k"), ("Ġo", "k"), ("h", "i"), ("Ġ", "hi")]

# Real templates, cut down to what matters for the mask.
QWEN25 = """
{%- if tools %}<|im_start|>system
# Tools{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role != 'system' %}<|im_start|>system
You are Qwen.<|im_end|>
{% endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' and message.tool_calls %}
    {{- '<|im_start|>assistant' }}
    {%- if message.content %}{{ '\n' + message.content }}{% endif %}
    {%- for call in message.tool_calls %}
      {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Reasoning is kept only after the last user turn; the last answer always gets a think block.
QWEN3 = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- set content = message.content or '' %}
    {%- set reasoning = '' %}
    {%- if '</think>' in content %}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
      {{- '<think>\n' + reasoning + '\n</think>\n\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + GENERATION_PROMPT_END }}{% endif %}"""
QWEN3_HYBRID = QWEN3.replace("GENERATION_PROMPT_END", "''")
QWEN3_THINKING = QWEN3.replace("GENERATION_PROMPT_END", r"'<think>\n'")

LLAMA3 = """
{{- bos_token }}
{%- for message in messages %}
  {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

GEMMA = """
{{- bos_token }}
{%- for message in messages %}
  {%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
  {%- set role = 'model' if message.role == 'assistant' else message.role %}
  {{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# No generation prompt; the system prompt moves to the last message, and vanishes when an answer is the last.
MISTRAL = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{{- bos_token }}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {{- '[INST] ' + (system + '\n\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}
  {%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""

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


def make_tokenizer(template: str, *, bos: str | None = None, eos: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 256 bytes and a few merges, which reach across every boundary that is no special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=template)


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages that alternate between user and assistant."""
    chat = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *chat] if system is not None else chat


def encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Sample:
    [sample] = encode_row(Row(row, "train.jsonl:17"), tokenizer, DataConfig(train="train.jsonl", max_length=100_000))
    return sample


def supervised(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of each run of supervised tokens."""
    pairs = zip(sample.input_ids, sample.loss_mask, strict=True)
    runs = [[token for token, _ in run] for is_supervised, run in groupby(pairs, key=itemgetter(1)) if is_supervised]
    return [str(tokenizer.decode(run)) for run in runs]


def supervised_chat(template: str, messages: list[dict[str, Any]], **tokens: str) -> list[str]:
    """What is supervised, after checking that the ids are those of the whole conversation, behind the ids of the last
    prompt as the target is given it."""
    tokenizer = make_tokenizer(template, **tokens)
    sample = encode({"messages": messages}, tokenizer)
    if messages[-1]["role"] == "assistant":
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        whole = str(tokenizer.apply_chat_template(messages, tokenize=False))
        asked = str(tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False))
        assert sample.input_ids.tolist()[: len(prompt)] == prompt
        assert not whole.startswith(asked) or tokenizer.decode(sample.input_ids) == whole
    else:
        assert sample.input_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    return supervised(sample, tokenizer)


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_chatml_supervises_answers_and_their_end_of_turn(system: str | None) -> None:
    messages = turns("hi", "ok.", "again?", "sure\n", system=system)
    assert supervised_chat(QWEN25, messages) == ["ok.<|im_end|>", "sure\n<|im_end|>"]


def test_a_tool_call_is_supervised_and_its_result_is_not() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {
        "tools": '[{"type": "function", "function": {"name": "add"}}]',
        "messages": [
            {"role": "user", "content": "1+1?", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "It is 2.", "tool_calls": None},
            {"role": "user", "content": "thanks"},
        ],
    }
    tokenizer = make_tokenizer(QWEN25)
    sample = encode(row, tokenizer)
    assert supervised(sample, tokenizer) == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "It is 2.<|im_end|>",
    ]
    assert '# Tools {"type": "function"' in tokenizer.decode(sample.input_ids)


def test_llama3_supervises_answers_and_their_end_of_turn() -> None:
    messages = turns("hi", "ok.", "again?", "  sure  ", system="Be kind.")
    assert supervised_chat(LLAMA3, messages, bos="<|begin_of_text|>") == ["ok.<|eot_id|>", "sure<|eot_id|>"]


def test_gemma_supervises_model_turns() -> None:
    messages = turns("hi", "ok.", "again?", "sure")
    assert supervised_chat(GEMMA, messages, bos="<bos>") == ["ok.<end_of_turn>", "sure<end_of_turn>"]


def test_mistral_supervises_answers_although_the_system_prompt_moves() -> None:
    for system in (None, "Be kind."):
        chat = supervised_chat(MISTRAL, turns("hi", "ok.", "again?", "sure", system=system), bos="<s>", eos="</s>")
        assert chat == [" ok.</s>", " sure</s>"]


@pytest.mark.parametrize("template", [QWEN3_HYBRID, QWEN3_THINKING])
def test_earlier_answers_are_supervised_without_the_reasoning_that_the_template_drops(template: str) -> None:
    messages = turns("hi", "<think>\nhm\n</think>\n\nok.", "again?", "<think>\nso\n</think>\n\nsure")
    last = "<think>\nso\n</think>\n\nsure<|im_end|>"
    last = last.removeprefix("<think>\n") if template == QWEN3_THINKING else last
    assert supervised_chat(template, messages) == ["ok.<|im_end|>", last]


def test_the_think_block_that_the_template_adds_to_the_last_answer_is_supervised() -> None:
    messages = turns("hi", "ok.", "again?", "sure")
    assert supervised_chat(QWEN3_HYBRID, messages) == ["ok.<|im_end|>", "<think>\n\n</think>\n\nsure<|im_end|>"]


def test_reasoning_around_tools_is_supervised_where_the_template_keeps_it() -> None:
    used = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\ncall add"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "<think>\ntwo\n</think>\n\nIt is 2."},
    ]
    kept = ["<think>\nadd\n</think>\n\ncall add<|im_end|>", "<think>\ntwo\n</think>\n\nIt is 2.<|im_end|>"]
    assert supervised_chat(QWEN3_HYBRID, used) == kept
    later = [*used, {"role": "user", "content": "thanks"}]
    assert supervised_chat(QWEN3_HYBRID, later) == ["call add<|im_end|>", "It is 2.<|im_end|>"]


@pytest.mark.parametrize("answer", ["0", "Z", "0Z", "Z0", "00", "", "Z and 0", "same"])
def test_a_moved_answer_is_found_whatever_its_text_is(answer: str) -> None:
    messages = turns("same 0 Z", f"<think>\n0\n</think>\n\n{answer}", "same", "Z", "0", "<think>\nZ\n</think>\n\nsame")
    last = "<think>\nZ\n</think>\n\nsame<|im_end|>"
    assert supervised_chat(QWEN3_HYBRID, messages) == [f"{answer}<|im_end|>", "Z<|im_end|>", last]


@pytest.mark.parametrize("template", [QWEN25, LLAMA3, GLM])
def test_a_conversation_may_begin_with_the_assistant(template: str) -> None:
    messages = [{"role": "assistant", "content": "Welcome."}, *turns("hi", "ok.")]
    runs = supervised_chat(template, messages, bos="<|begin_of_text|>")
    assert [run.split("<|")[0] for run in runs] == ["Welcome.", "ok."]


def test_a_greeting_that_no_prompt_asks_for_is_supervised() -> None:
    messages = [{"role": "assistant", "content": "Welcome."}, {"role": "user", "content": "hi"}]
    assert supervised_chat(QWEN25, messages) == ["Welcome.<|im_end|>"]


def test_messages_after_the_last_answer_are_not_supervised() -> None:
    assert supervised_chat(QWEN25, turns("hi", "ok.", "and?")) == ["ok.<|im_end|>"]


def test_two_answers_in_a_row_are_both_supervised() -> None:
    messages = [*turns("hi", "ok."), {"role": "assistant", "content": "More."}]
    assert supervised_chat(QWEN25, messages) == ["ok.<|im_end|>", "More.<|im_end|>"]


def test_the_token_that_ends_an_answer_is_supervised_when_it_opens_the_next_turn() -> None:
    assert supervised_chat(GLM, turns("hi", "ok.", "again?", "sure")) == ["ok.<|user|>", "sure"]


def test_another_closing_token_at_the_end_does_not_hide_an_answer() -> None:
    assert supervised_chat(HARMONY, turns("hi", "ok.", "again?", "sure")) == [
        "<|final|>ok.<|end|>",
        "<|final|>sure<|return|>",
    ]


def test_the_mask_starts_at_or_before_an_answer_whose_tokens_merge_with_the_prompt() -> None:
    """`: ` and ` ok` are tokens, so is a newline pair: the first answer token holds a piece of the prompt."""
    assert supervised_chat(PLAIN, turns("hi", "ok.", "again?", "sure")) == ["ok.\n", "sure\n"]
    assert supervised_chat(PLAIN.replace("'assistant: '", "'assistant:'"), turns("hi", "ok"))[0].endswith(" ok\n")
    chat = supervised_chat(QWEN25, turns("hi", "\n\nok.", "again?", "\nsure"))
    assert chat == ["\n\n\nok.<|im_end|>", "\nsure<|im_end|>"]  # the last one behind its own prompt


def test_user_text_that_imitates_the_template_is_not_supervised() -> None:
    fake = "<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n<|im_start|>user\nok."
    assert supervised_chat(QWEN25, turns(fake, "ok.", fake, "sure")) == ["ok.<|im_end|>", "sure<|im_end|>"]


def test_a_bos_that_opens_the_next_turn_is_not_supervised() -> None:
    opened = PLAIN.replace("{{ message.role", "{{ (bos_token if message.role == 'user' else '') + message.role")
    assert supervised_chat(opened, turns("hi", "ok.", "again?", "sure"), bos="<s>") == ["ok.\n", "sure\n"]


def test_the_token_after_a_conversation_closed_by_eos_is_not_supervised() -> None:
    """Phi-3 closes the last turn twice; in between stands the opening of the next one."""
    twice = HARMONY.replace("'<|return|>' if loop.last and message.role == 'assistant' else '<|end|>'", "'<|end|>\\n'")
    chat = supervised_chat(
        twice + "{{ '' if add_generation_prompt else '</s>' }}", turns("hi", "ok.", "again?", "sure")
    )
    assert chat == ["<|final|>ok.<|end|>", "<|final|>sure<|end|>"]


def test_an_emptied_think_block_before_an_earlier_answer_is_supervised() -> None:
    always = QWEN3_HYBRID.replace("{{- content + '<|im_end|>", "{{- '<think></think>' + content + '<|im_end|>")
    chat = supervised_chat(always, turns("hi", "<think>hm</think>ok.", "again?", "sure"))
    assert chat[0] == "<think></think>ok.<|im_end|>"
