"""What servers are asked: rows of prompt files, passed on as they are, and the ids that our template makes of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.jsonl import iter_jsonl
from ...targets.chat.messages import for_api
from ...targets.chat.prompts import chat_prompt_ids, plain_prompt, prompt_ids
from ...targets.chat.rows import DAY, VARIABLES, chat_of, is_chat, of_request, tools_in
from ...targets.images.pictures import ADDRESS, PART, UnreadablePicture, as_part, as_url, beside, is_picture, sources_in
from ..suites.prompts import DEFAULT_CHAT, NEEDS_CHAT, ChatOptions

TURN = ", turn "  # between a row and the number of a recorded turn
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
PASSED_ON = ("response_format", "tool_choice", "model", "structured_outputs", "guided_json", "logit_bias", "stop")


@dataclass(frozen=True)
class Question:
    """row: `FILE:LINE`. path: of the server's API. ids: the prompt by our tokenizer and template; None: not known, as
    of one with images."""

    row: str
    path: str
    body: Mapping[str, Any]
    ids: list[int] | None
    is_plain_text: bool = False  # a row of `prompt`, which no chat template is put around


def origins_of(questions: Sequence[Question]) -> list[str]:
    """By question: the row that it comes from. Turns of one chat have one, and so have rows that ask the same."""
    first = dict[str, str]()
    return [
        first.setdefault(json.dumps([one.path, one.body], sort_keys=True), one.row.partition(TURN)[0])
        for one in questions
    ]


@dataclass(frozen=True)
class Questions:
    """All rows of some files. num_turns_left: further questions of their chats, which are not asked. unreadable: of
    each row that is left out, what is wrong with its picture. tokenizer: the target's; None: there is none here."""

    asked: Sequence[Question]
    num_turns_left: int = 0
    unreadable: Sequence[str] = ()
    tokenizer: Any = None

    def texts(self) -> Iterator[str]:
        """The first question of each row, as far as its ids are known."""
        first = [one for one in self.asked if one.row.partition(TURN)[2] in ("", "1")]
        return (self.tokenizer.decode(one.ids) for one in first if self.tokenizer is not None and one.ids)

    @classmethod
    def read(cls, paths: Sequence[str], tokenizer: Any, *, limit: int | None, chat: ChatOptions) -> "Questions":
        """Args: limit: rows of each file. Raises BadInput."""
        asked, left, unreadable = list[Question](), 0, list[str]()
        for path in paths:
            rows = list[tuple[str, Mapping[str, Any]]]()
            for line, row in islice(iter_jsonl(path), limit):
                try:
                    rows.append((f"{Path(path).name}:{line}", as_sent(of_request(row), f"{path}:{line}")))
                except UnreadablePicture as error:
                    unreadable.append(f"{path}:{line}: {error}")
            if not rows:
                raise BadInput(f"{path}: no row {'has a picture that can be read' if unreadable else 'is in the file'}")
            asked += [one for origin, row in rows for one in questions_of(row, origin, tokenizer, chat)]
            left += sum(turns_left(row, chat) for _, row in rows)
        return cls(asked, left, unreadable, tokenizer)


def unreadable_words(rows: Sequence[str]) -> str:
    return f"{len(rows)} rows are left out, as a picture is missing or broken; the first: {rows[0]}"


def turns_left(row: Mapping[str, Any], chat: ChatOptions) -> int:
    """How many questions of a row are not asked: of `turns` all but the first, of recorded turns with images all but
    the last."""
    if chat.has_recorded_turns and has_parts(row):
        return max(0, sum(one.get("role") == "assistant" for one in row["messages"]) - 1)
    return max(0, len(row.get("turns") or []) - 1)


def questions_of(row: Mapping[str, Any], origin: str, tokenizer: Any, chat: ChatOptions) -> list[Question]:
    """A row's first question, or where turns are recorded one for each of them, behind what was recorded before it.
    Raises BadInput if the row is malformed."""
    if not chat.has_recorded_turns or not is_chat(row) or has_parts(row):
        return [question_of(row, origin, tokenizer, chat)]
    script = chat.script(chat_of(row, origin, defaults=chat.variables), origin)
    asked = [[message for message in script[:at] if message] for at, one in enumerate(script) if one is None]
    rest = {key: value for key, value in row.items() if key not in ("messages", "conversations", "system")}
    return [
        question_of({**rest, "messages": messages}, f"{origin}{TURN}{number}", tokenizer, chat)
        for number, messages in enumerate(asked, start=1)
    ]


def question_of(row: Mapping[str, Any], origin: str, tokenizer: Any, chat: ChatOptions) -> Question:
    """Raises BadInput if the row is malformed."""
    passed = {key: row[key] for key in PASSED_ON if row.get(key) is not None}
    if not is_chat(row):
        if chat != DEFAULT_CHAT:
            raise BadInput(f"{origin}: {NEEDS_CHAT}")
        is_text = row.get("input_ids") is None
        ids = None if tokenizer is None and is_text else prompt_ids(row, tokenizer, origin=origin)
        return Question(origin, PLAIN, {"prompt": ids or plain_prompt(row, origin), **passed}, ids, is_text)
    row = chat.of_row(dict(row))
    tools, ids = tools_in(row, origin), None
    if has_parts(row):  # images and other parts: as they are
        messages = [*row["messages"]]
        if row.get("system") and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": row["system"]})
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        variables = {**chat.variables, **(row.get(VARIABLES) or {})}
    else:
        whole = chat_of(row, origin, defaults=chat.variables)
        messages, variables = [for_api(message) for message in whole.question], dict(whole.variables)
        if tokenizer is not None and tokenizer.chat_template:
            ids = chat_prompt_ids(whole, tokenizer, origin=origin)
    body: dict[str, Any] = {"messages": messages, **passed}
    body |= {"tools": tools} if tools else {}
    variables.pop(DAY, None)  # a function of templates; as a text it would hide the server's
    body |= {VARIABLES: variables} if variables else {}
    return Question(origin, CHAT, body, ids)


def as_sent(row: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
    """The row with its pictures as OpenAI's API takes them, in `messages`: data URLs, but for addresses of what is no
    file here, which the server may know. Raises UnreadablePicture."""
    if is_chat(row) and row.get("messages") is None:
        messages = chat_of(row, origin).messages
        row = {**row, "messages": messages} if sources_in(messages) else row
    if not has_parts(row):
        return row
    own = iter(beside(row))

    def sent(part: Any) -> Any:
        if not is_picture(part):
            return part
        source = as_part(part, own, origin)[PART]
        return {"type": "image_url", "image_url": {"url": source if ADDRESS.match(source) else as_url(source)}}

    def message(given: Any) -> Any:
        parts = given.get("content") if isinstance(given, Mapping) else None
        return {**given, "content": [*map(sent, parts)]} if isinstance(parts, list) else given

    return {**row, "messages": [*map(message, row["messages"])]}


def has_parts(row: Mapping[str, Any]) -> bool:
    """Whether a message has parts that are not text."""
    contents = [message.get("content") for message in row.get("messages") or [] if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)
