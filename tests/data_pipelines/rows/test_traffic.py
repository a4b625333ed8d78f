"""Served traffic in the forms in which servers and clients log it, as rows to learn from."""

import json

import pytest
from headstart.base.errors import BadInput
from headstart.data_pipelines.rows.traffic import read_traffic

USER = [{"role": "user", "content": "How far?"}]
TURNS = [*USER, {"role": "assistant", "content": "Two miles."}]
CHAT = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Two miles."}, "finish_reason": "stop"}]}
BROKEN_OFF = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in ("Two ", "miles.")]
CHUNKS = [*BROKEN_OFF, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
EVENTS = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS) + "data: [DONE]\n"
ASKED = {"model": "m", "messages": USER, "temperature": 0.7}
LINES = {
    "request and response": {"request": ASKED, "response": CHAT},
    "bodies as text": {"request_body": json.dumps(ASKED), "response_body": json.dumps(CHAT)},
    "a batch's": {"body": ASKED, "response": {"status_code": 200, "body": CHAT}},
    "side by side": {"messages": USER, "choices": CHAT["choices"]},
    "joined text": {"request": ASKED, "response": "Two miles."},
    "chunks": {"request": ASKED, "response": CHUNKS},
    "server-sent events": {"request": ASKED, "response": EVENTS},
    "a message": {"messages": USER, "response": {"message": {"content": "Two miles."}}},
    "our own": {"messages": TURNS},
    "ShareGPT": {"conversations": [{"from": "human", "value": "How far?"}, {"from": "gpt", "value": "Two miles."}]},
}
PLAIN = {
    "completions": {"request": {"prompt": "How far?"}, "response": {"choices": [{"text": "Two miles."}]}},
    "vLLM": {"prompt": "How far?", "outputs": [{"text": "Two miles.", "finish_reason": "stop"}]},
    "llama-server": {"prompt": "How far?", "content": "Two miles.", "stop_type": "eos"},
    "JSON that is an answer": {"prompt": "How far?", "response": "Two miles."},
}


@pytest.fixture
def read(tmp_path):
    """read(row, ...): a file of these rows; text is written as it is."""

    def call(*rows):
        path = tmp_path / "logs.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return read_traffic(str(path))

    return call


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_chat_is_read_from_every_kind_of_log(read, line):
    [row] = read(line).rows
    assert [(turn["role"], turn["content"]) for turn in row.row["messages"]] == [
        ("user", "How far?"),
        ("assistant", "Two miles."),
    ]
    assert "truncated" not in row.row


def test_what_the_template_was_told_is_kept(read):
    """A system prompt beside the messages, how much to think; the question is the same under another system prompt."""
    answered = [*USER, {"role": "assistant", "content": "Two miles."}]
    told = {"messages": answered, "reasoning_effort": "low"}
    rows = read({"system": "Be brief.", **told}, {"system": "Be kind.", **told}, {"messages": answered}).rows
    assert [row.row["messages"][0]["content"] for row in rows] == ["Be brief.", "Be kind.", USER[0]["content"]]
    assert (
        rows[0].row["chat_template_kwargs"] == {"reasoning_effort": "low"} and len({row.question for row in rows}) == 1
    )


@pytest.mark.parametrize("line", PLAIN.values(), ids=PLAIN)
def test_a_completion_stays_plain_text(read, line):
    [row] = read(line).rows
    assert row.row == {"prompt": "How far?", "response": "Two miles."}


def test_an_answer_that_is_json_is_no_envelope(read):
    [row] = read({"messages": USER, "response": '{"miles": 2}'}).rows
    assert row.row["messages"][-1]["content"] == '{"miles": 2}'


ENDS = [  # of answers: what a server says of its end, and whether it is not the target's own
    ({"finish_reason": "length"}, True),
    ({"finish_reason": "abort"}, True),
    ({"finish_reason": "stop", "stop_reason": "Observation:"}, True),
    ({"finish_reason": "stop", "matched_stop": "Observation:"}, True),
    ({"stop_type": "word"}, True),
    ({"finish_reason": "stop", "stop_reason": 2}, False),
    ({"finish_reason": "stop", "matched_stop": None}, False),
    ({"stop_type": "eos"}, False),
]


