"""Every row shape becomes tokens and a mask by its own rule, and every fault of a row is named by its origin."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest
from chats import turns
from headstart.base.errors import BadInput
from headstart.data_pipelines.masks.chat import encode_row, encode_rows
from headstart.data_pipelines.prepare import PrepareConfig, prepare
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.rows.samples import Sample
from headstart.data_pipelines.rows.sources import Row
from headstart.targets.chat.written_ids import WROTE
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = """
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
GENERATION = """
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\n' }}
  {%- if message.role == 'assistant' %}{% generation %}BLOCK{% endgeneration %}AFTER{% else %}
    {{- message.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CALLS = "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"


def make_tokenizer(template: str | None, *, bos: str | None = None, eos: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, four special tokens; a bos is set before every plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token) for token in ("<|im_start|>", "<|im_end|>", "<s>", "</s>")])
    if bos is not None:
        bos_id = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=template, name_or_path="tiny/target"
    )


def nested(depth: int) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    inner = whole
    for _ in range(depth):
        inner["a"] = {}
        inner = inner["a"]
    return whole


def config(**options: Any) -> DataConfig:
    return DataConfig(train="train.jsonl", **options)


def encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Sample:
    [sample] = encode_row(Row(row, "train.jsonl:17"), tokenizer, config(max_length=100_000))
    return sample


def supervised(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of each run of supervised tokens."""
    pairs = zip(sample.input_ids, sample.loss_mask, strict=True)
    runs = [[token for token, _ in run] for is_supervised, run in groupby(pairs, key=itemgetter(1)) if is_supervised]
    return [str(tokenizer.decode(run)) for run in runs]


