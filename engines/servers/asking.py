"""A streamed question to a server, and when each part of its answer came: HTTP without a library, so that the client
takes little time of its own.

Parts are noted as they arrive and read when the answer is whole: a part costs microseconds while others are awaited.
"""

import asyncio
import json
import ssl
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from ...base.errors import first_line
from .address import NOT_ANSWERED, Address


@dataclass
class Arrived:
    """An answer as it came. seconds: from the connecting on, of each part that had text or ids; `wait` ends with the
    first, `whole` with the last. text: with the function and arguments of each of `calls`, by their number, at its end.
    num_tokens: by the ids, else by the server's usage. drafted: tokens that were drafted for it and accepted, where the
    answer says so (llama-server's `timings`)."""

    seconds: list[float] = field(default_factory=list)
    text: str = ""
    calls: dict[int, str] = field(default_factory=dict)
    ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    num_tokens: int = 0
    finish: str = ""
    drafted: tuple[int, int] | None = None

    @property
    def wait(self) -> float:
        return self.seconds[0]

    @property
    def whole(self) -> float:
        return self.seconds[-1]


class RequestError(Exception):
    """The server's answer is not one. status: of HTTP; 0: the connection failed or nothing came in time. rest: the
    seconds for which it asks to be left alone (Retry-After)."""

    def __init__(self, status: int, problem: str, *, rest: float | None = None):
        super().__init__(problem)
        self.status, self.rest = status, rest


class Incoming(asyncio.Protocol):
    """The bytes of one connection, with the time of each piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ends: list[int] = []  # the number of bytes that had come after each piece
        self.times: list[float] = []
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.pieces.append(data)
        self.ends.append((self.ends[-1] if self.ends else 0) + len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(exc)


@cache
def secure_context() -> ssl.SSLContext:
    """Made once: reading the certificates of authorities keeps the loop that times all answers."""
    return ssl.create_default_context()


async def ask(address: Address, path: str, body: Mapping[str, Any], *, patience: float) -> Arrived:
    """One question. Args: patience: seconds without a byte after which it has failed. Raises: RequestError."""
    parts = address.parts
    secure = secure_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    loop, sent = asyncio.get_running_loop(), json.dumps(body).encode()
    start = time.perf_counter()  # who asks waits for the connection too
    try:
        connecting = loop.create_connection(Incoming, parts.hostname or "", port, ssl=secure)
        transport, incoming = await asyncio.wait_for(connecting, patience)
    except (OSError, TimeoutError) as error:
        raise RequestError(0, f"{address.url}: cannot be reached: {first_line(error)}") from error
    lines = [f"POST {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
    lines += ["Connection: close", f"Content-Length: {len(sent)}"]
    lines += [f"{name}: {value}" for name, value in address.headers().items()]
    transport.write("\r\n".join([*lines, "", ""]).encode() + sent)
    try:
        while not incoming.closed.done():
            num = len(incoming.pieces)
            await asyncio.wait({incoming.closed}, timeout=patience)
            if not incoming.closed.done() and len(incoming.pieces) == num:
                raise RequestError(0, f"{address.url}: no answer within {patience:g} s")
    finally:
        transport.abort()
    return read(address, incoming, start)


def read(address: Address, incoming: Incoming, start: float) -> Arrived:
    """The answer in what came. Raises: RequestError."""
    raw = b"".join(incoming.pieces)
    head, gap, _ = raw.partition(b"\r\n\r\n")
    if not gap:
        raise RequestError(0, f"{address.url}: connection lost")
    status_line, *lines = head.decode(errors="replace").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(status_line.split()[1])
    is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
    body = len(head) + 4
    ends = [body, *(end for end in incoming.ends if end > body)]
    pieces = list(chunks(raw, body)) if is_chunked else [(end, raw[at:end]) for at, end in pairwise(ends)]
    if status != 200:
        told = address.hide(b"".join(data for _, data in pieces).decode(errors="replace")) or "(no text)"
        rest = headers.get("retry-after", "")
        raise RequestError(status, f"{address.url}: {status}: {told}", rest=float(rest) if rest.isdigit() else None)
    answer, is_ended = Arrived(), False
    for end, line in events(pieces, whole=len(raw)):
        if line == b"[DONE]":
            is_ended = True
            break
        note(answer, address, line, incoming.times[bisect_left(incoming.ends, end)] - start)
    if answer.finish in NOT_ANSWERED:
        raise RequestError(500, f"{address.url}: the server gave up: finish_reason {answer.finish}")
    answer.text += "".join(answer.calls[number] for number in sorted(answer.calls))
    if not answer.seconds or not (is_ended or answer.finish):
        raise RequestError(0, f"{address.url}: connection lost in the middle of an answer")
    answer.num_tokens = len(answer.ids) if answer.ids else answer.num_tokens
    if not answer.num_tokens:  # a part may be several tokens
        raise RequestError(
            400, f"{address.url}: tells neither ids nor usage with its answers, so tokens cannot be counted"
        )
    return answer


def chunks(raw: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """The chunks of a body, each with the place behind it; an incomplete last one is left out."""
    while (line := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line].split(b";")[0], 16)
        if size == 0 or line + 2 + size > len(raw):
            return
        yield line + 2 + size, raw[line + 2 : line + 2 + size]
        at = line + 4 + size


def events(pieces: list[tuple[int, bytes]], *, whole: int) -> Iterator[tuple[int, bytes]]:
    """The data of server-sent events, each with the place in the stream at which it was complete."""
    rest = b""
    for end, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield end, line[5:].strip()
    if rest.startswith(b"data:"):
        yield whole, rest[5:].strip()


def note(answer: Arrived, address: Address, data: bytes, seconds: float) -> None:
    """Add a part to the answer. Raises: RequestError, where it says that the server failed."""
    try:
        part = json.loads(data)
    except ValueError:
        raise RequestError(0, f"{address.url}: a part that is no JSON: {data[:60]!r}") from None
    if part.get("error"):
        raise RequestError(500, f"{address.url}: {address.hide(str(part['error']))}")
    usage = part.get("usage") or {}
    answer.num_tokens = int(usage.get("completion_tokens") or answer.num_tokens)
    answer.prompt_ids = part.get("prompt_token_ids") or answer.prompt_ids
    if timings := part.get("timings"):
        answer.drafted = int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0))
    for choice in part.get("choices") or []:
        delta = choice.get("delta") or {}
        said = [choice.get("text"), delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning")]
        text, ids = "".join(filter(None, said)), choice.get("token_ids")
        called = called_in(delta)
        for number, piece in called:
            answer.calls[number] = answer.calls.get(number, "") + piece
        answer.prompt_ids = choice.get("prompt_token_ids") or answer.prompt_ids
        answer.finish = choice.get("finish_reason") or answer.finish
        answer.text += text
        if ids:
            answer.ids = answer.ids or []
            answer.ids += ids
        if text or ids or called:
            answer.seconds.append(seconds)


def called_in(delta: Mapping[str, Any]) -> list[tuple[int, str]]:
    """What a part says of functions and arguments, each with the number of its call. A call's id is drawn at random."""
    calls, found = delta.get("tool_calls") or [], list[tuple[int, str]]()
    for at, call in enumerate(calls):
        number, function = call.get("index"), call.get("function") or {}
        piece = "".join(filter(None, (function.get("name"), function.get("arguments"))))
        found.append((at if number is None else number, piece))
    return found
