"""Reads served traffic as training rows: logs of requests with their responses, of several servers, and chats.

Each line of a log is a JSON object of one of these forms (docs/refit.md has examples):
  request and response   OpenAI's chat completions and completions, under `request` and `response` (`body`, `input`,
                         `output` ...) or side by side; streams as chunks, server-sent events, or joined text
  prompt and answer      as vLLM (`prompt`, `outputs`) and llama-server (`prompt`, `content`) write them
  chats                  `messages` or `conversations` whose last turn is the assistant's
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...base.errors import BadInput
from ...base.jsonl import iter_jsonl, loads, naming_faults
from ...targets.chat.messages import Message, normalise
from ...targets.chat.rows import of_request, request_in, told_in
from ...targets.chat.written_ids import KEY, WROTE, as_entry, ids_in_response
from .row_shapes import Conversation, conversation_of, turns_digest
from .sources import Row

RESPONSE_KEYS = ("response", "response_body", "output", "completion", "answer")
TEXT_KEYS = ("content", "text", "generated_text", "response", "completion", "output")
DOMAIN_KEYS = ("category", "domain")  # as in prompt files
# finish reasons of answers that the target did not end itself
STOPPED = "stop_sequence"  # by a text that the request named
CUT = ("length", "limit", "max_tokens", "abort", "error", "content_filter", STOPPED, "word")
NESTED = (TypeError, AttributeError, KeyError, IndexError)  # raised on responses, as servers nest what they like


@dataclass(frozen=True)
class ServedChat:
    """An answered conversation of served traffic."""

    row: dict[str, Any]  # for training
    origin: str  # file and line
    question: str  # digest of the first question, without the system prompt; equal for rows of one conversation
    domain: str | None = None


@dataclass(frozen=True)
class Traffic:
    """The contents of a file."""

    rows: list[ServedChat]
    unread: dict[str, int]  # number of rows that could not be read, by reason, most frequent first
    repeated: int  # rows left out because they equal another row or the beginning of one


def read_traffic(path: str) -> Traffic:
    """Read a file of served traffic. Raises BadInput if none of its rows can be read."""
    chats: list[tuple[ServedChat, Conversation]] = []
    unread: dict[str, int] = {}

    def count(error: BadInput) -> None:
        reason = str(error).removeprefix(f"{path}:").partition(": ")[2]
        unread[reason] = unread.get(reason, 0) + 1

    for line, data in iter_jsonl(path, on_fault=count):
        try:
            chats.append(served_chat(data, f"{path}:{line}"))
        except BadInput as error:
            count(error)
        except NESTED:
            count(BadInput(f"{path}:{line}: a response of an unknown shape"))
    if not chats:
        reason = next(iter(unread))
        raise BadInput(f"{path}: none of its {sum(unread.values())} rows is a request with its answer: {reason}")
    rows = longest_only(chats)
    return Traffic(rows, dict(sorted(unread.items(), key=lambda item: -item[1])), len(chats) - len(rows))


def longest_only(chats: list[tuple[ServedChat, Conversation]]) -> list[ServedChat]:
    """Each conversation once: logs have a row per turn, so rows that are the beginning of another row are left out."""
    begun, longest = set[bytes](), dict[bytes, ServedChat]()
    for _, conversation in chats:
        ends = [i for i, (role, _) in enumerate(conversation.turns) if role == "assistant"]
        told = [("tools", conversation.tools)]
        begun |= {turns_digest([*conversation.turns[: end + 1], *told], exact=True) for end in ends[:-1]}
    for row, conversation in chats:
        whole = turns_digest([*conversation.turns, ("tools", conversation.tools)], exact=True)
        if whole not in begun:
            longest.setdefault(whole, row)
    return list(longest.values())


def served_chat(data: Mapping[str, Any], origin: str) -> tuple[ServedChat, Conversation]:
    """Convert a row. Raises BadInput, naming the origin, if it has an unknown shape or no answer."""
    data = {key: value for key, value in data.items() if value is not None}
    request, response = request_in(data) or data, response_in(data)
    everything = [data, request, *([response] if isinstance(response, dict) else [])]
    if isinstance(response, dict) and isinstance(response.get("body"), dict):  # OpenAI's batches
        response = response["body"]
        everything.append(response)
    answer, reason = response_message(response if response is not None else data, origin)
    with naming_faults(data, origin):
        row = row_of(request, answer, origin)
        row |= entry_of_ids(data, response, row) | ({WROTE: data[WROTE]} if WROTE in data else {})
        if reason in CUT or data.get("truncated") is True:
            row["truncated"] = True
        conversation = conversation_of(Row(row, origin))
    if not any(text.strip() for text in conversation.answers):
        raise BadInput(f"{origin}: no answer in it")
    first = turns_digest(conversation.question).hex()
    domain = domain_in(everything)
    return ServedChat(row, origin, first, domain), conversation


def of_log(row: Row) -> Row:
    """A row of a server's log, with a request, as one to learn from; other rows as they are. Raises BadInput."""
    asked = of_request(row.data)
    if asked is row.data:
        return row
    if not any(row.data.get(key) is not None for key in RESPONSE_KEYS):
        return replace(row, data=asked)
    try:
        return replace(row, data=served_chat(row.data, row.origin)[0].row)
    except NESTED as error:
        raise BadInput(f"{row.origin}: a response of an unknown shape") from error


def response_in(data: Mapping[str, Any]) -> Any:
    """The value of the first of the keys of a response, parsed if it is JSON text; None if there is none."""
    value = next((data[key] for key in RESPONSE_KEYS if key in data), None)
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            read = loads(value)
        except ValueError:
            return value  # a text that only looks like JSON
        return read if is_response(read) else value
    return value