@pytest.mark.parametrize(("end", "is_cut"), ENDS)
def test_an_answer_that_the_target_did_not_end_says_so_and_a_trace_is_kept(end, is_cut, read):
    message = {"role": "assistant", "content": "Two", "reasoning_content": "far"}
    [row] = read({"request": ASKED, "response": {"choices": [{"message": message, **end}]}}).rows
    assert ("truncated" in row.row) == is_cut and row.row["messages"][-1]["reasoning_content"] == "far"
    [streamed] = read({"request": ASKED, "response": [*BROKEN_OFF, {"choices": [{"delta": {}, **end}]}]}).rows
    assert ("truncated" in streamed.row) == is_cut
    [broken_off] = read({"request": ASKED, "response": BROKEN_OFF}).rows
    assert broken_off.row["truncated"]


def test_tool_calls_of_a_stream_are_those_of_a_whole_answer(read):
    deltas = [
        {"index": 0, "id": "c0", "type": "function", "function": {"name": "miles", "arguments": ""}},
        {"index": 1, "id": "c1", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": '{"to": '}},
        {"index": 0, "function": {"arguments": '"Rome"}'}},
    ]
    chunks = [*({"choices": [{"index": 0, "delta": {"tool_calls": [delta]}}]} for delta in deltas), CHUNKS[-1]]
    calls = [
        {"id": "c0", "type": "function", "function": {"name": "miles", "arguments": '{"to": "Rome"}'}},
        {"id": "c1", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    whole = {"choices": [{"message": {"role": "assistant", "content": "", "tool_calls": calls}}]}
    [streamed] = read({"request": ASKED, "response": chunks}).rows
    [at_once] = read({"request": ASKED, "response": whole}).rows
    assert streamed.row == at_once.row
    assert streamed.row["messages"][-1]["tool_calls"][0]["function"]["arguments"] == {"to": "Rome"}
    deltas[2:] = [{"index": 0, "function": {"arguments": {"to": "Rome"}}}]  # as some gateways stream
    chunks = [*({"choices": [{"index": 0, "delta": {"tool_calls": [delta]}}]} for delta in deltas), CHUNKS[-1]]
    [streamed] = read({"request": ASKED, "response": chunks}).rows
    assert streamed.row == at_once.row


def test_a_domain_is_found_in_the_metadata_too(read):
    [row] = read({"messages": TURNS, "metadata": {"domain": "maps"}}).rows
    assert row.domain == "maps"


def test_of_a_conversation_that_is_logged_turn_by_turn_the_longest_row_remains(read):
    longer = [*TURNS, {"role": "user", "content": "And back?"}, {"role": "assistant", "content": "Two more."}]
    traffic = read({"messages": TURNS}, {"messages": longer}, {"messages": longer})
    assert [len(row.row["messages"]) for row in traffic.rows] == [4] and traffic.repeated == 2


def test_conversations_that_ask_the_same_first_are_alike(read):
    other = [{"role": "user", "content": "how  FAR?"}, {"role": "assistant", "content": "One mile."}]
    different = [{"role": "user", "content": "How high?"}, TURNS[1]]
    first, second, third = read({"messages": TURNS}, {"messages": other}, {"messages": different}).rows
    assert first.question == second.question != third.question


def test_rows_that_are_something_else_are_counted_by_what_is_wrong(read):
    failed = {"request": ASKED, "response": {"error": "overloaded"}}
    traffic = read(LINES["our own"], failed, failed, "2026-02-02 INFO started", {"messages": USER}, {"a": 1})
    assert len(traffic.rows) == 1
    assert list(traffic.unread.items())[0] == ("no answer among the keys error", 2)
    assert sum(traffic.unread.values()) == 5 and any("not JSON" in reason for reason in traffic.unread)


ODD = {
    "a message that is text": {"choices": [{"message": "Two miles."}]},
    "a choice that is text": [{"choices": ["Two miles."]}],
    "choices that are a number": [{"choices": 2}],
    "a delta that is text": [{"choices": [{"delta": "Two miles."}]}],
    "a delta of parts": [{"choices": [{"delta": {"content": [{"type": "text", "text": "Two miles."}]}}]}],
}


@pytest.mark.parametrize("response", ODD.values(), ids=ODD)
def test_a_response_of_an_unknown_shape_is_counted(read, response):
    traffic = read(LINES["our own"], {"request": ASKED, "response": response})
    assert len(traffic.rows) == 1 and traffic.unread == {"a response of an unknown shape": 1}


def test_a_file_with_no_answer_at_all_is_refused(read):
    with pytest.raises(BadInput, match=r"logs.jsonl: none of its 2 rows is a request with its answer: no answer in it"):
        read({"messages": USER}, {"messages": USER})
