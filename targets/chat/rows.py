"""What a row says: its chat, and all else that the chat template is told.

A chat row has `messages`, `conversations` (ShareGPT), `turns` (texts of the user) or a list of turns as its `prompt`.
Beside them it records
  `system`                a text that becomes the first message, if there is no system message
  `tools`                 the functions that the assistant may call, or their JSON
  `chat_template_kwargs`  further variables, by the names under which the template reads them, as servers take them:
                          {"enable_thinking": false, "reasoning_effort": "low"}. Under `strftime_now` stands the day
                          (2025-12-31) that the template's `strftime_now` prints; `STANDARD_DAY` where it does not
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from ...base.errors import BadInput
from ...base.jsonl import loads
from ..images.pictures import beside
from .messages import Message, normalise

CHAT_KEYS = ("messages", "conversations", "turns")
VARIABLES = "chat_template_kwargs"
REQUEST_KEYS = ("request", "request_body", "body", "input")  # of rows of logs
DAY = "strftime_now"  # the variable that is a day here, and a function in the template
STANDARD_DAY = "2025-01-01"  # a fixed one, so that equal rows have equal prompts on all days
NOT_VARIABLES = frozenset(  # arguments of apply_chat_template
    "conversation messages tools chat_template add_generation_prompt continue_final_message tokenize "
    "sanitize_control_tokens padding truncation max_length return_tensors return_dict return_assistant_tokens_mask "
    "tokenizer_kwargs".split()
)
Variables = Mapping[str, Any]


class UnusableRow(BadInput):
    """A row that gives no prompt, or nothing to train on, for this target; other rows of its file may."""

    def __init__(self, origin: str, reason: str):
        super().__init__(f"{origin}: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class ChatRow:
    """A chat row in one form."""

    messages: list[Message]  # see `normalise`
    tools: list[Any] | None = None
    variables: Variables = field(default_factory=dict)  # of the template
    is_answered: bool = True  # False of `turns`: answers are empty messages

    @property
    def question(self) -> list[Message]:
        """The messages before the last answer; of a row without answers those before the first one."""
        answers = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        if answers and not self.is_answered:
            return self.messages[: answers[0]]
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        return self.messages[:end]


def with_thinking(variables: Variables, thinking: bool | None) -> dict[str, Any]:
    """The variables with `enable_thinking`; None: it is not told."""
    return {**variables, **({} if thinking is None else {"enable_thinking": thinking})}


def known_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """A row without keys that are None; without another shape, `question` and `answer` become prompt and response."""
    data = {key: value for key, value in data.items() if value is not None}
    others = ("messages", "conversations", "turns", "prompt", "instruction", "text", "input_ids")
    if {"question", "answer"} <= data.keys() and not any(key in data for key in others):
        data |= {"prompt": data.pop("question"), "response": data.pop("answer")}
    return data


def request_in(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The request in a row of a server's log, which may be JSON text; None if it has none."""
    request = next((data[key] for key in REQUEST_KEYS if data.get(key) is not None), None)
    with suppress(ValueError):
        request = loads(request) if isinstance(request, str) else request
    return request if isinstance(request, dict) else None


