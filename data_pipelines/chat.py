"""Turns a row (chat, prompt and response, text, or token ids) into token ids and an exact mask of what is supervised.

Which tokens of a chat belong to the assistant is decided by comparing token ids of whole renderings: no pattern is
searched in rendered text, and nothing here knows a template by name.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from ..configs.errors import BadInput
from .sources import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

ROW_SHAPES = (
    "`messages` (role, content), `conversations` (from, value), `prompt` + `response` or `completion`, "
    "`instruction` + `output` or `response`, `text`, or `input_ids` + `prompt_length`"
)
ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    "system": "system",
    "developer": "developer",
}
SHAREGPT_KEYS = {"from": "role", "value": "content"}
STAND_INS = ("0", "Z")  # no answer begins, or ends, with the tokens of both
RENDER_ERRORS = (TemplateError, TypeError, ValueError)  # what a template raises on messages that it does not take


@dataclass(kw_only=True)
class Sample:
    """One row as token ids, and for each token whether a head is trained to predict it."""

    input_ids: list[int]
    loss_mask: list[bool]  # as long as input_ids; True: supervised
    num_cut: int = 0  # tokens lost on the right to max_length


def encode_rows(
    rows: Iterable[Row | dict[str, Any]], tokenizer: "PreTrainedTokenizerBase", *, max_length: int
) -> tuple[list[Sample], dict[str, int]]:
    """Encodes rows in order; with the samples come the number of rows `kept`, of those `cut`, and of rows `dropped`.

    Dropped are rows whose supervised tokens all lie beyond `max_length` tokens. BadInput: as `encode_row`.
    """
    samples, num_rows = [], 0
    for num_rows, row in enumerate(rows, start=1):
        row = row if isinstance(row, Row) else Row(row, f"row {num_rows - 1}")
        samples.append(encode_row(row, tokenizer, max_length=max_length))
    kept = [sample for sample in samples if sample is not None]
    num_cut = sum(sample.num_cut > 0 for sample in kept)
    return kept, {"kept": len(kept), "cut": num_cut, "dropped": num_rows - len(kept)}


def encode_row(row: Row | dict[str, Any], tokenizer: "PreTrainedTokenizerBase", *, max_length: int) -> Sample | None:
    """Token ids and loss mask of one row, cut on the right to `max_length` tokens.

    The first of these shapes that the row has is taken; keys whose value is None count as absent:
      `input_ids` + `prompt_length`    ready tokens; the first prompt_length are not supervised
      `messages` or `conversations`    the tokenizer's chat template, with `tools`; the assistant turns are supervised
      `prompt` + `response` or `completion`, `instruction` (+ `input`) + `output` or `response`
                                       plain text, the response and its eos supervised; no chat template. An
                                       instruction, its input and its output are set apart by blank lines
      `text`                           every token supervised but a leading bos

    None: all supervised tokens lie beyond `max_length`, so the caller counts the row as dropped. BadInput, which opens
    with the row's origin: another shape, a value of the wrong type, a chat that the template refuses, a tokenizer
    without chat template, a row in which nothing is supervised.
    """
    row = row if isinstance(row, Row) else Row(row, "row")
    input_ids, loss_mask = _encode_whole(row, tokenizer)
    assert len(input_ids) == len(loss_mask)
    if not any(loss_mask):
        start = " ".join(str(tokenizer.decode(input_ids[:80])).split())[:80]
        raise BadInput(f"{row.origin}: no token is supervised in {start!r}")
    if not any(loss_mask[:max_length]):
        return None
    num_cut = max(0, len(input_ids) - max_length)
    return Sample(input_ids=input_ids[:max_length], loss_mask=loss_mask[:max_length], num_cut=num_cut)


def _encode_whole(row: Row, tokenizer: Any) -> tuple[list[int], list[bool]]:
    data = {key: value for key, value in row.data.items() if value is not None}
    answer = next((data[key] for key in ("response", "completion", "output") if key in data), None)
    if "input_ids" in data and "prompt_length" in data:
        return _check_tokens(data["input_ids"], data["prompt_length"], row.origin, vocab_size=len(tokenizer))
    if "messages" in data or "conversations" in data:
        return _encode_chat(data.get("messages", data.get("conversations")), data.get("tools"), row.origin, tokenizer)
    if "prompt" in data and answer is not None:
        return _encode_answer(data["prompt"], answer, row.origin, tokenizer)
    if "instruction" in data and answer is not None:
        parts = [data["instruction"], data.get("input", "")]
        if not all(isinstance(part, str) for part in parts):
            raise BadInput(f"{row.origin}: `instruction` and `input` should be text")
        return _encode_answer("".join(f"{part}\n\n" for part in parts if part), answer, row.origin, tokenizer)
    if "text" in data and not isinstance(data["text"], str):
        raise BadInput(f"{row.origin}: `text` should be text, got {type(data['text']).__name__}")
    if "text" in data:
        input_ids = list(tokenizer(data["text"])["input_ids"])
        return input_ids, [position > 0 or token != tokenizer.bos_token_id for position, token in enumerate(input_ids)]
    raise BadInput(f"{row.origin}: unknown row shape with keys {', '.join(data) or '(none)'}; known are {ROW_SHAPES}")


def _check_tokens(input_ids: Any, prompt_length: Any, origin: str, *, vocab_size: int) -> tuple[list[int], list[bool]]:
    if not isinstance(input_ids, list) or any(type(token) is not int for token in input_ids):
        raise BadInput(f"{origin}: `input_ids` should be a list of whole numbers")
    for position, token in enumerate(input_ids):
        if not 0 <= token < vocab_size:
            raise BadInput(f"{origin}: input_ids[{position}] is {token}, outside the vocabulary of {vocab_size}")
    if type(prompt_length) is not int or not 0 <= prompt_length <= len(input_ids):
        raise BadInput(f"{origin}: `prompt_length` should be between 0 and {len(input_ids)}, got {prompt_length!r}")
    return input_ids, [position >= prompt_length for position in range(len(input_ids))]


def _encode_answer(prompt: Any, answer: Any, origin: str, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """The boundary lies between ids: prompt and answer are tokenised apart, as a serving engine sees them."""
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise BadInput(f"{origin}: prompt and response should be text; give a chat as `messages`")
    prompt_ids = list(tokenizer(prompt)["input_ids"])
    answer_ids = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    if tokenizer.eos_token_id is not None:
        answer_ids.append(tokenizer.eos_token_id)
    return prompt_ids + answer_ids, [False] * len(prompt_ids) + [True] * len(answer_ids)


def _normalise(turns: Any, origin: str) -> list[Message]:
    """OpenAI or ShareGPT turns as OpenAI messages: known roles, text content, tool-call arguments as objects."""
    if not isinstance(turns, list) or not turns:
        raise BadInput(f"{origin}: a chat should be a list of turns with at least one")
    messages = []
    for index, turn in enumerate(turns):
        where = f"{origin}: turn {index}"
        if not isinstance(turn, Mapping):
            raise BadInput(f"{where} should be an object, got {type(turn).__name__}")
        message = {SHAREGPT_KEYS.get(key, key): value for key, value in turn.items() if value is not None}
        role = str(message.get("role"))
        if role not in ROLES:
            raise BadInput(f"{where} has the role {role!r}; known are {', '.join(ROLES)}")
        message["role"] = ROLES[role]
        if isinstance(message.get("content"), list):
            message["content"] = "".join(_text_of(part, where) for part in message["content"])
        if not isinstance(message.get("content", "" if message.get("tool_calls") else None), str):
            raise BadInput(f"{where} ({role}) has no text as its content")
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_call_with_object(call) for call in message["tool_calls"]]
        messages.append(message)
    return messages


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise BadInput(f"{where} has content that is not text: {str(part)[:60]}")


def _call_with_object(call: Any) -> Any:
    """OpenAI's API gives tool-call arguments as JSON text, chat templates take objects."""
    try:
        return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
    except (KeyError, TypeError, ValueError):
        return call  # an object already, or another form that the template may know


