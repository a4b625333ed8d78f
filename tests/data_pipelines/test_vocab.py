"""The draft vocabulary holds the most frequent supervised tokens, and coverage is their true share."""

import numpy as np
import pytest
import torch
from headstart.base.errors import BadInput
from headstart.data_pipelines import vocab
from headstart.data_pipelines.rows.samples import Sample
from headstart.data_pipelines.vocab import always_kept, coverage, covering_size, most_frequent, worthwhile_size
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def sample(*tokens: int, prompt: tuple[int, ...] = ()) -> Sample:
    mask = [False] * len(prompt) + [True] * len(tokens)
    return Sample.of([*prompt, *tokens], mask)


SAMPLES = [sample(7, 7, 7, 5, 5, prompt=(1, 1, 1, 1, 1, 1)), sample(5, 9, 3, 7, prompt=(1, 2))]  # 7: 4, 5: 3, 9 3: 1
COUNTS = vocab.count_supervised(SAMPLES, vocab_size=12)


def test_only_supervised_tokens_are_counted_and_those_of_another_vocabulary_refused() -> None:
    assert COUNTS.tolist() == [0, 0, 0, 1, 0, 3, 0, 4, 0, 1, 0, 0]
    with pytest.raises(BadInput, match="token id 9 is outside the target's vocabulary of 8"):
        vocab.count_supervised(SAMPLES, vocab_size=8)


@pytest.mark.parametrize(
    ("size", "always", "kept"),
    [
        (2, [], [5, 7]),
        (3, [], [3, 5, 7]),  # of equal counts the lowest ids
        (6, [], [0, 1, 3, 5, 7, 9]),
        (12, [], list(range(12))),
        (3, [11, 11, 7], [5, 7, 11]),
        (2, [10, 11], [10, 11]),
    ],
)
def test_the_most_frequent_supervised_tokens_are_kept_ascending(size, always, kept) -> None:
    ids = most_frequent(COUNTS, size=size, always=always)
    assert ids.dtype == torch.int64 and ids.tolist() == kept


def test_special_tokens_and_those_that_the_template_writes_are_always_kept() -> None:
    words = {"a": 0, "b": 1, "<s>": 2, "</s>": 3}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)), eos_token="</s>")
    tokenizer.add_tokens(["<|im_end|>", "<think>", "<unused>"])  # 4, 5, 6
    tokenizer.chat_template = "{{ messages[0].content + '<|im_end|>' }}<think>"
    assert always_kept(tokenizer, eos_token_ids=[2], vocab_size=7) == [2, 3, 4, 5]
    assert always_kept(tokenizer, eos_token_ids=[2], vocab_size=5) == [2, 3, 4]  # the target has no row for 5
    tokenizer.chat_template = None
    assert always_kept(tokenizer, eos_token_ids=[], vocab_size=7) == [3]


def test_coverage_is_the_share_of_supervised_tokens() -> None:
    assert coverage(COUNTS, torch.tensor([5, 7])) == pytest.approx(7 / 9)
    assert coverage(COUNTS, torch.tensor([1, 2])) == 0.0
    with pytest.raises(BadInput, match="no token is supervised"):
        coverage(0 * COUNTS, torch.tensor([1]))


@pytest.mark.parametrize(
    ("size", "always", "problem"),
    [
        (13, [], "draft vocabulary of 13 tokens: should be between 1 and the target's 12"),
        (0, [], "draft vocabulary of 0 tokens: should be between 1 and the target's 12"),
        (1, [3, 4], "draft vocabulary of 1 tokens: 2 ids must always be kept"),
        (3, [12], "token id 12 is outside the target's vocabulary of 12"),
        (3, [-1], "token id -1 is outside the target's vocabulary of 12"),
    ],
)
def test_impossible_sizes_and_ids_are_refused(size: int, always: list[int], problem: str) -> None:
    with pytest.raises(BadInput, match=f"^{problem}$"):
        most_frequent(COUNTS, size=size, always=always)


def test_the_vocabulary_is_the_smallest_that_covers_the_answers():
    counts = np.zeros(4096, dtype=np.int64)
    counts[:300] = 100
    assert covering_size(counts, [4000], share=0.995) == 512
    assert covering_size(np.ones(4096, dtype=np.int64), [], share=0.995) is None, "all tokens are used alike"
    assert covering_size(np.zeros(4096, dtype=np.int64), [], share=0.995) is None


def test_tokens_are_drafted_that_are_worth_their_rows():
    """Of a target with 100 million weights and rows of 500, those that make up 1 / 40,000 of the answers."""
    counts = np.zeros(4096, dtype=np.int64)
    counts[:1000], counts[1000:1800] = 395, 6  # of about 400,000
    assert worthwhile_size(counts, [4000], row_share=5e-6) == (1024, round((395000 + 23 * 6) / 399800, 4))
    assert worthwhile_size(counts, [], row_share=2e-6) == (2048, 1.0), "rows of a larger target"
    assert worthwhile_size(counts, list(range(2000)), row_share=5e-6)[0] == 2048
    assert worthwhile_size(np.ones(4096, dtype=np.int64), [], row_share=5e-6) == (None, None)
    assert worthwhile_size(0 * counts, [], row_share=5e-6) == (None, None)
