"""Prompts that are decoded by continuous batching, for tests of several files."""

from collections import deque
from typing import Any

from headstart.eval.decoding.continuous import WaitingPrompt, answer_continuously
from headstart.targets.target import Target


def joined_texts(target: Target, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    """What is written behind each prompt. Args: how: of `answer_continuously`."""
    waiting = deque(WaitingPrompt(str(i), prompt) for i, prompt in enumerate(prompts))
    answers = dict(answer_continuously(target, waiting, **how))
    assert not waiting
    return [answers[str(i)] for i in range(len(prompts))]
