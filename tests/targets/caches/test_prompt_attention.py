"""Many queries on a CPU read only the keys that their block sees: the same attention as over all keys."""

import pytest
import torch
import torch.nn.functional as F
from headstart.targets.caches import prompt_attention
from headstart.targets.caches.masks import visibility_mask
from headstart.targets.caches.prompt_attention import is_prompt, ranges_of

EXTENT = 900


def queries_at(*starts: int, num: int = 600) -> torch.Tensor:
    return torch.tensor(starts)[:, None] + torch.arange(num)


MASKS = {
    "causal": visibility_mask(queries_at(300, 300), extent=EXTENT, dtype=torch.float32),
    "two rows at different places": visibility_mask(queries_at(300, 0), extent=EXTENT, dtype=torch.float32),
    "window": visibility_mask(queries_at(300, 280), extent=EXTENT, dtype=torch.float32, window=100),
    "bool": visibility_mask(queries_at(300, 280), extent=EXTENT, dtype=torch.float32, window=100) == 0,
}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("name", MASKS)
def test_it_is_the_attention_over_all_keys(name, groups):
    torch.manual_seed(0)
    mask = MASKS[name]
    query = torch.randn(2, 2 * groups, mask.shape[2], 16)
    key, value = torch.randn(2, 2, 2, EXTENT, 16)
    assert is_prompt(query)
    ours = prompt_attention.prompt_attention(query, key, value, mask, scale=0.3)
    theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_block_reads_what_its_queries_see():
    assert ranges_of(MASKS["window"]) == [(128, 556), (384, 812), (640, 900)]
    assert ranges_of(MASKS["causal"]) == [(0, 556), (0, 812), (0, 900)]


def test_queries_that_see_nothing_leave_no_hole():
    mask = MASKS["causal"].clone()
    mask[:, :, :300] = torch.finfo(mask.dtype).min
    query, key, value = torch.randn(2, 2, 600, 16), *torch.randn(2, 2, 2, EXTENT, 16)
    assert prompt_attention.prompt_attention(query, key, value, mask).isfinite().all()
