"""How a row becomes prompt ids: the one renderer of regeneration, training and evaluation.

`rows` reads what a row says, `ChatTemplate` renders it, `prompt_ids` does both, for rows that are no chats too.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

from ...base.errors import BadInput, first_line
from ..images.pictures import UnreadablePicture, sources_in, with_pictures
from ..images.reader import reader_of
from .messages import REASONING_KEYS, Message, place_reasoning
from .reasoning import think_markers
from .rows import DAY, STANDARD_DAY, ChatRow, UnusableRow, Variables, chat_of, instruction_in, is_chat, known_keys

DIRECTIVE = re.compile(r"%[-_0^#]?[a-zA-Z]")  # of a format of `strftime`
# raised by templates on messages that they refuse
RENDER_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template with all that a row tells it; renders conversations."""

    tokenizer: Any
    tools: list[Any] | None = None
    variables: Variables = field(default_factory=dict)
    given_markers: tuple[str, str] | None = None  # texts that open and close a reasoning trace; None: `think_markers`

    @cached_property
    def template(self) -> str:
        return self.tokenizer.get_chat_template(tools=self.tools)

    @cached_property
    def markers(self) -> tuple[str, str] | None:
        return self.given_markers or _traits(self.tokenizer, self.template)[0]

    @property
    def reasoning_key(self) -> str | None:
        """The message key from which the template reads a reasoning trace; None if it reads none."""
        return _traits(self.tokenizer, self.template)[1]

    @property
    def takes_parts(self) -> bool:
        """Whether the template reads contents as lists of parts alone."""
        return _traits(self.tokenizer, self.template)[2]

    @property
    def prints_day(self) -> bool:
        return DAY in self.template

    @cached_property
    def recorded(self) -> dict[str, Any]:
        """The variables that renderings depend on, as a row records them: with the day if the template prints one."""
        day = {DAY: self.variables.get(DAY, STANDARD_DAY)} if self.prints_day else {}
        return {name: value for name, value in self.variables.items() if name != DAY} | day

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `apply_chat_template`, apart from messages: template, tools and variables."""
        variables, template = dict(self.recorded), self.template
        if self.prints_day:
            day = date.fromisoformat(variables.pop(DAY))
            template = printing(day, template, directives=set(DIRECTIVE.findall(f"{template} {variables}")))
        return {"chat_template": template, "tools": self.tools, **variables}

    def render_text(self, messages: list[Message], *, generation_prompt: bool = False) -> str:
        """The text of a conversation, with the image tokens of its pictures. Raises one of RENDER_ERRORS if the
        template refuses it, UnreadablePicture, and BadInput if the target reads no pictures."""
        pictures = sources_in(messages)
        text = self.tokenizer.apply_chat_template(
            self.as_taken(messages), add_generation_prompt=generation_prompt, tokenize=False, **self.arguments
        )
        if not pictures:
            return text
        if (reader := reader_of(self.tokenizer)) is None:
            raise ValueError("the target reads no pictures")
        return reader.expanded(text, pictures)

    def as_taken(self, messages: list[Message]) -> list[Message]:
        """The messages with contents in the form that the template reads."""
        if not self.takes_parts:
            return messages
        return [{**one, "content": as_parts(one.get("content"))} for one in messages]

    def render(self, messages: list[Message], *, generation_prompt: bool = False) -> list[int]:
        """The token ids of `render_text`."""
        return self.ids(self.render_text(messages, generation_prompt=generation_prompt))

    def placed(self, messages: list[Message], origin: str) -> list[Message]:
        """The messages with traces where the template reads them. Raises UnusableRow if it has no place for them."""
        if not any("reasoning_content" in message for message in messages):
            return messages
        if self.reasoning_key is None and self.markers is None:
            raise UnusableRow(origin, "the chat template has no place for reasoning_content; set data.think_markers")
        return place_reasoning(messages, self.reasoning_key, self.markers)

    def prompt_text(self, messages: list[Message], origin: str) -> str:
        """A conversation up to where the assistant answers. Raises UnusableRow if the template refuses it.

        Earlier traces for which the template has no place are left out, as in serving.
        """
        try:
            return self.render_text(place_reasoning(messages, self.reasoning_key, self.markers), generation_prompt=True)
        except UnreadablePicture as error:
            raise UnusableRow(origin, str(error)) from error
        except RENDER_ERRORS as error:
            raise UnusableRow(origin, f"the chat template refuses the messages: {first_line(error)}") from error

    def prompt(self, messages: list[Message], origin: str) -> list[int]:
        """The token ids of `prompt_text`, an `ImagePrompt` if the messages have pictures."""
        return with_pictures(self.ids(self.prompt_text(messages, origin)), sources_in(messages))

    def ids(self, text: str) -> list[int]:
        """The token ids of a rendered text, in which the template has put all special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def printing(day: date, template: str, *, directives: set[str]) -> str:
    """A template whose `strftime_now` prints a day: transformers gives templates its own, which prints that of the
    rendering, and no function of ours. Directives: those that its formats may have."""
    printed = {directive: day.strftime(directive) for directive in sorted(directives)}
    changes = (f"format.replace({json.dumps(each)}, {json.dumps(text)})" for each, text in printed.items())
    steps = "".join(f"{{% set format = {change} %}}" for change in changes)
    return f"{{% macro {DAY}(format) %}}{steps}{{{{ format }}}}{{% endmacro %}}\n{template}"


