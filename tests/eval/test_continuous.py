"""Continuous batching gives each prompt the text that `generate` gives it alone, whatever shares its batch."""

from collections import deque

import pytest
from headstart.eval.continuous import Asked, answer_continuously
from headstart.eval.generate import Stop, generate

PROMPTS = [[5 + i, 7, 11 + i, 3][: 1 + i % 4] * (1 + i % 3) for i in range(11)]


def alone(target, prompt, **options):
    return generate(target, None, prompt, **options).token_ids[0]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_answers_are_those_of_generate(target, batch_size):
    waiting = deque(Asked(str(i), prompt) for i, prompt in enumerate(PROMPTS))
    answers = dict(answer_continuously(target, waiting, batch_size=batch_size, max_new_tokens=14))
    assert answers == {str(i): alone(target, prompt, max_new_tokens=14) for i, prompt in enumerate(PROMPTS)}
    assert not waiting


def test_rows_leave_as_they_end_and_others_take_their_place(target):
    texts = [alone(target, prompt, max_new_tokens=14) for prompt in PROMPTS]
    stop = Stop(frozenset({texts[0][2]}))  # ends answers at unequal lengths
    waiting = deque(Asked(str(i), prompt) for i, prompt in enumerate(PROMPTS))
    order = []
    for key, tokens in answer_continuously(target, waiting, batch_size=2, max_new_tokens=14, stop=stop):
        order.append(key)
        assert tokens == alone(target, PROMPTS[int(key)], max_new_tokens=14, eos_token_ids=stop.eos)
    assert sorted(order) == sorted(map(str, range(len(PROMPTS)))) and order != sorted(order, key=int)


def test_what_is_asked_meanwhile_is_answered_also_where_it_is_longer(target):
    waiting, answers = deque([Asked("first", PROMPTS[0])]), {}
    for key, tokens in answer_continuously(target, waiting, batch_size=2, max_new_tokens=6):
        answers[key] = tokens
        if key == "first":
            waiting.append(Asked("second", PROMPTS[0] + tokens + [9] * 90))
    assert answers["second"] == alone(target, PROMPTS[0] + answers["first"] + [9] * 90, max_new_tokens=6)
