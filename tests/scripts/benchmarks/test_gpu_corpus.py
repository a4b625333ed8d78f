"""The GPU suite's text: functions to complete, files that are never on two sides, what the caller adds."""

import pytest
from headstart.scripts.benchmarks.gpu.corpus import Corpus, completions, function_bodies, installed_texts

SOURCE = '''import os


def first(path):
    """Says what it does.

    In several lines.
    """
    # a comment belongs to the question
    names = os.listdir(path)
    if not names:
        return None
    return sorted(names)[0]


class Box:
    def one_line(self): return 1

    async def fill(self, things):
        for thing in things:
            await self.add(thing)
        return self
'''


def test_a_function_is_parted_behind_its_docstring():
    lines = SOURCE.splitlines()
    parts = [(lines[start], lines[end - 1]) for start, end in function_bodies(SOURCE)]
    assert sorted(parts) == [
        ("        for thing in things:", "        return self"),
        ("    names = os.listdir(path)", "    return sorted(names)[0]"),
    ]
    assert function_bodies("no Python at all (") == []


def test_completions_put_the_file_together_again():
    for chat in completions([SOURCE], 10, contexts=(60, 120), seed=0):
        assert [turn["role"] for turn in chat] == ["user", "assistant"]
        assert len(chat[0]["content"]) in (60, 120) and chat[0]["content"] + chat[1]["content"] in SOURCE
    assert len(completions([SOURCE], 10, contexts=(60,), seed=0)) == 2
    assert completions([SOURCE], 1, contexts=(60,), seed=0) == completions([SOURCE], 1, contexts=(60,), seed=0)
    assert completions([SOURCE], 10, contexts=(10_000,), seed=0) == [], "the context asked for is not there"


def test_no_text_is_on_two_sides():
    texts = [f"text {i}" for i in range(400)]
    corpus, again = Corpus.of(texts), Corpus.of(reversed(texts))
    parts = [corpus.pretrain, corpus.prompts, corpus.held_out]
    assert sorted(text for part in parts for text in part) == sorted(texts) and all(len(part) > 20 for part in parts)
    assert set(again.held_out) == set(corpus.held_out) and len(corpus.pretrain) > 200


@pytest.mark.slow  # lists all installed files
def test_installed_texts_are_real_and_end_in_time():
    texts = list(installed_texts(100_000))
    assert 100_000 <= sum(map(len, texts)) <= 500_000 and len(set(texts)) == len(texts) > 3
    assert texts == list(installed_texts(100_000))