def problem(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> str:
    with pytest.raises(BadInput) as caught:
        encode(row, tokenizer)
    assert str(caught.value).startswith("train.jsonl:17: ")
    return str(caught.value).removeprefix("train.jsonl:17: ")


def test_sharegpt_turns_are_supervised_like_openai_messages() -> None:
    tokenizer = make_tokenizer(CHATML)
    speakers = ("system", "human", "gpt", "tool", "gpt")
    texts = ("Be kind.", "hi", "ok.", "2", "sure")
    theirs = [{"from": speaker, "value": text} for speaker, text in zip(speakers, texts, strict=True)]
    parts = [{"type": "text", "text": part} for part in ("su", "re")]
    roles = ("system", "user", "assistant", "tool", "assistant")
    ours = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    sample = encode({"conversations": theirs}, tokenizer)
    assert sample == encode({"messages": ours}, tokenizer) == encode({"conversations": ours}, tokenizer)
    in_parts = [*ours[:-1], {"role": "assistant", "content": parts}]
    assert sample == encode({"messages": in_parts}, tokenizer)
    assert supervised(sample, tokenizer) == ["ok.<|im_end|>", "sure<|im_end|>"]


PLAIN = [  # without and with tokens that begin and end a text
    ({"prompt": "Say: ", "response": "ok."}, True, "<s>Say: «ok.</s>»"),
    ({"prompt": "Say: ", "completion": "ok."}, True, "<s>Say: «ok.</s>»"),
    ({"prompt": "Say: ", "response": "o", "truncated": True}, True, "<s>Say: «o»"),
    ({"prompt": "Say: ", "response": "o", "finish_reason": "length"}, True, "<s>Say: «o»"),
    ({"prompt": "hi", "response": "ok."}, False, "hi«ok.»"),
    ({"instruction": "Add.", "input": "1 2", "output": "3"}, True, "<s>Add.\n\n1 2\n\n«3</s>»"),
    ({"instruction": "Add.", "input": "", "response": "3"}, True, "<s>Add.\n\n«3</s>»"),
    ({"instruction": "Add.", "input": None, "output": "3"}, True, "<s>Add.\n\n«3</s>»"),
    ({"text": "hi ok"}, True, "<s>«hi ok»"),
    ({"text": "hi ok"}, False, "«hi ok»"),
]


@pytest.mark.parametrize(("row", "is_framed", "wanted"), PLAIN)
def test_of_plain_rows_the_answer_is_supervised_behind_the_ids_of_its_prompt(row, is_framed, wanted) -> None:
    tokenizer = make_tokenizer(None, bos="<s>", eos="</s>") if is_framed else make_tokenizer(None)
    sample = encode(row, tokenizer)
    [learnt] = supervised(sample, tokenizer)
    assert f"{tokenizer.decode(sample.input_ids[: sample.loss_mask.argmax()])}«{learnt}»" == wanted
    if "prompt" in row:
        assert sample.input_ids[: sample.loss_mask.argmax()].tolist() == tokenizer(row["prompt"])["input_ids"]


def test_ready_tokens_are_supervised_after_the_prompt() -> None:
    sample = encode({"input_ids": [5, 6, 7, 8], "prompt_length": 3, "text": "ignored"}, make_tokenizer(None))
    assert sample == Sample.of([5, 6, 7, 8], [False, False, False, True])


def test_ready_tokens_may_be_rows_of_the_targets_table_that_the_tokenizer_lacks() -> None:
    """Tables are padded, and some targets write such tokens."""
    tokenizer = make_tokenizer(None)
    row = Row({"input_ids": [5, len(tokenizer) + 3], "prompt_length": 1}, "train.jsonl:1")
    assert len(encode_row(row, tokenizer, config(), len(tokenizer) + 4)) == 1
    with pytest.raises(BadInput, match="outside the vocabulary"):
        encode_row(row, tokenizer, config(), len(tokenizer) + 3)


@pytest.mark.parametrize(
    ("block", "after"),
    [
        ("{{ message.content + '<|im_end|>' }}", "{{ '\n' }}"),
        ("{{ message.content + '<|im_end|>\n' }}", ""),
        ("{{ message.content }}", "{{ '<|im_end|>\n' }}"),
    ],
)
def test_generation_blocks_decide_and_end_with_the_end_of_turn(block: str, after: str) -> None:
    template = GENERATION.replace("BLOCK", block).replace("AFTER", after)
    tokenizer = make_tokenizer(template)
    messages = turns("hi", "ok.", "again?", "sure", system="Be kind.")
    assert supervised(encode({"messages": messages}, tokenizer), tokenizer) == ["ok.<|im_end|>", "sure<|im_end|>"]


def test_generation_blocks_may_leave_out_a_part_of_the_answer() -> None:
    template = GENERATION.replace("{% generation %}BLOCK", "so: {% generation %}{{ message.content }}")
    tokenizer = make_tokenizer(template.replace("AFTER", "{{ '\n<|im_end|>\n' }}"))
    sample = encode({"messages": turns("hi", "ok", "again?", "sure")}, tokenizer)
    assert supervised(sample, tokenizer) == ["ok\n<|im_end|>", "sure\n<|im_end|>"]


def test_answers_are_not_counted_where_generation_blocks_leave_one_out() -> None:
    """A call stands outside the block, so the first marked answer is the second one."""
    template = GENERATION.replace("{% generation %}", CALLS + "{% if message.content %}{% generation %}")
    template = template.replace("BLOCK", "{{ message.content }}").replace("AFTER", "{% endif %}{{ '<|im_end|>\n' }}")
    tokenizer = make_tokenizer(template)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    messages = [*turns("hi"), call, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."}]
    assert problem({"messages": messages, WROTE: [0]}, tokenizer).startswith("`written_answers` counts 2 answers")
    answered = {"messages": turns("hi", "ok", "again?", "sure"), WROTE: [1]}
    assert supervised(encode(answered, tokenizer), tokenizer) == ["sure<|im_end|>"]


# Length


def ready(length: int, prompt_length: int) -> Row:
    """Ready tokens 1, 2, ..."""
    return Row({"input_ids": list(range(1, length + 1)), "prompt_length": prompt_length}, "a.jsonl:1")


def test_long_rows_are_cut_on_the_right_and_counted() -> None:
    counts: Counter[str] = Counter()
    rows = [ready(3, 1), ready(5, 2), ready(5, 3)]
    samples = list(encode_rows(rows, make_tokenizer(None), config(max_length=3), counts=counts))
    assert +counts == {"kept": 2, "cut": 1, "dropped": 1}
    assert samples == [Sample.of([1, 2, 3], [False, True, True]), Sample.of([1, 2, 3], [False, False, True], num_cut=2)]


def test_long_rows_are_dropped_or_split_where_that_is_asked_for() -> None:
    rows, counts = [ready(3, 1), ready(9, 2)], Counter[str]()
    dropping = config(max_length=3, too_long="drop")
    assert [len(sample) for sample in encode_rows(rows, make_tokenizer(None), dropping, counts=counts)] == [3]
    assert +counts == {"kept": 1, "dropped": 1}
    splitting, counts = config(max_length=4, too_long="split"), Counter[str]()
    samples = list(encode_rows(rows, make_tokenizer(None), splitting, counts=counts))
    assert +counts == {"kept": 2, "split": 1} and len(samples) > 2
    new = [token for sample in samples[1:] for token in sample.input_ids[sample.loss_mask].tolist()]
    assert new == [3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({"max_length": 13}, {"kept": 1}),
        ({"max_length": 11}, {"kept": 1, "cut": 1}),
        ({"max_length": 9}, {"kept": 1, "cut": 1}),  # its second sequence has nothing to learn
        ({"max_length": 9, "too_long": "drop"}, {"kept": 1, "cut": 1}),
        ({"max_length": 9, "too_long": "split"}, {"kept": 1, "split": 1}),
        ({"max_length": 13, "too_long": "split"}, {"kept": 1}),
    ],
    ids=str,
)
def test_of_a_row_of_several_sequences_what_is_left_out_is_counted(how, wanted) -> None:
    tokenizer, counts = make_tokenizer(CHATML), Counter[str]()
    first, second = (tokenizer(text).input_ids for text in ("hiok", "hi again?sure"))
    sequences = [{"input_ids": first, "turns": [[1, 2, 4]]}, {"input_ids": second, "turns": [[3, 9, 13]]}]
    row = {"messages": turns("hi", "ok", "again?", "sure"), "written_ids": {"sequences": sequences}}
    assert list(encode_rows([Row(row, "a:1")], tokenizer, config(**how), counts=counts))
    assert +counts == wanted


def test_rows_are_encoded_one_at_a_time() -> None:
    def endless() -> Iterator[Row]:
        while True:
            yield ready(3, 1)

    assert len(next(encode_rows(endless(), make_tokenizer(None), config(), counts=Counter()))) == 3


# Errors


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, -1], "prompt_length": 0}, "input_ids[1] is -1, outside the vocabulary of 260"),
        ({"input_ids": [260], "prompt_length": 0}, "input_ids[0] is 260, outside the vocabulary of 260"),
        ({"input_ids": [1, True], "prompt_length": 0}, "`input_ids` should be a list of whole numbers"),
        ({"input_ids": "1 2", "prompt_length": 0}, "`input_ids` should be a list of whole numbers"),
        ({"input_ids": [1, 2], "prompt_length": 3}, "`prompt_length` should be between 0 and 2, got 3"),
        ({"input_ids": [1, 2], "prompt_length": "1"}, "`prompt_length` should be between 0 and 2, got '1'"),
        ({"input_ids": [104, 105], "prompt_length": 2}, "no token is supervised in "),
        ({"messages": []}, "a chat should be a list of turns with at least one"),
        ({"messages": "hi"}, "a chat should be a list of turns with at least one"),
        ({"messages": ["hi"]}, "turn 0 should be an object, got str"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "turn 0 has the role 'narrator'; known are user, human"),
        ({"conversations": [{"value": "x"}]}, "turn 0 has the role 'None'; known are user, human"),
        ({"messages": [*turns("hi"), {"role": "assistant"}]}, "turn 1 (assistant) has no text as its content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "turn 0 has content that is not text: "),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a picture is given in no known form: "),
        ({"messages": turns("hi there")}, "no token is supervised in '<|im_start|>user hi there<|im_end|>"),
        ({"messages": turns("hi", "ok"), "tools": "[{"}, "`tools` is text, but not JSON: Expecting"),
        ({"prompt": 3, "completion": "ok"}, "prompt and response should be text; give a chat as `messages`"),
        ({"instruction": 3, "output": "ok"}, "`instruction` and `input` should be text"),
        ({"text": ["a"]}, "`text` should be text, got list"),
        ({"query": "a", "answer": "b"}, "unknown row shape with keys query, answer; known are `messages`"),
        ({"prompt": "a", "response": None}, "a prompt without an answer to train on; `headstart data regenerate`"),
        ({"instruction": "a"}, "a prompt without an answer to train on; `headstart data regenerate`"),
        ({}, "unknown row shape with keys (none); known are `messages`"),
    ],
)
def test_a_bad_row_is_named_by_origin_and_fault(row: dict[str, Any], message: str) -> None:
    assert problem(row, make_tokenizer(CHATML)).startswith(message)