def is_response(value: Any) -> bool:
    """Whether a JSON value is a server's response; otherwise it is an answer that happens to be JSON."""
    chunks = value if isinstance(value, list) else [value]
    return bool(chunks) and all(isinstance(chunk, dict) and ({"choices", "body"} & chunk.keys()) for chunk in chunks)


def response_message(response: Any, origin: str) -> tuple[Message | None, str | None]:
    """The assistant's message and its finish reason; the message is None if `response` is a chat that includes it.

    Raises: BadInput if there is no answer.
    """
    if isinstance(response, str) and response.lstrip().startswith("data:"):
        events = [line.strip()[5:].strip() for line in response.splitlines() if line.strip().startswith("data:")]
        try:
            response = [loads(event) for event in events if event != "[DONE]"]
        except ValueError as error:
            raise BadInput(f"{origin}: a stream with an event that is no JSON: {error}") from error
    if isinstance(response, str):
        return {"role": "assistant", "content": response}, None
    if isinstance(response, list):
        return joined_chunks([chunk for chunk in response if isinstance(chunk, dict)])
    if not isinstance(response, dict):
        raise BadInput(f"{origin}: no answer in it")
    choices = response.get("choices") or response.get("outputs")
    if choices and isinstance(choices, list) and isinstance(choices[0], dict):
        choice = choices[0]
        message = choice.get("message") or {"content": choice.get("text")}
        return {"role": "assistant", **message}, reason_of(choice)
    reason = reason_of(response)
    if isinstance(response.get("message"), dict):
        return {"role": "assistant", **response["message"]}, reason
    if "messages" not in response and "conversations" not in response:
        text = next((response[key] for key in TEXT_KEYS if isinstance(response.get(key), str)), None)
        if text is None:
            raise BadInput(f"{origin}: no answer among the keys {', '.join(response) or '(none)'}")
        return {"role": "assistant", "content": text}, reason
    return None, reason


def reason_of(choice: Mapping[str, Any]) -> str | None:
    """The finish reason; STOPPED where vLLM or SGLang name the text of the request's `stop` that ended it."""
    reason = choice.get("finish_reason") or choice.get("stop_type")
    is_stopped = any(isinstance(choice.get(key), str) for key in ("stop_reason", "matched_stop"))
    return STOPPED if reason == "stop" and is_stopped else reason


def joined_chunks(chunks: list[dict[str, Any]]) -> tuple[Message, str | None]:
    """The chunks of a stream joined to one message (of the first choice), and its finish reason; `abort` if it broke
    off before one."""
    texts, traces, reason, calls = list[str](), list[str](), "abort", dict[int, Any]()
    for chunk in chunks:
        choice = next((choice for choice in chunk.get("choices") or [] if choice.get("index", 0) == 0), {})
        delta = choice.get("delta") or choice
        for part_of_call in delta.get("tool_calls") or []:
            add_to_calls(calls, part_of_call)
        texts.append(delta.get("content") or choice.get("text") or "")
        traces.append(delta.get("reasoning_content") or delta.get("reasoning") or "")
        reason = reason_of(choice) or reason
    more: dict[str, Any] = {"reasoning_content": "".join(traces)} if any(traces) else {}
    more |= {"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {}
    return {"role": "assistant", "content": "".join(texts), **more}, reason


def add_to_calls(calls: dict[int, Any], delta: Mapping[str, Any]) -> None:
    """Add a piece of a streamed tool call to those so far, by index: its name comes first, its arguments in pieces."""
    call = calls.setdefault(delta.get("index", 0), {"type": "function", "function": {"name": "", "arguments": ""}})
    if delta.get("id"):
        call["id"] = delta["id"]
    for key, part in (delta.get("function") or {}).items():
        text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) if part is not None else ""
        call["function"][key] = call["function"].get(key, "") + text


def row_of(request: Mapping[str, Any], answer: Message | None, origin: str) -> dict[str, Any]:
    """A training row from a request and its answer. Raises BadInput if there is no prompt or no answer."""
    turns = request.get("messages", request.get("conversations"))
    if turns is not None:
        messages = normalise(turns, origin)
        system = request.get("system")
        if isinstance(system, str) and system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        if answer is not None:
            messages += normalise([answer], origin)
        if messages[-1]["role"] != "assistant" or len(messages) == 1:
            raise BadInput(f"{origin}: no answer in it")
        return {"messages": messages, **told_in(request)}
    prompt = request.get("prompt", request.get("question"))
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or answer is None:
        raise BadInput(f"{origin}: no prompt among the keys {', '.join(request) or '(none)'}")
    if not isinstance(answer.get("content"), str):
        raise BadInput(f"{origin}: no answer in it")
    return {"prompt": prompt, "response": answer["content"]}


def entry_of_ids(data: Mapping[str, Any], response: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of the ids that the target wrote: the row's own, or of a response that has them; else none."""
    if KEY in data:
        return {KEY: data[KEY]}
    ids = ids_in_response(response if isinstance(response, dict) else data)
    last = len(row["messages"]) - 1 if "messages" in row else 1
    return {} if ids is None else as_entry([(last, ids)])


def domain_in(places: list[Any]) -> str | None:
    """The first text under one of DOMAIN_KEYS; also searched in `metadata`."""
    places = [place for place in places if isinstance(place, dict)]
    places += [place["metadata"] for place in places if isinstance(place.get("metadata"), dict)]
    return next((place[key] for place in places for key in DOMAIN_KEYS if isinstance(place.get(key), str)), None)


def as_json_lines(rows: Iterable[ServedChat]) -> str:
    """The text of a JSON Lines file with these rows, for training or as prompts."""
    lines = ({**row.row, **({"category": row.domain} if row.domain else {})} for row in rows)
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
