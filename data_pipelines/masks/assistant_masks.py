"""Which tokens of a rendered conversation its assistant wrote, in a number of renderings that does not grow with it.

A template with `{% generation %}` says it itself. Otherwise the conversation is rendered a second time with marks, one
private character per message, around what the assistant wrote. If that rendering without its marks is the first one,
character by character, then the marks stand where the answers are: proved, not guessed from the look of the template.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from jinja2.exceptions import TemplateError

from .messages import REASONING_KEYS, Message
from .rendering import Rendering, close, num_common
from .segments import Span, TokenTable
from .turn_by_turn import spans_turn_by_turn

RENDER_ERRORS = (TemplateError, TypeError, ValueError)  # what a template raises on messages that it does not take
FIRST_MARK, NUM_MARKS = 0xF0000, 0xFFFE  # a private plane of Unicode: no text has these
MARKS = re.compile(f"[{chr(FIRST_MARK)}-{chr(FIRST_MARK + NUM_MARKS - 1)}]")


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template with a row's tools: renders messages and finds the assistant's tokens."""

    table: TokenTable
    tools: list[Any] | None
    markers: tuple[str, str] | None  # of reasoning traces

    @cached_property
    def template(self) -> str:
        return self.table.tokenizer.get_chat_template(tools=self.tools)

    @property
    def reasoning_key(self) -> str | None:
        """The message key under which the template takes a reasoning trace; None where it takes none."""
        known = self.table.reasoning_keys
        if self.template not in known:
            known[self.template] = next(filter(self._reads, REASONING_KEYS), None)
        return known[self.template]

    def answer_spans(self, messages: list[Message]) -> tuple[list[int], list[Span]]:
        """The ids of the whole conversation, and [start, end) of each answer with the token that ends it, in order."""
        table = self.table
        if table.tokenizer.is_fast and re.search(r"\{%-?\s*generation\s*-?%\}", self.template):
            return self._spans_by_template(messages)
        text = self.render_text(messages)
        rendering = Rendering.of(text, table)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans = None
        if answers and rendering.starts:
            try:
                spans = self._spans_by_marks(messages, answers, rendering)
            except RENDER_ERRORS:  # the conversation renders, but not its marked copy or its first prompt
                spans = None
        if spans is None:
            how: dict[str, Any] = {"render": self.render, "table": table, "render_errors": RENDER_ERRORS}
            spans = spans_turn_by_turn(messages, rendering.ids, **how)
        return self._with_dropped_trace(messages, rendering.ids, spans)

    def render_text(self, messages: list[Message], *, generation_prompt: bool = False) -> str:
        return self.table.tokenizer.apply_chat_template(
            messages, tools=self.tools, add_generation_prompt=generation_prompt, tokenize=False
        )

    def render(self, messages: list[Message], *, generation_prompt: bool = False) -> list[int]:
        text = self.render_text(messages, generation_prompt=generation_prompt)
        return list(self.table.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _reads(self, key: str) -> bool:
        asked, said = {"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}
        try:
            return self.render_text([asked, {**said, key: "Z"}]) != self.render_text([asked, said])
        except RENDER_ERRORS:
            return False

    def _spans_by_template(self, messages: list[Message]) -> tuple[list[int], list[Span]]:
        """The runs of tokens that the template's own `{% generation %}` blocks mark."""
        apply = self.table.tokenizer.apply_chat_template
        how = {"return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        encoded = apply(messages, tools=self.tools, return_dict=True, **how)
        ids, mask = list(encoded["input_ids"]), [0, *encoded["assistant_masks"], 0]
        edges = [position for position, (here, there) in enumerate(pairwise(mask)) if here != there]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        return ids, [(start, close(ids, start, end, self.table)) for start, end in spans]

    def _spans_by_marks(self, messages: list[Message], answers: list[int], whole: Rendering) -> list[Span] | None:
        """The answers' spans; None where the marks do not prove them.

        An answer begins behind the generation prompt, as far as the conversation has it there, and ends with the
        special token that follows what the assistant wrote.
        """
        written = self._written(messages, answers, whole.text)
        if written is None:
            return None
        opener = self._opener(messages, answers)
        if opener is None:
            return None
        headers, starts = [], []
        for behind, (first, _) in zip([0, *(last for _, last in written)], written, strict=False):
            found = whole.start_of_turn(behind, first, opener, self.markers)
            if found is None:
                return None
            headers.append(found[0])
            starts.append(found[1])
        ends = [last for _, last in written]
        if any(messages[index].get("tool_calls") for index in answers):
            moved = self._behind_tool_calls(messages, answers, whole.text, ends, headers, opener)
            if moved is None:
                return None
            ends = moved
        spans = []
        for index, start, end in zip(answers, starts, ends, strict=True):
            closing = whole.end_of_turn(end, self.markers, is_last=index + 1 == len(messages))
            if closing is None:
                return None
            spans.append((start, closing))
        return spans

    def _with_dropped_trace(
        self, messages: list[Message], ids: list[int], spans: list[Span]
    ) -> tuple[list[int], list[Span]]:
        """The same, but for a trace in the last message that the template drops from it, as DeepSeek-R1's does.

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
        answer_ids = list(self.table.tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"])
        whole = [*prompt, *answer_ids, *(ids[end - 1 : end] if ids[end - 1] in self.table.special else [])]
        return whole, [*spans[:-1], (len(prompt), len(whole))]

    def _text(self, ids: list[int]) -> str:
        return "".join(map(self.table.text, ids))

    def _written(self, messages: list[Message], answers: list[int], text: str) -> list[Span] | None:
        """Where in the text what each answer says begins and ends; None where the marks do not prove it.

        Of an answer that is empty behind its trace, the end is marked where the template keeps blanks, or else not.
        """
        if len(messages) > NUM_MARKS or MARKS.search(text):
            return None
        for marks_empty in (True, False):
            marked = list(messages)
            for index in answers:
                marked[index] = self._marked(messages[index], chr(FIRST_MARK + index), marks_empty=marks_empty)
            rendered = self.render_text(marked)
            if MARKS.sub("", rendered) == text:
                return _marked_places(rendered, answers)
        return None

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
        for place, part in enumerate(parts):
            core = part.strip()
            if core and place % 2 == 0:
                before = part[: len(part) - len(part.lstrip())]
                parts[place] = f"{before}{mark}{core}{mark}{part[len(before) + len(core) :]}"
        is_empty = len(parts) > 1 and not parts[-1].strip()
        return "".join(parts) + (mark if is_empty and marks_empty else "")

    def _opener(self, messages: list[Message], answers: list[int]) -> list[int] | None:
        """The ids that the template adds to the first prompt to have it answered; None where no prompt is answered."""
        before = messages[: next((index for index in answers if index), 0)]
        if not before:
            return None
        prompt, plain = self.render_text(before, generation_prompt=True), self.render_text(before)
        if prompt.startswith(plain):
            ids = self.table.tokenizer(prompt[len(plain) :], add_special_tokens=False, verbose=False)["input_ids"]
            if not ids or ids[0] in self.table.special:  # a special token: tokenised alike behind any text
                return list(ids)
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
    ) -> list[int] | None:
        """Where in the text each answer ends: a tool call goes on behind its name.

        What the template puts between an answer and the next turn is taken from a conversation in which plain answers
        stand in for the calls. None where the text does not have it there.
        """
        plain = list(messages)
        for index in answers:
            if messages[index].get("tool_calls"):
                plain[index] = {"role": "assistant", "content": "0"}
        other = self.render_text(plain)
        written = self._written(plain, answers, other)
        if written is None or not opener:
            return None
        their_headers = [other.rfind(self.table.text(opener[0]), 0, first) for first, _ in written]
        moved = list(ends)
        limits, their_limits = [*headers[1:], len(text)], [*their_headers[1:], len(other)]
        for place, index in enumerate(answers):
            if messages[index].get("tool_calls"):
                between = other[written[place][1] : their_limits[place]]
                moved[place] = limits[place] - len(between)
                if moved[place] < ends[place] or text[moved[place] : limits[place]] != between:
                    return None
        return moved


def _marked_places(rendered: str, answers: list[int]) -> list[Span] | None:
    """Where in the text without marks each answer's first and last stand; None where one has none, or order differs."""
    places: dict[int, Span] = {}
    for count, match in enumerate(MARKS.finditer(rendered)):
        index, at = ord(match.group()) - FIRST_MARK, match.start() - count
        places[index] = (places.get(index, (at, at))[0], at)
    written = [places[index] for index in answers if index in places]
    in_order = all(last <= first for (_, last), (first, _) in pairwise(written))
    return written if len(written) == len(answers) and in_order else None


def _with_marked_name(call: Any, mark: str) -> Any:
    try:
        return {**call, "function": {**call["function"], "name": call["function"]["name"] + mark}}
    except (KeyError, TypeError):
        return call
