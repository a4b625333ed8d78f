"""The ids that a target wrote are the data: rows carry them, every command keeps them, and training learns them."""

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from chats import turns as chat_turns
from headstart.base.errors import BadInput
from headstart.data_pipelines.answers.client import answer_of
from headstart.data_pipelines.answers.conversations import Answer, ChatRequest, Failure, SamplingConfig, exchanges
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.masks.retokenised import line_on_sources, share_retokenised
from headstart.data_pipelines.prepare import PrepareConfig, prepare
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.rows.filters import FilterConfig
from headstart.data_pipelines.rows.samples import FROM_ROW, NOT_ITS_IDS
from headstart.data_pipelines.rows.sources import Row, iter_rows
from headstart.data_pipelines.rows.traffic import read_traffic
from headstart.eval.drafters.answers import load_answers
from headstart.scripts.data.engine_answers import EngineAnswers
from headstart.scripts.unattended.answers import answer_ids_of
from headstart.targets.target import Target

CONFIG = DataConfig(train="", max_length=512)
SAMPLING = SamplingConfig(temperature=1.0, max_tokens=24)
TOOL = "<|tool_call|>"
READS_CALLS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call|>{{ c.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def make(tiny_model, chat_tokenizer):
    """make(template=None, more=0): a target that writes single bytes, seldom as its tokenizer would split them; its
    table has `more` rows than the tokenizer."""

    def build(template=None, *, name="chatml", more=0):
        tokenizer = chat_tokenizer(name)
        tokenizer.add_special_tokens({"extra_special_tokens": [TOOL]})
        tokenizer.chat_template = template or tokenizer.chat_template
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        model = tiny_model("llama", vocab_size=len(tokenizer) + more, max_position_embeddings=1024, eos_token_id=end)
        target = Target.of(model, name="tiny", fingerprint=f"{name}, {more} more")
        target._tokenizer = tokenizer
        return target

    return build


@pytest.fixture(scope="module")
def target(make):
    return make()


def answered(target, questions=("hi", "ok.\n\nhi"), *, engine=None, turns=1, number=8):
    """Rows as regeneration writes them, and by row the (prompt, new ids) of each turn as the engine decoded them."""
    engine = engine or EngineAnswers(target)
    rows, wrote = [], []
    for i in range(number):
        asked = {"turns": [questions[i % len(questions)]] * turns}
        sampling = replace(SAMPLING, seed=i)
        for exchange in exchanges(Row(asked, f"p:{i}"), sampling, turns="all"):
            talk, decoded = exchange.talk(), []
            request = next(talk)
            try:
                while True:
                    [answer] = engine([request])
                    assert isinstance(answer, Answer) and answer.ids is not None
                    decoded.append((engine.prompt(request), answer.ids.new))
                    request = talk.send(replace(answer, finish_reason="stop"))  # as if none was cut
            except StopIteration as end:
                rows.append(end.value)
                wrote.append(decoded)
    return rows, wrote


@pytest.fixture(scope="module")
def sampled(target):
    """8 such rows, of one turn each."""
    return answered(target)


def told(talk, answer):
    """The row of a conversation whose last answer this is."""
    with pytest.raises(StopIteration) as ended:
        talk.send(answer)
    return ended.value.value


def encoded(row, target, config=CONFIG):
    return encode_row(Row(row, "a.jsonl:1"), target.tokenizer, config, target.vocab_size)


def learnt(samples):
    """The supervised runs of samples, each with all ids before it."""
    found = []
    for sample in samples:
        ids, mask = sample.input_ids.tolist(), [False, *sample.loss_mask.tolist(), False]
        starts = [i for i in range(len(ids)) if mask[i + 1] and not mask[i]]
        ends = [i + 1 for i in range(len(ids)) if mask[i + 1] and not mask[i + 2]]
        found += [(ids[:start], ids[start:end]) for start, end in zip(starts, ends, strict=True)]
    return found


def test_training_learns_the_ids_that_the_target_wrote(target, sampled):
    rows, wrote = sampled
    assert [learnt(encoded(row, target)) for row in rows] == wrote
    texts = [encoded({**row, "written_ids": None}, target) for row in rows]
    again = [sample.input_ids.tolist() for samples in texts for sample in samples]
    assert sum(ids[: len(p) + len(n)] != [*p, *n] for ids, [(p, n)] in zip(again, wrote, strict=True)) > 4


def test_each_answer_is_learnt_behind_the_prompt_that_it_answers(target):
    """Also where the template renders earlier answers as other ids than the target wrote."""
    rows, wrote = answered(target, turns=3, number=4)
    assert [learnt(encoded(row, target)) for row in rows] == wrote
    assert max(len(encoded(row, target)) for row in rows) == 3
    last = replace(CONFIG, turns="last")
    assert [learnt(encoded(row, target, last)) for row in rows] == [turns[-1:] for turns in wrote]


def test_turns_that_follow_each_other_are_one_sequence(make, monkeypatch):
    target = make(READS_CALLS.replace("\n", ""))
    end, *letters = target.tokenizer.convert_tokens_to_ids(["<|im_end|>", "o", "x"])  # which are tokenised as they are
    decoded = type("Decoded", (), {"token_ids": [[*letters, end]]})
    monkeypatch.setattr("headstart.scripts.data.engine_answers.generate", lambda *_, **__: decoded)
    [row], [turns] = answered(target, turns=2, number=1)
    [sequence] = row["written_ids"]["sequences"]
    assert [index for index, *_ in sequence["turns"]] == [1, 3]
    [sample] = encoded(row, target)
    assert learnt([sample]) == turns and sample.source == FROM_ROW


def test_of_text_alone_only_the_answers_that_the_target_wrote_are_learnt(target, tmp_path):
    """Through every command. The row's own answer is what its chat had; the server gave no ids."""
    asked = {"messages": chat_turns("hi", "Hello!", "hi", "?"), "system": "Be kind."}
    [exchange] = exchanges(Row(asked, "p:1"), SAMPLING, turns="last")
    next(talk := exchange.talk())
    row = told(talk, Answer({"role": "assistant", "content": "ok."}, "stop"))
    (path := tmp_path / "answers.jsonl").write_text(json.dumps(row) + "\n")
    prepare(PrepareConfig(sources=str(path), output=str(tmp_path / "out"), validation_share=0))
    [prepared], [served] = iter_rows(str(tmp_path / "out" / "train.jsonl")), read_traffic(str(path)).rows
    for kept in (row, prepared.data, served.row):
        [(_, new)] = learnt(encoded(kept, target))
        assert target.tokenizer.decode(new) == "ok.<|im_end|>"


def test_a_row_keeps_its_ids_through_every_command(target, sampled, tmp_path):
    rows, wrote = sampled
    folder, path = tmp_path / "out", tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    filters = FilterConfig(max_bad_characters=None, min_characters=None, drop_empty=False)
    sources: list[str | dict[str, Any]] = [{"source": str(path), "weight": 1.0}]
    prepare(PrepareConfig(sources=sources, output=str(folder), validation_share=0.3, filters=filters))
    prepared = [row.data for split in ("train", "validation") for row in iter_rows(str(folder / f"{split}.jsonl"))]
    served = [each.row for each in read_traffic(str(path)).rows]
    for kept in (prepared, served):
        found = {json.dumps(learnt(encoded(row, target))) for row in kept}
        assert found == set(map(json.dumps, wrote))
    looked_up = load_answers(path, target.tokenizer, vocab_size=target.vocab_size).rows
    assert looked_up == [turns[-1] for turns in wrote]
    assert [answer_ids_of(row, target.tokenizer) for row in rows] == [[new for _, new in turns] for turns in wrote]


def test_ids_of_another_tokenizer_template_or_text_are_not_used_and_that_is_said(target, sampled, make):
    [row, *_], _ = sampled
    changed = json.loads(json.dumps(row))
    changed["messages"][-1]["content"] = "ok."
    redacted = json.loads(json.dumps(row))
    redacted["messages"][0]["content"] = "somebody"
    other_template = make("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    other_tokenizer = make(name="qwen3")
    for data, reader in ((changed, target), (redacted, target), (row, other_template), (row, other_tokenizer)):
        plain = {**data, "written_ids": None}
        samples = encoded(data, reader)
        assert samples == encoded(plain, reader) and {s.source for s in samples} <= {NOT_ITS_IDS}
    assert encoded(row, target)[0].source == FROM_ROW
    line = line_on_sources(Counter({FROM_ROW: 3, NOT_ITS_IDS: 2}), [], target.tokenizer, CONFIG, vocab_size=999)
    assert line.startswith("of 5 samples 2 have `written_ids` of another tokenizer, template or text")


def test_the_share_of_rows_that_differ_is_measured_or_said_to_be_unknown(target, sampled):
    rows, _ = sampled
    told = share_retokenised([Row(row, "a") for row in rows], target.tokenizer, CONFIG, vocab_size=target.vocab_size)
    found = re.match(r"of 8 rows with ids, (\d) \(", told)
    assert found and 4 < int(found[1]) <= 8
    assert "not known" in share_retokenised([], target.tokenizer, CONFIG, vocab_size=target.vocab_size)


@pytest.mark.parametrize(
    "entry", [3, {"sequences": 3}, {"sequences": [{"input_ids": [1, "2"], "turns": [[1, 0, 2]]}]}, {"sequences": [{}]}]
)
def test_malformed_ids_are_one_line(entry, target):
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]}
    with pytest.raises(BadInput, match="a.jsonl:1: `written_ids` has another shape"):
        encoded({**row, "written_ids": entry}, target)


@pytest.mark.parametrize("key", ["token_ids", "response_token_ids"])
def test_ids_of_a_server_are_kept_and_used_if_they_say_what_the_text_says(key, target):
    """vLLM and SGLang return them where `return_token_ids` asks for it, the end token included."""
    tokenizer = target.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    new = [tokenizer.convert_tokens_to_ids(byte) for byte in ("h", "i", "Ċ", "Ċ", "h")] + [end]
    choice = {"message": {"content": "hi\n\nh"}, "finish_reason": "stop", key: new}
    answer = answer_of(json.dumps({"choices": [choice], "prompt_token_ids": prompt}).encode(), "http://a")
    assert answer.ids == (prompt, new, None)
    [exchange] = exchanges(Row({"messages": messages}, "p:1"), SAMPLING, turns="all")
    talk = exchange.talk()
    next(talk)
    row = told(talk, answer)
    assert learnt(encoded(row, target)) == [(prompt, new)]
    row["messages"][-1]["content"] = "hi\n\nho"
    assert encoded(row, target)[0].source == NOT_ITS_IDS


def test_a_server_that_gives_no_ids_leaves_the_text():
    payload = {"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}]}
    assert answer_of(json.dumps(payload).encode(), "http://a").ids is None


@pytest.mark.parametrize(
    ("reason", "is_cut"),
    [
        ({"finish_reason": "stop", "stop_reason": None}, False),
        ({"finish_reason": "stop", "stop_reason": 2}, False),  # vLLM: the end token by its id
        ({"finish_reason": "stop", "matched_stop": "###"}, True),
        ({"finish_reason": "content_filter"}, True),
        ({"finish_reason": "length"}, True),
    ],
)
def test_an_answer_that_the_target_did_not_end_teaches_no_end(reason, is_cut):
    payload = {"choices": [{"message": {"content": "ok"}, **reason}]}
    [exchange] = exchanges(Row({"turns": ["a", "b"]}, "p:1"), SAMPLING, turns="all")
    talk = exchange.talk()
    next(talk)
    answer = answer_of(json.dumps(payload).encode(), "http://a")
    if answer.finish_reason in ("stop", "stop_sequence"):  # a text that the request named ends no conversation
        talk.send(answer)
    row = told(talk, answer)
    assert row["truncated"] is is_cut
    assert len(row["messages"]) == (4 if answer.finish_reason in ("stop", "stop_sequence") else 2)


# What is special is not what is removed


def spelled(tokenizer, text):
    return [tokenizer.convert_tokens_to_ids(byte) for byte in text]


def test_special_tokens_stay_in_the_text_and_only_the_end_token_goes(target):
    tokenizer = target.tokenizer
    tool, end = tokenizer.convert_tokens_to_ids([TOOL, "<|im_end|>"])
    new = [tool, *spelled(tokenizer, "hi"), tool, end]
    answer = EngineAnswers(target).answer([5, 6], new, ChatRequest([], None, SAMPLING, 0))
    assert answer.message == {"role": "assistant", "content": f"{TOOL}hi{TOOL}"}


@pytest.mark.parametrize("reads", [False, True])
def test_a_tool_call_is_structured_where_the_template_reads_it_and_the_ids_stay(reads, make):
    target = make(READS_CALLS if reads else None)
    tokenizer, engine = target.tokenizer, EngineAnswers(target)
    tool, end = tokenizer.convert_tokens_to_ids([TOOL, "<|im_end|>"])
    call = '{"name":"add","arguments":{"a":1}}'  # tojson writes blanks
    new = [*spelled(tokenizer, "hi"), tool, *spelled(tokenizer, call), end]
    [exchange] = exchanges(Row({"prompt": "1 and 1?"}, "p:1"), SAMPLING, turns="all")
    talk = exchange.talk()
    request = next(talk)
    prompt = engine.prompt(request)
    assert not isinstance(prompt, Failure)
    answer = engine.answer(prompt, new, request)
    row = told(talk, answer)
    [*_, message] = row["messages"]
    if reads:
        assert message["content"] == "hi"
        assert [each["function"] for each in message["tool_calls"]] == [{"name": "add", "arguments": {"a": 1}}]
    else:
        assert message == {"role": "assistant", "content": f"hi{TOOL}{call}"}
    assert learnt(encoded(row, target)) == [(prompt, new)]


@pytest.mark.parametrize(
    ("has_tools", "says", "reason"),
    [
        (True, '{"name":"add","arguments":{"a":1}}', "tool_calls"),
        (True, "two", "stop"),
        (False, '{"name":"add","arguments":{"a":1}}', "stop"),  # an answer that is JSON
    ],
)
def test_a_tool_call_behind_a_trace_that_the_prompt_opened_ends_the_conversation(has_tools, says, reason, target):
    engine = EngineAnswers(target)
    engine.markers = ("<think>", "</think>")
    new = [*spelled(target.tokenizer, f"so</think>{says}"), target.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    tools = [{"type": "function", "function": {"name": "add"}}] if has_tools else None
    answer = engine.answer([5, 6], new, ChatRequest([], tools, SAMPLING, 0))
    assert answer.message == {"role": "assistant", "content": says, "reasoning_content": "so"}
    assert answer.finish_reason == reason


# Ids are bounded by the table


def test_ids_beyond_the_tokenizer_are_learnt_and_those_beyond_the_table_refused(make):
    target = make(more=5)
    engine, end = EngineAnswers(target), target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    [exchange] = exchanges(Row({"prompt": "hi"}, "p:1"), SAMPLING, turns="all")
    talk = exchange.talk()
    request = next(talk)
    prompt, new = engine.prompt(request), [65, target.vocab_size - 1, end]
    assert not isinstance(prompt, Failure)
    row = told(talk, engine.answer(prompt, new, request))
    assert learnt(encoded(row, target)) == [(prompt, new)]
    with pytest.raises(BadInput, match="outside the target's table"):
        encode_row(Row(row, "a:1"), target.tokenizer, CONFIG, target.vocab_size - 1)


def test_a_tokenizer_with_more_ids_than_the_table_is_one_line(target):
    row = {"messages": [{"role": "user", "content": TOOL}, {"role": "assistant", "content": "ok"}]}
    size = target.tokenizer.convert_tokens_to_ids(TOOL)
    with pytest.raises(BadInput, match=rf"a.jsonl:1: the tokenizer gives the id {size} .*outside the target's table"):
        encode_row(Row(row, "a.jsonl:1"), target.tokenizer, CONFIG, size)
    engine = EngineAnswers(target)
    [exchange] = exchanges(Row({"prompt": TOOL}, "p:1"), SAMPLING, turns="all")
    request = next(exchange.talk())
    engine.target = type("Small", (), {"vocab_size": size, "num_positions": 99})
    assert "outside the target's table" in str(engine.prompt(request))
