"""Large batches and long contexts: the same tokens as row by row."""

from functools import cache

import pytest
import torch
from drafted import untrained
from headstart.eval.decoding import generate
from headstart.heads.drafting.trees import DynamicTree

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def texts_of():
    """texts_of(target, lengths, num_new): prompts of these lengths, and what the target writes behind each alone."""

    @cache
    def write(target, lengths, num_new):
        source = torch.Generator().manual_seed(2)
        prompts = [torch.randint(3, target.vocab_size, (n,), generator=source).tolist() for n in lengths]
        return prompts, [generate(target, None, prompt, max_new_tokens=num_new).token_ids[0] for prompt in prompts]

    return write


@pytest.mark.parametrize("tree", [None, DynamicTree(num_nodes=8, depth=3, top_k=3)], ids=["chain", "tree"])
def test_64_ragged_rows_equal_single_rows(head_type, tree, target, texts_of):
    """Prompts of 1 to 64 tokens, rows that accept different lengths and end at different times."""
    head = untrained(head_type, target)
    prompts, wanted = texts_of(target, range(1, 65), 20)
    batch = generate(target, head, prompts, max_new_tokens=20, tree=tree)
    assert len({len(new) for new in batch.token_ids}) > 1, "rows end at different lengths"
    assert batch.token_ids == wanted


@pytest.fixture(scope="module")
def long_target(tiny_target):
    return tiny_target("llama", max_position_embeddings=8192)


def test_contexts_of_4096_tokens(head_type, long_target, texts_of):
    """Beside a prompt of one token, in one batch."""
    head = untrained(head_type, long_target)
    prompts, wanted = texts_of(long_target, (4096, 1, 700), 12)
    assert generate(long_target, head, prompts, max_new_tokens=12).token_ids == wanted
