"""Large batches and long contexts: the same tokens as row by row."""

import pytest
import torch
from headstart.eval.decoding import generate
from headstart.heads.drafting import DynamicTree
from headstart.heads.registry import HEADS, build_head

TREE = pytest.param(DynamicTree(num_nodes=8, depth=3, top_k=3), marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_64_ragged_rows_equal_single_rows(head_type, tree, target):
    """Prompts of 1 to 64 tokens, rows that accept different lengths and end at different times."""
    head = build_head(HEADS[head_type].config_class(type=head_type), target, seed=1).eval()
    source = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, target.vocab_size, (n,), generator=source).tolist() for n in range(1, 65)]
    batch = generate(target, head, prompts, max_new_tokens=20, tree=tree)
    assert len({len(new) for new in batch.token_ids}) > 1, "rows end at different lengths"
    assert batch.token_ids == [generate(target, None, p, max_new_tokens=20).token_ids[0] for p in prompts]


@pytest.mark.slow
def test_contexts_of_4096_tokens(head_type, tiny_target):
    """Beside a prompt of one token, in one batch."""
    target = tiny_target("llama", max_position_embeddings=8192)
    head = build_head(HEADS[head_type].config_class(type=head_type), target, seed=1).eval()
    source = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, target.vocab_size, (n,), generator=source).tolist() for n in (4096, 1, 700)]
    wanted = [generate(target, None, prompt, max_new_tokens=12).token_ids[0] for prompt in prompts]
    assert generate(target, head, prompts, max_new_tokens=12).token_ids == wanted
