"""The draft vocabulary holds the most frequent supervised tokens, and coverage is their true share."""

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.data_pipelines.chat import Sample
from headstart.data_pipelines.vocab import coverage, draft_vocabulary


def sample(*tokens: int, prompt: tuple[int, ...] = ()) -> Sample:
    mask = [False] * len(prompt) + [True] * len(tokens)
    return Sample(input_ids=[*prompt, *tokens], loss_mask=mask)


SAMPLES = [sample(7, 7, 7, 5, 5, prompt=(1, 1, 1, 1, 1, 1)), sample(5, 9, 3, 7, prompt=(1, 2))]  # 7: 4, 5: 3, 9 3: 1


def test_the_most_frequent_supervised_tokens_are_kept_ascending() -> None:
    ids = draft_vocabulary(SAMPLES, size=2, vocab_size=12)
    assert ids.dtype == torch.int64 and ids.tolist() == [5, 7]


def test_ties_and_free_places_go_to_the_lowest_ids() -> None:
    assert draft_vocabulary(SAMPLES, size=3, vocab_size=12).tolist() == [3, 5, 7]
    assert draft_vocabulary(SAMPLES, size=6, vocab_size=12).tolist() == [0, 1, 3, 5, 7, 9]
    assert draft_vocabulary([], size=3, vocab_size=12).tolist() == [0, 1, 2]
    assert draft_vocabulary(SAMPLES, size=12, vocab_size=12).tolist() == list(range(12))


def test_always_ids_are_kept_whatever_their_count() -> None:
    assert draft_vocabulary(SAMPLES, size=3, vocab_size=12, always=[11, 11, 7]).tolist() == [5, 7, 11]
    assert draft_vocabulary(SAMPLES, size=2, vocab_size=12, always=[10, 11]).tolist() == [10, 11]


def test_coverage_is_the_share_of_supervised_tokens() -> None:
    assert coverage(SAMPLES, torch.tensor([5, 7])) == pytest.approx(7 / 9)
    assert coverage(SAMPLES, torch.tensor([1, 2])) == 0.0
    assert coverage(SAMPLES, draft_vocabulary(SAMPLES, size=12, vocab_size=12)) == 1.0


@pytest.mark.parametrize(
    ("size", "always", "problem"),
    [
        (13, [], "draft vocabulary of 13 tokens: should be between 1 and the target's 12"),
        (0, [], "draft vocabulary of 0 tokens: should be between 1 and the target's 12"),
        (1, [3, 4], "draft vocabulary of 1 tokens: 2 ids are to be kept always"),
        (3, [12], "token id 12 is outside the target's vocabulary of 12"),
        (3, [-1], "token id -1 is outside the target's vocabulary of 12"),
    ],
)
def test_impossible_sizes_and_ids_are_refused(size: int, always: list[int], problem: str) -> None:
    with pytest.raises(BadInput, match=f"^{problem}$"):
        draft_vocabulary(SAMPLES, size=size, vocab_size=12, always=always)


def test_a_sample_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(BadInput, match="token id 9 is outside the target's vocabulary of 8"):
        draft_vocabulary(SAMPLES, size=3, vocab_size=8)


def test_coverage_of_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="no token is supervised"):
        coverage([sample(prompt=(1, 2))], torch.tensor([1]))
