"""What the report says of trees, cut vocabularies and training lengths is what was drafted with."""

import torch
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.drafters.registry import training_record
from headstart.eval.measurement.drafted import asked_as_trained, beyond_training, draft_vocabulary, tree_shape
from headstart.eval.report.document import training_warnings
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


def test_what_a_head_says_of_its_training_is_read_from_it(tiny_target, tmp_path):
    head = build_head(HEADS["medusa"].config_class(type="medusa"), tiny_target("llama"))
    known = {"max_length": 512, "prompt_ending": {"token_ids": [7, 8], "text": "w7 w8"}}
    assert training_record(f"head:{save_head(head, tmp_path / 'run', training=known)}") == known
    assert training_record(f"head:{save_head(head, tmp_path / 'old')}") is None
    assert training_record("ngram") is None


def test_prompts_are_held_against_how_those_of_training_ended():
    training = {"prompt_ending": {"token_ids": [7, 8], "text": ""}}
    assert asked_as_trained(training, [[1, 7, 8], [7, 8], [8], [7, 8, 9]]) == 0.5
    assert asked_as_trained(training, []) is None
    assert asked_as_trained({"prompt_ending": None}, [[1]]) is asked_as_trained(None, [[1]]) is None


def test_contexts_are_longer_than_training_rows_or_not():
    def part(num_rounds, length):
        return {"num_rounds": num_rounds, "acceptance_length": length}

    parts = {"512-2047": part(10, 2.0), "0-127": part(10, 4.0), "128-511": part(30, 3.0), "2048-": part(30, 1.0)}
    found = beyond_training({"max_length": 511}, parts)
    assert found == {"num_rounds": 40, "acceptance_length": 1.25, "acceptance_length_within": 3.25}
    entry = {"drafter": "eagle3", "suite": "code", "batch_size": 2, "trained": {"max_length": 2047}}
    found = beyond_training(entry["trained"], parts)
    assert training_warnings([{**entry, "beyond_training": found}, {**entry, "beyond_training": None}]) == [
        "eagle3 on code, batch 2: contexts longer than its training rows (2,047 tokens): acceptance length 1.00, "
        "3.00 in shorter ones"
    ]
    del parts["2048-"]
    for training in ({"max_length": 2048}, {}, None):
        assert beyond_training(training, parts) is None
