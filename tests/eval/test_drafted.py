"""What the report says of trees, cut vocabularies and training lengths is what was drafted with."""

import pytest
import torch
from headstart.eval.drafted import draft_vocabulary, tree_shape
from headstart.eval.drafters import NgramDrafter, trained_max_length
from headstart.heads.drafting import DynamicTree, StaticTree
from headstart.heads.registry import HEADS, build_head, save_head


def test_a_fixed_tree_is_told_by_its_parents():
    tree = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
    assert tree_shape(tree) == {"parents": [-1, -1, 0, 0, 1]}
    assert tree_shape(DynamicTree(num_nodes=9, depth=3, top_k=4)) == {"num_nodes": 9, "depth": 3, "top_k": 4}
    assert tree_shape(None) is None


def test_coverage_counts_written_tokens(tiny_target):
    target = tiny_target("llama")
    config = HEADS["eagle3"].config_class(type="eagle3", draft_vocab_size=4)
    head = build_head(config, target, draft_token_ids=torch.tensor([1, 5, 9, 30]))
    assert draft_vocabulary(head, [[1, 5, 5], [2]]) == {"size": 4, "coverage": 0.75}
    assert draft_vocabulary(head, [[], []]) == {"size": 4, "coverage": None}
    assert draft_vocabulary(build_head(HEADS["medusa"].config_class(type="medusa"), target), [[1]]) is None
    assert draft_vocabulary(NgramDrafter(), [[1]]) is None


@pytest.mark.parametrize(
    ("text", "length"),
    [("data: {max_length: 512}", 512), ("data: {}", None), ("data: 3", None), ("- not\n- ours", None), (None, None)],
)
def test_the_training_length_comes_from_the_run_around_the_head(text, length, tiny_target, tmp_path):
    folder = save_head(
        build_head(HEADS["medusa"].config_class(type="medusa"), tiny_target("llama")), tmp_path / "final"
    )
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    assert trained_max_length(f"head:{folder}") == length
    assert trained_max_length("ngram") is None