def told_in(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a request tells the chat template, as rows record it."""
    extra = request.get("extra_body")
    more = {**(extra if isinstance(extra, dict) else {}), **request}
    told = {key: more[key] for key in ("tools", VARIABLES) if more.get(key)}
    if isinstance(effort := more.get("reasoning_effort"), str):  # of templates of gpt-oss' kind
        told[VARIABLES] = {"reasoning_effort": effort, **told.get(VARIABLES, {})}
    return told


def of_request(data: dict[str, Any]) -> dict[str, Any]:
    """A row of a server's log as a row of what was asked; a row of another shape as it is."""
    shapes = (*CHAT_KEYS, "prompt", "question", "instruction", "text", "input_ids")
    request = None if any(data.get(key) is not None for key in shapes) else request_in(data)
    if request is None:
        return data
    own = {key: data[key] for key in ("id", "category", "domain") if key in data}
    return {**own, **request, **told_in(request)}


def answer_in(data: Mapping[str, Any]) -> Any:
    """The answer to a prompt or an instruction, under any of the known keys; None if there is none."""
    return next((data[key] for key in ("response", "completion", "output") if key in data), None)


def instruction_in(data: Mapping[str, Any], origin: str) -> str:
    """An instruction and its input, each followed by a blank line. Raises BadInput if they are not text."""
    parts = [data["instruction"], data.get("input", "")]
    if not all(isinstance(part, str) for part in parts):
        raise BadInput(f"{origin}: `instruction` and `input` should be text")
    return "".join(f"{part}\n\n" for part in parts if part)


def is_chat(data: Mapping[str, Any]) -> bool:
    """Whether a row is one for the chat template."""
    if data.get("input_ids") is not None:
        return False
    return any(data.get(key) is not None for key in CHAT_KEYS) or isinstance(data.get("prompt"), list)


def chat_of(data: Mapping[str, Any], origin: str, *, defaults: Variables | None = None) -> ChatRow:
    """Read a row for which `is_chat` holds.

    Args:
        origin: where the row was read, the prefix of error messages.
        defaults: variables for the template that the row does not record.
    Raises: BadInput if its messages are malformed, `tools` are no JSON, or a variable is none.
    """
    data = known_keys(data)
    messages = normalise(_turns(data, origin), origin, beside(data))
    system = data.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    variables = {**(defaults or {}), **check_variables(data.get(VARIABLES, {}), f"{origin}: `{VARIABLES}`")}
    is_answered = "turns" not in data or any(key in data for key in ("messages", "conversations"))
    return ChatRow(messages, tools_in(data, origin), variables, is_answered)


def tools_in(data: Mapping[str, Any], origin: str) -> list[Any] | None:
    """A row's `tools`, which may be JSON; None if there are none. Raises BadInput if they are neither."""
    tools = data.get("tools")
    try:
        tools = loads(tools.strip() or "null") if isinstance(tools, str) else tools
    except ValueError as error:
        raise BadInput(f"{origin}: `tools` is text, but not JSON: {error}") from error
    if tools and not isinstance(tools, list):
        raise BadInput(f"{origin}: `tools` should be a list, got {type(tools).__name__}")
    return tools or None


def check_variables(variables: Any, where: str) -> dict[str, Any]:
    """The variables; those that are None are left out, so that a template has its default.

    Raises: BadInput if they are no mapping, one is not the template's, or the day is none.
    """
    if not isinstance(variables, Mapping):
        raise BadInput(f"{where} should be an object, got {type(variables).__name__}")
    wrong = next((name for name in variables if name in NOT_VARIABLES), None)
    if wrong is not None:
        raise BadInput(f"{where}: {wrong} is no variable of a chat template")
    told = {str(name): value for name, value in variables.items() if value is not None}
    try:
        date.fromisoformat(told.get(DAY, STANDARD_DAY))
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where}: {DAY} {told[DAY]!r:.40}: expected a day, such as {STANDARD_DAY}") from error
    return told


def variables_in(text: str, where: str) -> dict[str, Any]:
    """`check_variables` of JSON; none of an empty text. Raises BadInput also if it is not JSON."""
    try:
        return check_variables(loads(text or "{}"), where)
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(f"{where}: not JSON: {error}") from error


def _turns(data: Mapping[str, Any], origin: str) -> Any:
    """The turns of a row, in any of their forms; its `response`, if any, is the last one."""
    if "messages" in data or "conversations" in data:
        return data.get("messages", data.get("conversations"))
    if "turns" in data:
        turns = data["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(text, str) for text in turns):
            raise BadInput(f"{origin}: `turns` should be a list of texts with at least one, got {turns!r:.60}")
        asked = [{"role": "user", "content": text} for text in turns]
        return [turn for question in asked for turn in (question, {"role": "assistant", "content": ""})]
    answer = answer_in(data)
    ends = answer if isinstance(answer, list) else [] if answer is None else [{"role": "assistant", "content": answer}]
    return [*data["prompt"], *ends]
