"""Prompts that are decoded by continuous batching, for tests of several files."""

from collections import deque
from typing import Any

import pytest
from headstart.eval.decoding import continuous, generate
from headstart.eval.decoding.continuous import WaitingPrompt, answer_continuously
from headstart.targets.target import Target


def joined_texts(target: Target, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    """What is written behind each prompt. Args: how: of `answer_continuously`."""
    waiting = deque(WaitingPrompt(str(i), prompt) for i, prompt in enumerate(prompts))
    answers = dict(answer_continuously(target, waiting, **how))
    assert not waiting
    return [answers[str(i)] for i in range(len(prompts))]


def check_joining(target: Target, prompts: list[list[int]], drafter: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three rows at a time, texts and accepted drafts are those of each prompt alone.

    Returns: tokens committed in each round of each prompt, sorted.
    """
    alone = [generate(target, drafter, prompt, max_new_tokens=14) for prompt in prompts]
    rounds, run = [], continuous.run_round
    monkeypatch.setattr(continuous, "run_round", lambda *given: rounds.append(run(*given)) or rounds[-1])
    texts = joined_texts(target, prompts, batch_size=3, max_new_tokens=14, drafter=drafter)
    assert texts == [done.token_ids[0] for done in alone]
    committed = sorted(num for done in alone for one in done.rounds[1:] for num in one.num_committed)
    behind_the_first = rounds[1:]  # which fills caches
    assert sorted(num for done, _ in behind_the_first for num in done.num_committed if num) == committed
    return committed
