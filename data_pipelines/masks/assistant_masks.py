"""Finds the tokens of a rendered conversation that the assistant wrote, with a constant number of renderings.

A template with `{% generation %}` marks them itself. Otherwise the conversation is rendered a second time with marks
(one private-use character per message) around the assistant's texts. If this rendering without the marks equals the
first one exactly, the positions of the marks are those of the answers. So positions are proved, and not inferred from
patterns in the template. If the proof fails, `turn_by_turn` finds the answers.
"""

import json
import re
from functools import cached_property
from itertools import pairwise
from typing import Any

from ...targets.chat.messages import REASONING_KEYS, Message
from ...targets.chat.prompts import RENDER_ERRORS, ChatTemplate
from ...targets.chat.written_ids import Written, joined
from ...targets.images.pictures import sources_in
from .rendering import Rendering, Unproved, close, num_common
from .segments import Span, TokenTable, token_table
from .turn_by_turn import spans_turn_by_turn

FIRST_MARK, NUM_MARKS = 0xF0000, 0xFFFE  # a private-use plane of Unicode, which texts do not use
MARKS = re.compile(f"[{chr(FIRST_MARK)}-{chr(FIRST_MARK + NUM_MARKS - 1)}]")


class Chat(ChatTemplate):
    """A chat template that also finds the assistant's tokens."""

    @property
    def table(self) -> TokenTable:
        return token_table(self.tokenizer)

    def sequences(self, messages: list[Message]) -> list[Written]:
        """The token ids of the conversation, with the span of each answer in order, its end token included.

        Each answer stands behind the ids of its prompt alone, which are what the target is given in serving; before a
        last answer they are those of `ChatTemplate.prompt`. In the whole conversation, tokens may reach across the
        border of a prompt and its answer: `joined` then begins another sequence.
        """
        whole = Rendering.of(self.render_text(messages), self.table)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        is_marked = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) and not sources_in(messages)
        if self.tokenizer.is_fast and is_marked:
            spans = self._spans_by_template(messages)
        else:
            try:
                spans = self._spans_by_marks(messages, answers, whole)
            except RENDER_ERRORS:  # not proved, or the template refuses the marked copy or the last prompt
                spans = spans_turn_by_turn(messages, whole.ids, self)
        if not spans:
            return [Written(whole.ids, [])]
        borders = self._borders(messages, answers, whole, spans)
        turns = [whole.turn(span, border) for span, border in zip(spans, borders, strict=True)]
        if messages[-1]["role"] == "assistant" and len(messages) > 1:
            turns[-1] = self._last_turn(messages, whole, spans[-1]) or turns[-1]
        *earlier, last = joined(turns)
        return [*earlier, Written([*last.input_ids, *whole.ids[spans[-1][1] :]], last.spans)]

    def leaves_out_calls(self, messages: list[Message]) -> bool:
        """Whether the template omits a tool call: a mark in its function's name is missing in the rendering."""
        marks, marked = iter(range(FIRST_MARK, FIRST_MARK + NUM_MARKS)), list(messages)
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and isinstance(message.get("tool_calls"), list):
                calls = [_with_marked_name(call, chr(next(marks))) for call in message["tool_calls"]]
                marked[index] = {**message, "tool_calls": calls}
        wanted = set(MARKS.findall(json.dumps(marked, ensure_ascii=False, default=str)))
        try:
            return bool(wanted - set(MARKS.findall(self.render_text(marked) if wanted else "")))
        except RENDER_ERRORS:  # the template refuses the marked name, which is none of the tools
            return False

    def _spans_by_template(self, messages: list[Message]) -> list[Span]:
        """The answers' spans from the template's own `{% generation %}` blocks."""
        encoded = self.tokenizer.apply_chat_template(
            self.as_taken(messages),
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
            **self.arguments,
        )
        ids, mask = list(encoded["input_ids"]), [0, *encoded["assistant_masks"], 0]
        edges = [position for position, (before, after) in enumerate(pairwise(mask)) if before != after]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        return [(start, close(ids, start, end, self.table)) for start, end in spans]

    def _spans_by_marks(self, messages: list[Message], answers: list[int], whole: Rendering) -> list[Span]:
        """The answers' spans. Raises Unproved if the marks do not prove them.

        An answer begins after the generation prompt, or after the part of it that the conversation has there, and ends
        with the special token that follows the assistant's text.
        """
        if not answers or not whole.starts:
            raise Unproved
        written = self._written(messages, answers, whole.text)
        opener = self._opener(messages, answers)
        ends = [last for _, last in written]
        begun = zip([0, *ends], written, strict=False)
        turns = [whole.start_of_turn(behind, first, opener, self.markers) for behind, (first, _) in begun]
        if any(messages[index].get("tool_calls") for index in answers):
            headers = [header for header, _ in turns]
            ends = self._behind_tool_calls(messages, answers, whole.text, ends, headers, opener)
        return [
            (start, whole.end_of_turn(end, self.markers, is_last=index + 1 == len(messages)))
            for index, (_, start), end in zip(answers, turns, ends, strict=True)
        ]

    def _borders(
        self, messages: list[Message], answers: list[int], whole: Rendering, spans: list[Span]
    ) -> list[int | None]:
        """Where the prompt of each answer ends, in characters of the whole conversation; None if that is not known."""
        if whole.starts:
            opener = self._opener_text(messages, answers)
            return [whole.border(start, opener) for start, _ in spans]
        borders: list[int | None] = []
        for index in answers:
            try:
                text = self._prompt_text(messages[:index])
            except RENDER_ERRORS:
                text = ""
            borders.append(len(text) if text and whole.text.startswith(text) else None)
        return borders

    def _last_turn(self, messages: list[Message], whole: Rendering, span: Span) -> tuple[list[int], list[int]] | None:
        """The ids of the last prompt, and those of the answer behind it; None if the template refuses the prompt.

        Templates may render a conversation otherwise than its prompt with the answer behind it: drop the answer's
        trace, or the marker with which the prompt opens it, or traces before it.
        """
        try:
            text = self._prompt_text(messages[:-1])
        except RENDER_ERRORS:
            return None
        answer = whole.ids[span[0] : span[1]]
        dropped = self._dropped_trace(messages[-1], answer)
        if dropped is None:
            is_start = whole.text.startswith(text)
            return whole.turn(span, len(text)) if is_start else (self.table.ids(text), answer)
        if self.markers and text.rstrip().endswith(self.markers[0]):
            dropped = dropped.removeprefix(self.markers[0]).lstrip("\n")
        return self.table.ids(text), [
            *self.table.ids(dropped),
            *(answer[-1:] if answer[-1] in self.table.special else []),
        ]

    def _dropped_trace(self, last: Message, answer: list[int]) -> str | None:
        """The content of the last message, if the template dropped the reasoning trace in it (as DeepSeek-R1's does);
        None if it did not."""
        if not self.markers or self.markers[1] not in last["content"]:
            return None
        opens, closes = self.markers
        trace = last["content"].partition(closes)[0].removeprefix(opens)
        return last["content"] if trace.strip() and closes not in self._text(answer) else None

    def _prompt_text(self, messages: list[Message]) -> str:
        """The rendering up to where the assistant answers, rendered once for each number of messages of a row."""
        if len(messages) not in self._prompt_texts:
            self._prompt_texts[len(messages)] = self.render_text(messages, generation_prompt=True)
        return self._prompt_texts[len(messages)]

    @cached_property
    def _prompt_texts(self) -> dict[int, str]:
        return {}

    def _text(self, ids: list[int]) -> str:
        return "".join(map(self.table.text, ids))

    def _written(self, messages: list[Message], answers: list[int], text: str) -> list[Span]:
        """The span in characters of the assistant's text in each answer. Raises Unproved if the marks do not prove it.

        The end of an answer that is empty after its trace is marked only if the rendering stays the same, that is, if
        the template does not strip blanks there.
        """
        if len(messages) > NUM_MARKS or MARKS.search(text):
            raise Unproved
        for marks_empty in (True, False):
            marked = list(messages)
            for index in answers:
                marked[index] = self._marked(messages[index], chr(FIRST_MARK + index), marks_empty=marks_empty)
            rendered = self.render_text(marked)
            if MARKS.sub("", rendered) == text:
                return _marked_spans(rendered, answers)
        raise Unproved

    def _marked(self, message: Message, mark: str, *, marks_empty: bool) -> Message:
        """The message with marks around its texts (without their outer blanks) and after the names of called tools."""
        marked = dict(message)
        for key in ("content", *REASONING_KEYS):
            if isinstance(message.get(key), str):
                marked[key] = self._around(message[key], mark, marks_empty=marks_empty)
        if isinstance(message.get("tool_calls"), list):
            marked["tool_calls"] = [_with_marked_name(call, mark) for call in message["tool_calls"]]
        return marked if marked != message else {**message, "content": message["content"] + mark}

    def _around(self, text: str, mark: str, *, marks_empty: bool) -> str:
        """A text with marks around each part between reasoning markers, as templates may drop some of the parts."""
        parts = re.split(f"({'|'.join(map(re.escape, self.markers))})", text) if self.markers else [text]
        for i, part in enumerate(parts):
            core = part.strip()
            if core and i % 2 == 0:
                before = part[: len(part) - len(part.lstrip())]
                parts[i] = f"{before}{mark}{core}{mark}{part[len(before) + len(core) :]}"
        is_empty = len(parts) > 1 and not parts[-1].strip()
        return "".join(parts) + (mark if is_empty and marks_empty else "")

    def _opener(self, messages: list[Message], answers: list[int]) -> list[int]:
        """The token ids of the generation prompt before the last answer. Raises Unproved if there is nothing before."""
        before = self._before_last_answer(messages, answers)
        if not before:
            raise Unproved
        ids = self.table.ids(self._opener_text(messages, answers))
        if ids and ids[0] in self.table.special:  # after a special token, tokens do not depend on earlier text
            return ids
        prompt, plain = self._prompt_text(before), self.render_text(before)
        if prompt == plain:
            return []
        ids = self.ids(prompt)
        return ids[num_common(ids, self.ids(plain)) :]

    def _opener_text(self, messages: list[Message], answers: list[int]) -> str:
        """The text that the generation prompt before the last answer adds; empty if there is no such text."""
        before = self._before_last_answer(messages, answers)
        if not before:
            return ""
        try:
            prompt, plain = self._prompt_text(before), self.render_text(before)
        except RENDER_ERRORS:
            return ""
        return prompt.removeprefix(plain) if prompt.startswith(plain) else ""

    def _before_last_answer(self, messages: list[Message], answers: list[int]) -> list[Message]:
        return messages[: next((i for i in reversed(answers) if i and i - 1 not in answers), 0)]

    def _behind_tool_calls(
        self,
        messages: list[Message],
        answers: list[int],
        text: str,
        ends: list[int],
        headers: list[int],
        opener: list[int],
    ) -> list[int]:
        """The end in characters of each answer, including tool calls, which continue after the marked name.

        The text that the template puts between an answer and the next turn is found in a rendering with plain answers
        in place of the calls. Raises Unproved if that text does not precede the next turn here.
        """
        calls = {index for index in answers if messages[index].get("tool_calls")}
        plain = [{"role": "assistant", "content": "0"} if i in calls else one for i, one in enumerate(messages)]
        plain_text = self.render_text(plain)
        plain_spans = self._written(plain, answers, plain_text)
        if not opener:
            raise Unproved
        plain_headers = [plain_text.rfind(self.table.text(opener[0]), 0, first) for first, _ in plain_spans]
        next_turns, next_plain_turns = [*headers[1:], len(text)], [*plain_headers[1:], len(plain_text)]
        moved = list(ends)
        for i, index in enumerate(answers):
            if index not in calls:
                continue
            between = plain_text[plain_spans[i][1] : next_plain_turns[i]]
            moved[i] = next_turns[i] - len(between)
            if moved[i] < ends[i] or text[moved[i] : next_turns[i]] != between:
                raise Unproved
        return moved


def _marked_spans(rendered: str, answers: list[int]) -> list[Span]:
    """The positions of each answer's first and last mark in the text without marks. Raises Unproved if an answer has no
    mark, or answers overlap."""
    spans: dict[int, Span] = {}
    for count, match in enumerate(MARKS.finditer(rendered)):
        index, at = ord(match.group()) - FIRST_MARK, match.start() - count
        spans[index] = (spans.get(index, (at, at))[0], at)
    written = [spans[index] for index in answers if index in spans]
    if len(written) < len(answers) or any(last > first for (_, last), (first, _) in pairwise(written)):
        raise Unproved
    return written


def _with_marked_name(call: Any, mark: str) -> Any:
    try:
        return {**call, "function": {**call["function"], "name": call["function"]["name"] + mark}}
    except (KeyError, TypeError):
        return call
