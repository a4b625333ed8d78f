"""Finds the tokens of a rendered conversation that its assistant wrote, in a constant number of renderings.

A template with `{% generation %}` marks them itself. Otherwise the conversation is rendered a second time with marks,
one private character per message, around what the assistant wrote. If that rendering without its marks equals the first
one, character by character, then the marks are where the answers are: this is proved, not guessed from the template.
"""

import json
import re
from itertools import pairwise
from typing import Any

from .messages import REASONING_KEYS, Message
from .rendering import RENDER_ERRORS, ChatTemplate, Rendering, Unproved, close, num_common
from .segments import Span
from .turn_by_turn import spans_turn_by_turn

FIRST_MARK, NUM_MARKS = 0xF0000, 0xFFFE  # a private plane of Unicode: no text has these
MARKS = re.compile(f"[{chr(FIRST_MARK)}-{chr(FIRST_MARK + NUM_MARKS - 1)}]")


class Chat(ChatTemplate):
    """A chat template that also finds the assistant's tokens."""

    def answer_spans(self, messages: list[Message]) -> tuple[list[int], list[Span]]:
        """The ids of the whole conversation, and [start, end) of each answer with the token that ends it, in order."""
        table = self.table
        if table.tokenizer.is_fast and re.search(r"\{%-?\s*generation\s*-?%\}", self.template):
            return self._spans_by_template(messages)
        text = self.render_text(messages)
        rendering = Rendering.of(text, table)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            spans = self._spans_by_marks(messages, answers, rendering)
        except RENDER_ERRORS:  # not proved, or the conversation renders, but not its marked copy or its first prompt
            spans = spans_turn_by_turn(messages, rendering.ids, self)
        return self._with_dropped_trace(messages, rendering.ids, spans)

    def leaves_out_calls(self, messages: list[Message]) -> bool:
        """Whether a tool call is not in the rendered conversation: its name, with a mark of its own, does not show."""
        marks, marked = iter(range(FIRST_MARK, FIRST_MARK + NUM_MARKS)), list(messages)
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and isinstance(message.get("tool_calls"), list):
                calls = [_with_marked_name(call, chr(next(marks))) for call in message["tool_calls"]]
                marked[index] = {**message, "tool_calls": calls}
        wanted = set(MARKS.findall(json.dumps(marked, ensure_ascii=False, default=str)))
        try:
            return bool(wanted - set(MARKS.findall(self.render_text(marked) if wanted else "")))
        except RENDER_ERRORS:  # of a name that is not one of the tools
            return False

    def _spans_by_template(self, messages: list[Message]) -> tuple[list[int], list[Span]]:
        """The runs of tokens that the template's own `{% generation %}` blocks mark."""
        how = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        encoded = self.table.tokenizer.apply_chat_template(messages, tools=self.tools, **how)
        ids, mask = list(encoded["input_ids"]), [0, *encoded["assistant_masks"], 0]
        edges = [position for position, (before, after) in enumerate(pairwise(mask)) if before != after]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        return ids, [(start, close(ids, start, end, self.table)) for start, end in spans]

    def _spans_by_marks(self, messages: list[Message], answers: list[int], whole: Rendering) -> list[Span]:
        """The answers' spans. Unproved: the marks do not prove them.

        An answer begins behind the generation prompt, as far as the conversation has it there, and ends with the
        special token that follows what the assistant wrote.
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

    def _with_dropped_trace(
        self, messages: list[Message], ids: list[int], spans: list[Span]
    ) -> tuple[list[int], list[Span]]:
        """The same for a last message whose reasoning trace the template drops, as DeepSeek-R1's does.

        The target writes the trace, though: its prompt, then trace and answer, then the token that ended the answer.
        """
        last = messages[-1]
        if not self.markers or last["role"] != "assistant" or not spans:
            return ids, spans
        (opens, closes), (start, end) = self.markers, spans[-1]
        trace = last["content"].partition(closes)[0].removeprefix(opens)
        if closes not in last["content"] or not trace.strip() or closes in self._text(ids[start:end]):
            return ids, spans
        prompt = self.render(messages[:-1], generation_prompt=True)
        if ids[:start] != prompt[:start]:
            return ids, spans
        answer = last["content"]
        if self._text(prompt).rstrip().endswith(opens):
            answer = answer.removeprefix(opens).lstrip("\n")
        whole = [*prompt, *self.table.ids(answer), *(ids[end - 1 : end] if ids[end - 1] in self.table.special else [])]
        return whole, [*spans[:-1], (len(prompt), len(whole))]

    def _text(self, ids: list[int]) -> str:
        return "".join(map(self.table.text, ids))

    def _written(self, messages: list[Message], answers: list[int], text: str) -> list[Span]:
        """Where in the text each answer's own words begin and end. Unproved: the marks do not prove it.

        Of an answer that is empty behind its trace, the end is marked where the template keeps blanks, or else not.
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
        """The message with marks around its texts, within their outer blanks, and behind the names that it calls."""
        marked = dict(message)
        for key in ("content", *REASONING_KEYS):
            if isinstance(message.get(key), str):
                marked[key] = self._around(message[key], mark, marks_empty=marks_empty)
        if isinstance(message.get("tool_calls"), list):
            marked["tool_calls"] = [_with_marked_name(call, mark) for call in message["tool_calls"]]
        return marked if marked != message else {**message, "content": message["content"] + mark}

    def _around(self, text: str, mark: str, *, marks_empty: bool) -> str:
        """Marks around each part of a text between reasoning markers, since templates keep or drop these apart."""
        parts = re.split(f"({'|'.join(map(re.escape, self.markers))})", text) if self.markers else [text]
        for i, part in enumerate(parts):
            core = part.strip()
            if core and i % 2 == 0:
                before = part[: len(part) - len(part.lstrip())]
                parts[i] = f"{before}{mark}{core}{mark}{part[len(before) + len(core) :]}"
        is_empty = len(parts) > 1 and not parts[-1].strip()
        return "".join(parts) + (mark if is_empty and marks_empty else "")

    def _opener(self, messages: list[Message], answers: list[int]) -> list[int]:
        """The ids that the template adds to the first prompt to have it answered. Unproved: no prompt is answered."""
        before = messages[: next((index for index in answers if index), 0)]
        if not before:
            raise Unproved
        prompt, plain = self.render_text(before, generation_prompt=True), self.render_text(before)
        if prompt.startswith(plain):
            ids = self.table.ids(prompt[len(plain) :])
            if not ids or ids[0] in self.table.special:  # a special token: tokenised alike behind any text
                return ids
        ids = self.render(before, generation_prompt=True)
        return ids[num_common(ids, self.render(before)) :]

    def _behind_tool_calls(
        self,
        messages: list[Message],
        answers: list[int],
        text: str,
        ends: list[int],
        headers: list[int],
        opener: list[int],
    ) -> list[int]:
        """Where in the text each answer ends: a tool call goes on behind its name.

        What the template puts between an answer and the next turn is taken from a conversation in which plain answers
        stand in for the calls. Unproved: the text does not have it there.
        """
        plain = list(messages)
        for index in answers:
            if messages[index].get("tool_calls"):
                plain[index] = {"role": "assistant", "content": "0"}
        other = self.render_text(plain)
        written = self._written(plain, answers, other)
        if not opener:
            raise Unproved
        their_headers = [other.rfind(self.table.text(opener[0]), 0, first) for first, _ in written]
        moved = list(ends)
        limits, their_limits = [*headers[1:], len(text)], [*their_headers[1:], len(other)]
        for i, index in enumerate(answers):
            if messages[index].get("tool_calls"):
                between = other[written[i][1] : their_limits[i]]
                moved[i] = limits[i] - len(between)
                if moved[i] < ends[i] or text[moved[i] : limits[i]] != between:
                    raise Unproved
        return moved


def _marked_spans(rendered: str, answers: list[int]) -> list[Span]:
    """Each answer's first and last mark, as positions in the text without marks. Unproved: an answer has none, or their
    order differs."""
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
