"""Finds the assistant's tokens one turn at a time, by comparing token ids of whole renderings: exact, but quadratic.

For the templates in which `assistant_masks.py` cannot prove where the answers are. No pattern is searched in rendered
text, and no template is known by name.
"""

from .messages import Message
from .rendering import RENDER_ERRORS, ChatTemplate, close, num_common
from .segments import Span

STAND_INS = ("0", "Z")  # no answer begins, or ends, with the tokens of both


def spans_turn_by_turn(messages: list[Message], full: list[int], template: ChatTemplate) -> list[Span]:
    """Where in `full`, the ids of the whole conversation, each assistant message lies.

    First as in serving: the prompt up to the turn, and the same with the answer. If both are how the whole conversation
    begins, the answer is what the second adds. Templates that render history differently (the reasoning of earlier
    turns left out, the system prompt moved, the last turn closed otherwise) fail that; then the turn is what changes in
    `full` when another answer is in its place. Two renderings a turn, or six.
    """
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = _after_prompt(messages, index, full, template) or _changing(messages, index, full, template)
            spans.append((start, close(full, start, end, template.table)))
    return spans


def _after_prompt(messages: list[Message], index: int, full: list[int], template: ChatTemplate) -> Span | None:
    """What the answer adds to the prompt before it; None if the conversation does not begin like that."""
    try:
        prompt = template.render(messages[:index], generation_prompt=True)
        upto = template.render(messages[: index + 1]) if index + 1 < len(messages) else full
        start = num_common(prompt, upto)
        # An answer may rewrite the end of the generation prompt (`<think>`), but nothing before it.
        if start < len(prompt) and start < num_common(prompt, template.render(messages[:index])):
            return None
    except RENDER_ERRORS:  # no message before the turn, or a beginning that the template does not take
        return None
    end = close(upto, start, len(upto), template.table)
    return (start, end) if start < end and full[:end] == upto[:end] else None


def _changing(messages: list[Message], index: int, full: list[int], template: ChatTemplate) -> Span:
    """The tokens of `full` that change when the answer is replaced."""
    starts, tails = [], []
    for text in STAND_INS:
        other = template.render([*messages[:index], {"role": "assistant", "content": text}, *messages[index + 1 :]])
        starts.append(num_common(full, other))
        tails.append(num_common(full[::-1], other[::-1]))
    start, end = min(starts), max(min(starts), len(full) - min(tails))
    return _behind_generation_prompt(messages[:index], full[:start], template), end


def _behind_generation_prompt(messages: list[Message], before: list[int], template: ChatTemplate) -> int:
    """Where the generation prompt that follows `messages` ends in `before`, the ids up to the answer, or their number.

    Between the two the template may put tokens that it puts before any answer, such as an emptied think block.
    """
    try:
        prompt = template.render(messages, generation_prompt=True)
        opener = prompt[num_common(prompt, template.render(messages)) :] or prompt[-1:]
    except RENDER_ERRORS:
        return len(before)
    if opener[0] not in template.table.special or opener[0] not in before:
        return len(before)
    at = len(before) - 1 - before[::-1].index(opener[0])
    return at + num_common(opener, before[at:])