def test_a_question_with_its_answer_is_a_prompt_with_its_response() -> None:
    tokenizer, row = make_tokenizer(CHATML), {"question": "1 + 2?", "answer": "3"}
    assert encode(row, tokenizer) == encode({"prompt": "1 + 2?", "response": "3"}, tokenizer)
    assert "`columns`" in problem({"query": "a", "answer": "b"}, tokenizer), "what to do about other keys"
    both = {**row, "text": "of another shape"}
    assert encode(both, tokenizer) == encode({"text": "of another shape"}, tokenizer)


def test_a_chat_whose_tool_calls_the_template_leaves_out_is_dropped_and_counted() -> None:
    """It would teach an empty answer. The result of the call, and what the assistant says of it, go with it."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    said = [turn, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."}]
    chats = [{"messages": [*turns("1 + 2?"), *said]}, {"messages": turns("hi", "ok")}]
    counts: Counter[str] = Counter()
    rows = [Row(chat, "x:1") for chat in chats]
    assert len(list(encode_rows(rows, make_tokenizer(CHATML), config(), counts=counts))) == 1
    assert counts["dropped"] == 1 and counts["kept"] == 1
    shown = make_tokenizer(CHATML.replace("+ message.content +", "+ message.content }}" + CALLS + "{{"))
    assert any("add" in text for text in supervised(encode(chats[0], shown), shown)), "where it shows, it is learned"
    of_two = CALLS.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
    first = make_tokenizer(CHATML.replace("+ message.content +", "+ message.content }}" + of_two + "{{"))
    turn["tool_calls"] = [call, call]
    assert encode_row(rows[0], first, config()) == [], "the second call is left out"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"text": "half \ud800"}, "half of a character, a lone surrogate"),
        ({"prompt": "\udc00", "response": "ok"}, "half of a character, a lone surrogate"),
        ({"messages": turns("hi", "half \ud800")}, "half of a character, a lone surrogate"),
        ({"messages": turns("hi", "ok"), "tools": [nested(3000)]}, "nested too deeply"),
    ],
)
def test_what_no_text_can_hold_is_named(row: dict[str, Any], fault: str) -> None:
    template = CHATML + "{{ tools | tojson if tools }}"
    assert problem(row, make_tokenizer(template)).startswith(fault)


@pytest.mark.slow
def test_several_processes_encode_the_same_samples_in_order() -> None:
    tokenizer = make_tokenizer(None, bos="<s>", eos="</s>")
    rows = [Row({"prompt": f"Say {i}: ", "response": f"ok {i}."}, f"a.jsonl:{i}") for i in range(600)]
    alone, together = Counter(), Counter()
    expected = list(encode_rows(rows, tokenizer, config(), counts=alone))
    how = config(num_workers=2)
    assert list(encode_rows(rows, tokenizer, how, counts=together)) == expected and together == alone
    rows[300] = Row({"input_ids": [-1], "prompt_length": 0}, "a.jsonl:300")
    with pytest.raises(BadInput, match=r"^a.jsonl:300: input_ids\[0\] is -1"):
        list(encode_rows(rows, tokenizer, how, counts=Counter()))


def test_an_answer_that_was_cut_off_does_not_teach_to_end_there() -> None:
    tokenizer = make_tokenizer(CHATML)
    rows = [{"messages": turns("hi", "ok", "again?", "I thi"), "truncated": truncated} for truncated in (True, False)]
    assert supervised(encode(rows[0], tokenizer), tokenizer) == ["ok<|im_end|>", "I thi"]
    assert supervised(encode(rows[1], tokenizer), tokenizer) == ["ok<|im_end|>", "I thi<|im_end|>"]


def test_an_answer_that_was_cut_in_its_trace_does_not_teach_to_close_it(chat_tokenizer) -> None:
    tokenizer = chat_tokenizer("qwen3")
    answer = {"role": "assistant", "content": "", "reasoning_content": "Let me"}
    row = {"messages": [{"role": "user", "content": "hi"}, answer]}
    [cut], [whole] = (supervised(encode({**row, **more}, tokenizer), tokenizer) for more in ({"truncated": True}, {}))
    assert cut.endswith("Let me") and "</think>" in whole


GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok."}]}
REFUSED = {"messages": [{"role": "system", "content": "Be kind."}, *GOOD["messages"]]}  # by gemma-2's template
BAD = [
    (REFUSED, "refused by the chat template"),
    ({"messages": [{"role": "narrator", "content": "hi"}]}, "malformed"),
    ({"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "ok"}]}, "malformed"),
    ({"messages": [{"role": "user", "content": "hi"}]}, "malformed"),  # no answer
    ({**GOOD, "tools": "{"}, "malformed"),
    ({**GOOD, "chat_template_kwargs": {"tokenize": False}}, "malformed"),
]


def encoded(rows: list[dict[str, Any]], tokenizer: Any) -> tuple[int, Counter[str], list[str]]:
    counts, problems = Counter[str](), list[str]()
    named = (Row(row, f"a.jsonl:{line}") for line, row in enumerate(rows, start=1))
    samples = encode_rows(named, tokenizer, DataConfig(train="a.jsonl"), counts=counts, problems=problems)
    return len(list(samples)), counts, problems


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_one_bad_row_is_left_out_counted_by_reason_and_named(bad, reason, chat_tokenizer):
    num, counts, [problem] = encoded([GOOD, bad, GOOD], chat_tokenizer("gemma-2"))
    assert num == 2 and counts == Counter({"kept": 2, "dropped": 1, reason: 1, "cut": 0, "split": 0})
    assert problem.startswith("a.jsonl:2: ")


def test_if_most_rows_are_refused_the_first_is_named(chat_tokenizer):
    tokenizer = chat_tokenizer("gemma-2")
    assert encoded([GOOD, REFUSED], tokenizer)[0] == 1
    with pytest.raises(BadInput, match=r"^a.jsonl:2: the chat template refuses this row: System role.* \(2 of 3"):
        encoded([GOOD, REFUSED, REFUSED], tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match="^a.jsonl:1: tokenizer of .* has no chat template; give plain"):
        encoded([GOOD, GOOD], tokenizer)


def test_ids_of_another_target_are_refused_at_once(chat_tokenizer):
    with pytest.raises(BadInput, match=r"^a.jsonl:2: input_ids\[1\] is 99999, outside the vocabulary"):
        encoded([GOOD, {"input_ids": [1, 99999], "prompt_length": 1}, GOOD], chat_tokenizer("gemma-2"))


def test_prepare_drops_what_the_template_of_its_tokenizer_refuses(chat_tokenizer, tmp_path):
    def lines(path, rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    chat_tokenizer("gemma-2").save_pretrained(tmp_path / "tokenizer")
    asked = [{"messages": [{"role": "user", "content": f"hi {i}"}, GOOD["messages"][1]]} for i in range(4)]
    rows = lines(tmp_path / "rows.jsonl", [*asked[:2], REFUSED, *asked[2:]])
    settings = {"sources": str(rows), "validation_share": 0, "tokenizer": str(tmp_path / "tokenizer")}
    card = prepare(PrepareConfig(output=str(tmp_path / "out"), **settings))
    assert card.kept == 4 and card.dropped == {"refused_by_template": 1}
    assert card.examples["refused_by_template"][0].startswith(f"{rows}:3: ")
    most = lines(tmp_path / "most.jsonl", [*asked[:1], REFUSED, REFUSED])
    with pytest.raises(BadInput, match=r"most.jsonl:2: .*\(2 of 3 rows are refused\)$"):
        prepare(PrepareConfig(output=str(tmp_path / "most"), **{**settings, "sources": str(most)}))
