"""What a stream says is read as it was meant: times, tool calls, answers that are none. A server that writes given
bytes at given times."""

import asyncio
import json
import ssl
import time

import pytest
from headstart.engines.servers.address import Address, may_pass
from headstart.engines.servers.asking import RequestError, ask
from serving_stand_in import listening

HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
USAGE = {"choices": [], "usage": {"completion_tokens": 6}}
STEP = 0.05


def event(part):
    return f"data: {part if isinstance(part, str) else json.dumps(part)}\n\n".encode()


def of_choice(finish=None, **delta):
    return event({"choices": [{"delta": delta, "finish_reason": finish}]})


def of_calls(*pieces):
    """Each piece: number of the call, its id, name and arguments, as far as they are in it."""
    named = [
        {"index": at, "id": drawn, "function": {"name": name, "arguments": told}} for at, drawn, name, told in pieces
    ]
    return of_choice(tool_calls=named)


class Written:
    def __init__(self, *pieces):
        self.pieces = pieces

    async def handle(self, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for number, piece in enumerate(self.pieces):
            await asyncio.sleep(STEP if number else 0)
            writer.write(piece)
        writer.close()


def answer_of(*pieces):
    with listening(Written(*pieces)) as url:
        return asyncio.run(ask(Address.of(url, where="--server"), "/v1/chat/completions", {}, patience=5.0))


END = event(USAGE) + event("[DONE]")


@pytest.mark.timed
def test_parts_that_no_chunk_frames_have_times_of_their_own():
    """As mlx_lm writes them, in HTTP/1.0. The first one comes with the headers, the third in two pieces."""
    third = of_choice(content="c")
    pieces = [HEAD + of_choice(content="a"), of_choice(content="b"), third[:9], third[9:], of_choice("stop"), END]
    answer = answer_of(*pieces)
    first, second, last = answer.seconds
    assert (answer.text, answer.num_tokens) == ("abc", 6) and first < STEP
    assert second - first > STEP / 2 and last - second > 1.5 * STEP, "complete with its second piece"


CALLS = [
    [(0, "call-1", "look", ""), (0, None, None, '{"a": '), (0, None, None, "1}"), (1, "call-2", "end", "{}")],
    [(0, "call-7", "look", '{"a"'), (1, "call-8", "end", None), (0, None, None, ": 1}"), (1, None, None, "{}")],
]


@pytest.mark.parametrize("at_once", [False, True])
def test_calls_are_compared_by_function_and_arguments(at_once):
    """However they are cut, and whatever ids they were given."""
    texts = []
    for calls in [*CALLS, [(0, "call-1", "look", '{"a": 2}'), (1, "call-2", "end", "{}")]]:
        parts = [of_calls(*calls)] if at_once else [of_calls(call) for call in calls]
        answer = answer_of(HEAD + of_choice(content="so: ") + b"".join(parts) + of_choice("tool_calls") + END)
        assert len(answer.seconds) == 1 + len(parts)
        texts.append(answer.text)
    assert texts == ['so: look{"a": 1}end{}'] * 2 + ['so: look{"a": 2}end{}']


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("content", ["so", ""])
def test_an_answer_that_the_server_gave_up_is_none(reason, content):
    with pytest.raises(RequestError, match=f"gave up: finish_reason {reason}") as told:
        answer_of(HEAD + of_choice(reason, content=content) + END)
    assert may_pass(told.value.status)


def test_who_asks_waits_for_the_connection_too(monkeypatch):
    connect = asyncio.BaseEventLoop.create_connection

    async def slowly(*args, **how):
        await asyncio.sleep(0.2)
        return await connect(*args, **how)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", slowly)
    assert answer_of(HEAD + of_choice("stop", content="a") + END).wait > 0.2


def test_certificates_are_read_once(monkeypatch):
    """They take milliseconds of the loop that times all answers. The server speaks no TLS."""
    made, create = [], ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda: made.append(time.perf_counter()) or create())
    with listening(Written(HEAD)) as url:
        address = Address.of(url.replace("http:", "https:"), where="--server")
        for _ in range(3):
            with pytest.raises(RequestError, match="cannot be reached"):
                asyncio.run(ask(address, "/v1/completions", {}, patience=0.5))
    assert len(made) <= 1