@lru_cache(maxsize=16)
def _traits(tokenizer: Any, template: str) -> tuple[tuple[str, str] | None, str | None, bool]:
    """A template's markers of a reasoning trace, and the message key from which it reads one; each None if it has
    none; and whether it reads contents as parts alone."""
    question, answer = {"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}

    def text(*messages: Message) -> str:
        try:
            return tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False)
        except RENDER_ERRORS:
            return ""

    def shows(content: Any) -> bool:
        return "Z" in text({**question, "content": content}).removeprefix(text(question))

    takes_parts = not shows("Z") and shows(as_parts("Z"))
    if takes_parts:
        question, answer = ({**one, "content": as_parts("0")} for one in (question, answer))
    with_traces = {key: text(question, {**answer, key: "Z"}) for key in REASONING_KEYS}
    without = text(question, answer)
    key = next((key for key, rendering in with_traces.items() if rendering and without and rendering != without), None)
    return think_markers(tokenizer), key, takes_parts


def as_parts(content: Any) -> Any:
    """A text as a list of one part; other contents as they are."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def chat_prompt_ids(chat: ChatRow, tokenizer: Any, *, origin: str) -> list[int]:
    """Token ids of a chat up to where its last answer begins. Raises: BadInput without a chat template or a message to
    answer; UnusableRow if the template refuses the chat."""
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput(f"{origin}: the target's tokenizer has no chat template; give plain `prompt` rows")
    if not chat.question:
        raise BadInput(f"{origin}: no message to answer")
    return ChatTemplate(tokenizer, chat.tools, chat.variables).prompt(chat.question, origin)


def rendered(chat: ChatRow, tokenizer: Any, *, origin: str) -> str:
    """The whole chat as text. Raises UnusableRow if the template refuses it, or has no place for its traces."""
    template = ChatTemplate(tokenizer, chat.tools, chat.variables)
    try:
        return template.render_text(template.placed(chat.messages, origin))
    except RENDER_ERRORS as error:
        raise UnusableRow(origin, f"the chat template refuses the messages: {first_line(error)}") from error


def prompt_ids(row: Mapping[str, Any], tokenizer: Any, *, origin: str, defaults: Variables | None = None) -> list[int]:
    """Token ids of a row's prompt, after which the last answer begins.

    `input_ids` are taken as they are, up to `prompt_length`. Chats go through the chat template; of `turns` the first
    is asked, as plain text if the tokenizer has no template. `prompt`, or `instruction` with `input`, is plain text,
    with the special tokens that the tokenizer puts before a text.

    Args: defaults: variables for the template that the row does not record.
    Raises: BadInput naming the origin; UnusableRow if the template refuses the chat.
    """
    data = known_keys(row)
    if "input_ids" in data:
        return ready_ids(data, origin=origin)
    if is_chat(data):
        chat = chat_of(data, origin, defaults=defaults)
        if not chat.is_answered and not tokenizer.chat_template:
            return plain_ids(tokenizer, chat.question[-1]["content"])
        return chat_prompt_ids(chat, tokenizer, origin=origin)
    return plain_ids(tokenizer, plain_prompt(data, origin))


def check_prompt(row: Mapping[str, Any], origin: str) -> None:
    """Raises BadInput, as `prompt_ids`, on a row of which no tokenizer could make a prompt."""
    data = known_keys(row)
    if "input_ids" in data:
        ready_ids(data, origin=origin)
    elif is_chat(data):
        chat_of(data, origin)
    else:
        plain_prompt(data, origin)


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text that the target continues: behind the special tokens that the tokenizer puts before a
    text, and without those that it appends (`add_eos_token`), behind which no target would write on."""

    def ids(text: str, *, special: bool) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    probe, framed = ids("0", special=False), ids("0", special=True)
    begin = next((i for i in range(len(framed)) if framed[i : i + len(probe)] == probe), 0)
    return [*framed[:begin], *ids(text, special=False)]


def plain_prompt(data: Mapping[str, Any], origin: str) -> str:
    """The text of a row's `prompt`, or `instruction`. Raises BadInput if it has none, or it is not text."""
    if "prompt" not in data and "instruction" in data:
        return instruction_in(data, origin)
    if "prompt" not in data:
        raise BadInput(f"{origin}: a prompt row needs `prompt`, `messages` or `turns`, found {sorted(data)}")
    if not isinstance(data["prompt"], str):
        raise BadInput(f"{origin}: `prompt` should be text, got {data['prompt']!r:.60}")
    return data["prompt"]


def ready_ids(row: Mapping[str, Any], *, origin: str) -> list[int]:
    """A row's `input_ids`, up to its `prompt_length`. Raises BadInput if either is malformed."""
    ids, length = row["input_ids"], row.get("prompt_length")
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise BadInput(f"{origin}: `input_ids` should be a list of whole numbers")
    if length is not None and (type(length) is not int or not 0 <= length <= len(ids)):
        raise BadInput(f"{origin}: `prompt_length` should be between 0 and {len(ids)}, got {length!r}")
    return ids[:length]