def _encode_chat(turns: Any, tools: Any, origin: str, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """The whole conversation rendered once, and the mask of its assistant turns.

    A template with `{% generation %}` says itself what the assistant writes. Otherwise each turn is found by
    `answer_span`, with two renderings a turn or six: quadratic in the text of a long conversation, simple, and exact.
    """
    messages = _normalise(turns, origin)
    if not getattr(tokenizer, "chat_template", None):
        problem = f"tokenizer of {tokenizer.name_or_path} has no chat template"
        raise BadInput(f"{origin}: {problem}; give plain `text` or `prompt`/`response` rows")
    try:
        chat = _Chat(tokenizer=tokenizer, tools=(json.loads(tools) if isinstance(tools, str) else tools) or None)
        template = tokenizer.get_chat_template(tools=chat.tools)
        if tokenizer.is_fast and re.search(r"\{%-?\s*generation\s*-?%\}", template):
            input_ids, spans = chat.marked_spans(messages)
        else:
            input_ids = chat.render(messages)
            answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            spans = [chat.answer_span(messages, index, full=input_ids) for index in answers]
    except RENDER_ERRORS as error:
        raise BadInput(f"{origin}: the chat template refuses this row: {' '.join(str(error).split())}") from error
    loss_mask = [False] * len(input_ids)
    for start, end in spans:
        end = chat.close(input_ids, start, end)
        loss_mask[start:end] = [True] * (end - start)
    return input_ids, loss_mask


@dataclass(frozen=True)
class _Chat:
    """A tokenizer's chat template: renders messages to token ids and finds the assistant's tokens among them."""

    tokenizer: Any
    tools: list[Any] | None

    def render(self, messages: list[Message], *, generation_prompt: bool = False) -> list[int]:
        encoded = self.tokenizer.apply_chat_template(
            messages, tools=self.tools, add_generation_prompt=generation_prompt, return_dict=True
        )
        return list(encoded["input_ids"])

    def marked_spans(self, messages: list[Message]) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the runs of tokens that the template's own `{% generation %}` blocks mark."""
        apply = self.tokenizer.apply_chat_template
        encoded = apply(messages, tools=self.tools, return_dict=True, return_assistant_tokens_mask=True)
        mask = [0, *encoded["assistant_masks"], 0]
        edges = [position for position in range(len(mask) - 1) if mask[position] != mask[position + 1]]
        return list(encoded["input_ids"]), list(zip(edges[::2], edges[1::2], strict=True))

    def answer_span(self, messages: list[Message], index: int, *, full: list[int]) -> tuple[int, int]:
        """Where in `full`, the ids of the whole conversation, assistant message `index` lies: [start, end).

        First the way serving sees it: the prompt up to the turn, and the same with the answer. If both are how the
        whole conversation begins, the answer is what the second adds. Templates that render history differently (the
        reasoning of earlier turns left out, the system prompt moved, the last turn closed otherwise) fail that; then
        the turn is what changes in `full` when another answer stands in its place.
        """
        span = self._span_after_prompt(messages, index, full)
        return span if span is not None else self._span_that_changes(messages, index, full)

    def _span_after_prompt(self, messages: list[Message], index: int, full: list[int]) -> tuple[int, int] | None:
        try:
            prompt = self.render(messages[:index], generation_prompt=True)
            upto = self.render(messages[: index + 1]) if index + 1 < len(messages) else full
            start = _num_common(prompt, upto)
            # An answer may rewrite the end of the generation prompt (`<think>`), but nothing before it.
            if start < len(prompt) and start < _num_common(prompt, self.render(messages[:index])):
                return None
        except RENDER_ERRORS:  # no message before the turn, or a beginning that the template does not take
            return None
        end = self.close(upto, start, len(upto))
        return (start, end) if start < end and full[:end] == upto[:end] else None

    def _span_that_changes(self, messages: list[Message], index: int, full: list[int]) -> tuple[int, int]:
        starts, tails = [], []
        for text in STAND_INS:
            stand_in = {"role": "assistant", "content": text}
            other = self.render([*messages[:index], stand_in, *messages[index + 1 :]])
            starts.append(_num_common(full, other))
            tails.append(_num_common(full[::-1], other[::-1]))
        start, end = min(starts), max(min(starts), len(full) - min(tails))
        return self._behind_generation_prompt(messages, index, full[:start]), end

    def _behind_generation_prompt(self, messages: list[Message], index: int, before: list[int]) -> int:
        """Where the turn's generation prompt ends in `before`, the ids up to its answer, or else their number.

        Between the two the template may put tokens that it puts before any answer, such as an emptied think block.
        """
        try:
            prompt = self.render(messages[:index], generation_prompt=True)
            opener = prompt[_num_common(prompt, self.render(messages[:index])) :] or prompt[-1:]
        except RENDER_ERRORS:
            return len(before)
        if not self._is_special(opener[0]) or opener[0] not in before:
            return len(before)
        at = len(before) - 1 - before[::-1].index(opener[0])
        return at + _num_common(opener, before[at:])

    def close(self, ids: list[int], start: int, end: int) -> int:
        """The end of an answer moved to just behind the special token that ends the turn, which the target must emit.

        Blank tokens behind that token are given up, and those between answer and token are taken in.
        """
        last = end - 1
        while last > start and self._is_blank(ids[last]):
            last -= 1
        if last >= start and self._is_special(ids[last]):
            return last + 1
        closing = end
        while closing < len(ids) and self._is_blank(ids[closing]):
            closing += 1
        has_end = closing < len(ids) and self._is_special(ids[closing]) and ids[closing] != self.tokenizer.bos_token_id
        return closing + 1 if has_end else end

    def _is_blank(self, token: int) -> bool:
        return not self.tokenizer.decode([token]).strip()

    def _is_special(self, token: int) -> bool:
        return self.tokenizer.decode([token]) != "" and self.tokenizer.decode([token], skip_special_tokens=True) == ""


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the left."""
    pairs = zip(first, second, strict=False)
    return next((count for count, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(first), len(second)))
