"""The assistant's tokens found one turn at a time, by comparing token ids of whole renderings: exact and quadratic.

For the templates in which `spans.py` cannot prove what it found. No pattern is searched in rendered text, and nothing
here knows a template by name.
"""

from collections.abc import Callable

from .messages import Message
from .rendering import close, num_common
from .segments import Span, TokenTable

Render = Callable[..., list[int]]  # (messages, generation_prompt=False) -> ids

STAND_INS = ("0", "Z")  # no answer begins, or ends, with the tokens of both


def spans_turn_by_turn(
    messages: list[Message], full: list[int], *, render: Render, table: TokenTable, render_errors: tuple
) -> list[Span]:
    """Where in `full`, the ids of the whole conversation, each assistant message lies.

    First the way serving sees it: the prompt up to the turn, and the same with the answer. If both are how the
    whole conversation begins, the answer is what the second adds. Templates that render history differently (the
    reasoning of earlier turns left out, the system prompt moved, the last turn closed otherwise) fail that; then
    the turn is what changes in `full` when another answer stands in its place. Two renderings a turn, or six.
    """
    spans = []
    search = _Search(messages, full, render, table, render_errors)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = search.after_prompt(index) or search.what_changes(index)
            spans.append((start, close(full, start, end, table)))
    return spans


class _Search:
    """One conversation and its ids, in which turns are looked for."""

    def __init__(
        self, messages: list[Message], full: list[int], render: Render, table: TokenTable, render_errors: tuple
    ):
        self.messages, self.full = messages, full
        self.render, self.table, self.render_errors = render, table, render_errors

    def after_prompt(self, index: int) -> Span | None:
        """What the answer adds to the prompt before it; None where the conversation does not begin like that."""
        messages, full = self.messages, self.full
        try:
            prompt = self.render(messages[:index], generation_prompt=True)
            upto = self.render(messages[: index + 1]) if index + 1 < len(messages) else full
            start = num_common(prompt, upto)
            # An answer may rewrite the end of the generation prompt (`<think>`), but nothing before it.
            if start < len(prompt) and start < num_common(prompt, self.render(messages[:index])):
                return None
        except self.render_errors:  # no message before the turn, or a beginning that the template does not take
            return None
        end = close(upto, start, len(upto), self.table)
        return (start, end) if start < end and full[:end] == upto[:end] else None

    def what_changes(self, index: int) -> Span:
        """The tokens of `full` that are not there with another answer."""
        full, starts, tails = self.full, [], []
        for text in STAND_INS:
            stand_in = {"role": "assistant", "content": text}
            other = self.render([*self.messages[:index], stand_in, *self.messages[index + 1 :]])
            starts.append(num_common(full, other))
            tails.append(num_common(full[::-1], other[::-1]))
        start, end = min(starts), max(min(starts), len(full) - min(tails))
        return self._behind_generation_prompt(index, full[:start]), end

    def _behind_generation_prompt(self, index: int, before: list[int]) -> int:
        """Where the turn's generation prompt ends in `before`, the ids up to its answer, or else their number.

        Between the two the template may put tokens that it puts before any answer, such as an emptied think block.
        """
        try:
            prompt = self.render(self.messages[:index], generation_prompt=True)
            opener = prompt[num_common(prompt, self.render(self.messages[:index])) :] or prompt[-1:]
        except self.render_errors:
            return len(before)
        if opener[0] not in self.table.special or opener[0] not in before:
            return len(before)
        at = len(before) - 1 - before[::-1].index(opener[0])
        return at + num_common(opener, before[at:])
