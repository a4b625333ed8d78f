"""Continuous batching gives each prompt the text that `generate` gives it alone, whatever shares its batch."""

import os
import random
import time
from collections import deque
from functools import cache
from pathlib import Path

import pytest
from headstart.eval.decoding import continuous, generate
from headstart.eval.decoding.continuous import WaitingPrompt, answer_continuously
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.replay import HostCopy
from headstart.eval.decoding.stopping import Stop
from headstart.targets.target import Target
from joining import joined_texts

PROMPTS = [[5 + i, 7, 11 + i, 3][: 1 + i % 4] * (1 + i % 3) for i in range(11)]


def alone(target, prompt, **options):
    return written(target, tuple(prompt), **options).copy()


@cache
def written(target, prompt, **options):
    return generate(target, None, list(prompt), **options).token_ids[0]


@pytest.fixture(params=["one round at a time", "a round ahead"])
def rounds(request, monkeypatch):
    """Whether the next round is launched before a round's tokens are read, as on a GPU."""
    monkeypatch.setattr(continuous, "launches_ahead", lambda device: request.param == "a round ahead")


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize(("batch_size", "num_read"), [(1, 1), (3, 2), (16, 4)])
def test_answers_are_those_of_generate(target, batch_size, num_read, monkeypatch):
    monkeypatch.setattr(continuous, "most_read", lambda device, num_rows: num_read)
    texts = joined_texts(target, PROMPTS, batch_size=batch_size, max_new_tokens=14)
    assert texts == [alone(target, prompt, max_new_tokens=14) for prompt in PROMPTS]


def test_what_a_prompt_shares_with_the_one_before_it_is_read_once(target, monkeypatch):
    """As with chat templates. One prompt is the next one's beginning, one comes twice."""
    system = [3, 9, 4, 4, 8]
    prompts = [[*system, 7], [*system, 7, 2, 6], [*system, 7, 2, 6], [*system, 1], [5, *system], system]
    texts, kept, read = [alone(target, prompt, max_new_tokens=14) for prompt in prompts], [], Engine.prefill
    monkeypatch.setattr(Engine, "prefill", lambda *a, **how: kept.append(how["num_kept"]) or read(*a, **how))
    assert joined_texts(target, prompts, batch_size=2, max_new_tokens=14) == texts
    assert kept == [0, 6, 7, 5, 0, 0]


def test_a_round_is_launched_before_the_last_ones_tokens_are_read(target, monkeypatch):
    expected, order, verify, read = alone(target, [3, 9], max_new_tokens=4), [], Engine.verify, HostCopy.tolist
    monkeypatch.setattr(continuous, "launches_ahead", lambda device: True)
    monkeypatch.setattr(Engine, "verify", lambda *given: order.append("launch") or verify(*given))
    monkeypatch.setattr(HostCopy, "tolist", lambda copied: order.append("read") or read(copied))
    waiting = deque([WaitingPrompt("0", [3, 9])])
    (answer,) = answer_continuously(target, waiting, batch_size=1, max_new_tokens=4)
    assert answer == ("0", expected) and len(expected) == 4
    of_no_row, of_the_prompt = "launch", "read"
    assert order == [of_no_row, "launch", "read", of_the_prompt, *["launch", "read"] * 3]


@pytest.mark.usefixtures("rounds")
def test_rows_leave_as_they_end_and_others_take_their_place(target):
    texts = [alone(target, prompt, max_new_tokens=14) for prompt in PROMPTS]
    stop = Stop(frozenset({texts[0][2]}))  # ends answers at unequal lengths
    waiting = deque(WaitingPrompt(str(i), prompt) for i, prompt in enumerate(PROMPTS))
    order = []
    for key, tokens in answer_continuously(target, waiting, batch_size=2, max_new_tokens=14, stop=stop):
        order.append(key)
        assert tokens == alone(target, PROMPTS[int(key)], max_new_tokens=14, eos_token_ids=stop.eos)
    assert sorted(order) == sorted(map(str, range(len(PROMPTS)))) and order != sorted(order, key=int)


@pytest.mark.usefixtures("rounds")
def test_what_is_asked_meanwhile_is_answered_also_where_it_is_longer(target):
    waiting, answers = deque([WaitingPrompt("first", PROMPTS[0])]), {}
    for key, tokens in answer_continuously(target, waiting, batch_size=2, max_new_tokens=6):
        answers[key] = tokens
        if key == "first":
            waiting.append(WaitingPrompt("second", PROMPTS[0] + tokens + [9] * 90))
    assert answers["second"] == alone(target, PROMPTS[0] + answers["first"] + [9] * 90, max_new_tokens=6)


MOST_GROWTH = 32  # MiB, from the first quarter to the end: what the allocator keeps


def resident_mebibytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    "seconds", [0.5, pytest.param(int(os.environ.get("HEADSTART_SOAK_SECONDS", 120)), marks=pytest.mark.soak)]
)
@pytest.mark.timeout(0)
@pytest.mark.fast_only(rounds=["a round ahead"])
@pytest.mark.usefixtures("rounds")
def test_a_soak_leaves_memory_flat_and_every_text_the_targets_own(seconds, saved_target):
    """Prompts of 1 to 120 tokens come at a random rate; some are withdrawn while they wait, now and then all that
    decode are given up; stop strings end answers at any length. HEADSTART_SOAK_SECONDS=3600 makes an hour of it."""
    target, chance = Target.load(saved_target), random.Random(5)
    prompts = [[chance.randrange(3, 61) for _ in range(length)] for length in (1, 2, 7, 30, 120) * 3]
    some = [alone(target, prompt, max_new_tokens=6) for prompt in prompts[:5]]
    strings = [target.tokenizer.decode(text[at : at + 2]) for at, text in enumerate(some)]
    texts = [generate(target, None, p, max_new_tokens=14, stop_strings=strings).token_ids[0] for p in prompts]
    assert len({len(text) for text in texts}) > 3
    stop, start, num_answered = Stop.of(target, strings=strings), time.monotonic(), 0
    waiting: deque[WaitingPrompt] = deque()
    before = None  # MiB, after a fourth of the time

    def ask(number):
        waiting.extend(WaitingPrompt(str(i), prompts[i]) for i in (chance.randrange(15) for _ in range(number)))

    while time.monotonic() - start < seconds or num_answered < 30:
        ask(1)
        size = chance.choice([1, 3, 8])
        answers = answer_continuously(target, waiting, batch_size=size, max_new_tokens=14, stop=stop)
        for key, tokens in answers:
            assert tokens == texts[int(key)], key
            num_answered += 1
            ask(chance.choice([0, 0, 1, 1, 1, 2, 6]) if len(waiting) < 30 else 0)
            if waiting and chance.random() < 0.2:
                waiting.remove(chance.choice(waiting))
            if chance.random() < 0.02:
                answers.close()  # gives up the rows that decode
                break
        if before is None and time.monotonic() - start > seconds / 4 and num_answered > 10:
            before = resident_mebibytes()
    assert before is not None and resident_mebibytes() - before < MOST_GROWTH
