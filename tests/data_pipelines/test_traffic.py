"""Served traffic in the forms in which servers and clients log it, as rows to learn from."""

import json

import pytest
from headstart.configs.errors import BadInput
from headstart.data_pipelines.traffic import read_traffic

USER = [{"role": "user", "content": "How far?"}]
TURNS = [*USER, {"role": "assistant", "content": "Two miles."}]
CHAT = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Two miles."}, "finish_reason": "stop"}]}
CHUNKS = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in ("Two ", "miles.")]
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


@pytest.mark.parametrize("line", PLAIN.values(), ids=PLAIN)
def test_a_completion_stays_plain_text(read, line):
    [row] = read(line).rows
    assert row.row == {"prompt": "How far?", "response": "Two miles."}


def test_an_answer_that_is_json_is_no_envelope(read):
    [row] = read({"messages": USER, "response": '{"miles": 2}'}).rows
    assert row.row["messages"][-1]["content"] == '{"miles": 2}'


def test_a_cut_answer_says_so_and_a_trace_is_kept(read):
    message = {"role": "assistant", "content": "Two", "reasoning_content": "far"}
    [row] = read({"request": ASKED, "response": {"choices": [{"message": message, "finish_reason": "length"}]}}).rows
    assert row.row["truncated"] and row.row["messages"][-1]["reasoning_content"] == "far"
    assert row.temperature == 0.7


@pytest.mark.parametrize(
    "time", [1770000000, 1770000000000, "1770000000", "2026-02-02T02:40:00Z", "2026-02-02T02:40:00"], ids=repr
)
def test_times_are_read_as_servers_write_them(read, time):
    [row] = read({"messages": TURNS, "timestamp": time, "metadata": {"domain": "maps"}}).rows
    assert (row.time, row.week, row.domain) == (1770000000.0, "2026-W06", "maps")


@pytest.mark.parametrize("time", [float("inf"), float("nan"), 10**400, "9" * 400, "inf", -1, 0])
def test_a_number_that_is_no_time_is_none(read, time):
    [row] = read({"messages": TURNS, "timestamp": time}).rows
    assert row.time is None


def test_a_time_inside_the_response_counts(read):
    [row] = read({"request": ASKED, "response": {**CHAT, "created": 1770000000}}).rows
    assert row.week == "2026-W06"


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


def test_a_file_with_no_answer_at_all_is_refused(read):
    with pytest.raises(BadInput, match=r"logs.jsonl: none of its 2 rows is a request with its answer: no answer in it"):
        read({"messages": USER}, {"messages": USER})
