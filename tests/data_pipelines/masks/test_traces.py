"""A long row becomes pieces in which each supervised token is supervised once, cut where the text allows it."""

import random

import numpy as np
import pytest
from headstart.data_pipelines.masks.traces import SegmentStatistics, segment_statistics, split_sample
from headstart.data_pipelines.storage.samples import ANSWER, PROMPT, THINK, Sample


def letters(text: str, *, prompt: int) -> Sample:
    """One token per character, its code point; the first `prompt` are the prompt."""
    return Sample.of([ord(letter) for letter in text], [place >= prompt for place in range(len(text))])


def new_text(piece: Sample) -> str:
    return "".join(map(chr, piece.input_ids[piece.loss_mask]))


def split(whole: Sample, max_length: int) -> list[Sample]:
    return split_sample(whole, max_length=max_length, text_of=chr)


@pytest.mark.parametrize("seed", range(40))
def test_every_supervised_token_is_supervised_exactly_once(seed: int) -> None:
    source = random.Random(seed)
    length, max_length = source.randint(1, 400), source.randint(1, 64)
    prompt = source.randint(0, length)
    # unique ids, so that a token's place in the row can be told; turns of the user in between
    mask = [place >= prompt and (place // 17) % 3 > 0 for place in range(length)]
    whole = Sample.of(range(1000, 1000 + length), mask, segments=[source.randint(0, 2) for _ in mask])
    pieces = split_sample(whole, max_length=max_length, text_of=lambda token: source.choice(["a", ".", "\n", "\n\n"]))
    supervised = np.concatenate([piece.input_ids[piece.loss_mask] for piece in pieces] or [np.array([])])
    assert supervised.tolist() == whole.input_ids[whole.loss_mask].tolist()
    for piece in pieces:
        assert len(piece) <= max_length and piece.loss_mask.any()
        places = piece.input_ids - 1000
        assert (np.diff(places) > 0).all() and (piece.segments == whole.segments[places]).all()


def test_a_piece_is_the_prompt_then_what_came_before_then_new_tokens() -> None:
    pieces = split(letters("P" * 8 + "abcdefghijklmnopqrstuvwxyz", prompt=8), 24)
    assert [new_text(piece) for piece in pieces] == ["abcdefghijklmnop", "qrstuvwxyz"]
    assert "".join(map(chr, pieces[1].input_ids)) == "P" * 8 + "mnop" + "qrstuvwxyz"
    assert all(piece.num_cut == 0 for piece in pieces)


def test_a_later_piece_has_a_quarter_of_the_room_as_context() -> None:
    pieces = split(letters("P" * 10 + "x" * 500, prompt=10), 50)
    assert len(pieces) > 3
    for piece in pieces[1:]:
        assert not piece.loss_mask[:20].any() and piece.loss_mask[20:].all()


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("aaaaaaaaa. bbb\ncc\n\nddd\neee. fff ggggggg", "aaaaaaaaa. bbb\ncc\n\n"),
        ("aaaaaaaaa. bbb\nccccddd\neee. fff ggggggg", "aaaaaaaaa. bbb\nccccddd\n"),
        ("aaaaaaaaa. bbbccccddd 3.5 eee. fffggggggg", "aaaaaaaaa. bbbccccddd 3.5 eee."),
        ("aaaa\n\n" + "b" * 40, "aaaa\n\n" + "b" * 26),
    ],
)
def test_cuts_are_behind_paragraphs_else_lines_else_sentences(text: str, first: str) -> None:
    assert new_text(split(letters(text, prompt=0), 32)[0]) == first


def test_a_prompt_of_more_than_half_keeps_its_beginning_and_its_end() -> None:
    pieces = split(letters("B" + "x" * 50 + "question" + "answer", prompt=59), 18)
    assert [new_text(piece) for piece in pieces] == ["answer"]
    assert "".join(map(chr, pieces[0].input_ids)) == "Bquestionanswer"


def test_stretches_without_supervised_tokens_make_no_piece() -> None:
    whole = letters("Pab" + "u" * 100 + "cd", prompt=1)
    whole.loss_mask[3:103] = False
    pieces = split(whole, 16)
    assert [new_text(piece) for piece in pieces] == ["ab", "cd"]
    assert split(letters("PPP", prompt=3), 2) == []


def test_statistics_are_by_segment_over_the_samples_that_have_it() -> None:
    samples = [
        Sample.of(range(4), [False, True, True, True], segments=[PROMPT, THINK, THINK, ANSWER]),
        Sample.of(range(3), [False, False, True], segments=[PROMPT, PROMPT, ANSWER]),
    ]
    stats = segment_statistics(samples)
    assert list(stats) == ["prompt", "think", "answer", "supervised"]
    assert stats["prompt"] == SegmentStatistics(2, 3, mean=1.5, p50=1.5, p90=1.9, max=2)
    assert stats["think"] == SegmentStatistics(1, 2, mean=2.0, p50=2.0, p90=2.0, max=2)
    assert stats["supervised"].num_tokens == 4
    assert segment_statistics([]) == {}
