"""Finds the assistant's tokens turn by turn, by comparing the token ids of whole renderings: exact, but quadratic.

Used if `assistant_masks.py` cannot prove where the answers are. No patterns are searched in rendered text, and no
template is a special case.
"""

from ...targets.chat.messages import Message
from ...targets.chat.prompts import RENDER_ERRORS, ChatTemplate
from .rendering import close, num_common
from .segments import Span, token_table

STAND_INS = ("0", "Z")  # replacements of an answer, which cannot begin or end like both of them


def spans_turn_by_turn(messages: list[Message], full: list[int], template: ChatTemplate) -> list[Span]:
    """The span of each assistant message in `full`, the token ids of the whole conversation.

    First, as in serving, the prompt up to the turn is rendered, and the same with the answer. If the conversation
    starts with both, the answer is what the second one adds. This fails for templates that render history differently
    (drop reasoning of earlier turns, move the system prompt, end the last turn differently). Then the answer is what
    changes in `full` if other answers replace it. This takes two or six renderings per turn.
    """
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = _after_prompt(messages, index, full, template) or _changing(messages, index, full, template)
            spans.append((start, close(full, start, end, token_table(template.tokenizer))))
    return spans


def _after_prompt(messages: list[Message], index: int, full: list[int], template: ChatTemplate) -> Span | None:
    """The tokens that the answer adds to the prompt before it; None if the conversation does not start with them."""
    try:
        prompt = template.render(messages[:index], generation_prompt=True)
        upto = template.render(messages[: index + 1]) if index + 1 < len(messages) else full
        start = num_common(prompt, upto)
        # the answer may replace the end of the generation prompt (`<think>`), but nothing before that prompt
        if start < len(prompt) and start < num_common(prompt, template.render(messages[:index])):
            return None
    except RENDER_ERRORS:  # no message before the turn, or the template refuses the shorter conversation
        return None
    end = close(upto, start, len(upto), token_table(template.tokenizer))
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
    """The end of the generation prompt after `messages` in `before`, the token ids up to the answer; if the prompt is
    not found, the end of `before`.

    Between prompt and answer a template may put tokens that precede any answer, such as an empty think block.
    """
    try:
        prompt = template.render(messages, generation_prompt=True)
        opener = prompt[num_common(prompt, template.render(messages)) :] or prompt[-1:]
    except RENDER_ERRORS:
        return len(before)
    if opener[0] not in token_table(template.tokenizer).special or opener[0] not in before:
        return len(before)
    at = len(before) - 1 - before[::-1].index(opener[0])
    return at + num_common(opener, before[at:])
