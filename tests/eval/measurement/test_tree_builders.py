"""The tree builders: likeliest nodes first, the cheapest tree per token, accuracies as measured."""

import itertools

import pytest
import torch
from drafted import untrained
from headstart.configs.errors import BadInput
from headstart.eval.decoding import generate
from headstart.eval.measurement.metrics import acceptance
from headstart.eval.measurement.tree_search import (
    best_nodes,
    hold_out,
    named_tree,
    optimal_tree,
    rank_accuracies,
    static_tree,
)
from headstart.eval.suites.prompts import Suite
from headstart.heads.drafting import DynamicTree, StaticTree
from headstart.scripts.eval_drafts import WantedDrafts
from perturbing import perturb

ACCURACIES = [[0.6, 0.2, 0.1], [0.5, 0.25, 0.05], [0.4, 0.3, 0.1]]


def likelihood(path):
    value = 1.0
    for depth, rank in enumerate(path):
        value *= ACCURACIES[depth][rank]
    return value


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_the_likeliest_nodes_make_the_best_tree_of_their_size(size):
    """Against every tree of that size, closed under prefixes and better siblings."""
    paths = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]
    best = 0.0
    for nodes in itertools.combinations(sorted(paths, key=likelihood, reverse=True)[:12], size):
        if all(path[:-1] in (*nodes, ()) for path in nodes):
            best = max(best, sum(map(likelihood, nodes)))
    assert sum(value for _, value in best_nodes(ACCURACIES, size)) == pytest.approx(best)


def test_static_tree_holds_them_in_order():
    assert static_tree(ACCURACIES, num_nodes=4).paths == ((0,), (1,), (0, 0), (0, 1))


def test_a_free_forward_wants_all_nodes_and_a_dear_one_few():
    free, _ = optimal_tree(ACCURACIES, verify_ms=lambda n: 10.0, draft_ms=lambda d: 0.1, max_nodes=20)
    assert free.num_nodes == 20 and free.depth == 3
    dear, cost = optimal_tree(ACCURACIES, verify_ms=lambda n: 10.0 + 4 * n, draft_ms=lambda d: 0.1, max_nodes=20)
    assert dear.num_nodes == 1 and cost == pytest.approx(14.1 / 1.6)
    slow, _ = optimal_tree(ACCURACIES, verify_ms=lambda n: 10.0, draft_ms=lambda d: 20.0 * d, max_nodes=20)
    assert slow.depth == 1


def test_accuracies_are_what_a_chain_then_accepts(head_type, tiny_target):
    """The best guesses are counted as by drafting behind each beginning of a text; of nine tokens many are right."""
    target = tiny_target("llama", vocab_size=9)
    head, prompt, num_new = perturb(untrained(head_type, target), 0.1, seed=3), [1, 7, 8, 3], 20
    text = generate(target, None, prompt, max_new_tokens=num_new, eos_token_ids=[]).token_ids[0]
    measured = rank_accuracies(target, head, [(prompt, text)], num_ranks=9)
    assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in measured), "some rank is always right"
    firsts = [
        generate(target, head, [*prompt, *text[:count]], max_new_tokens=2, eos_token_ids=[])
        for count in range(num_new - 1)
    ]
    right = [done.rounds[1].num_accepted[0] > 0 for done in firsts]
    assert measured[0][0] == pytest.approx(sum(right) / len(right), abs=1e-5)


def test_a_head_trained_one_step_gets_a_tree_as_deep_as_it_drafts(target):
    """EAGLE-1 drafts on from its own states: its tree is that of the same weights unrolled in training."""
    one, five = (untrained("eagle", target, num_depths=depths) for depths in (1, 5))
    text = generate(target, None, [1, 7, 8, 3], max_new_tokens=60, eos_token_ids=[]).token_ids[0]
    found = rank_accuracies(target, one, [([1, 7, 8, 3], text)])
    assert len(found) == 5 and found == rank_accuracies(target, five, [([1, 7, 8, 3], text)])
    assert one.num_depths == 1


@pytest.mark.parametrize("name", ["static", "dynamic", "optimal", "sampled"])
@pytest.mark.fast_only(head_type=["eagle3"])
def test_named_trees_fit_the_head_and_decode(name, head_type, target):
    head = untrained(head_type, target)
    prompts = [[1, 5, 9], [1, 7, 8, 3]]
    tree = named_tree(name, target, head, prompts, max_new_tokens=16, num_nodes=9)
    assert isinstance(tree, DynamicTree if name == "dynamic" else StaticTree)
    assert tree.num_nodes <= 9 and (name == "optimal" or tree.num_nodes == 9)
    source = torch.Generator().manual_seed(0)
    warm = 1.0 if name == "sampled" else 0.0
    text = generate(target, head, prompts, max_new_tokens=16, tree=tree, temperature=warm, generator=source)
    counted = acceptance(text.rounds, num_draft_tokens=tree.depth)
    assert counted.num_committed >= counted.num_rounds > 0


@pytest.mark.parametrize(("count", "held"), [(2, 1), (4, 1), (12, 4), (40, 8)])
def test_trees_are_shaped_on_other_prompts_than_are_measured(count, held):
    prompts = [[1, number] for number in range(count)]
    rest = hold_out(Suite("chat", prompts))
    assert len(rest.calibration) == held and sorted([*rest.calibration, *rest.prompts]) == prompts
    assert [source.number for source in rest.sources] == [ids[1] for ids in rest.prompts], "rows keep their numbers"
    with pytest.raises(BadInput, match="chat has one prompt; a tree is shaped on others than it is measured on"):
        hold_out(Suite("chat", [[1]]))


@pytest.mark.fast_only(head_type=["eagle3", "medusa"])
@pytest.mark.parametrize("num_draft", [None, 2])
def test_a_sampled_chain_is_as_long_as_the_chain(num_draft, head_type, target):
    head = untrained(head_type, target)
    how = {"max_new_tokens": 16, "num_nodes": 9, "num_draft_tokens": num_draft}
    tree = named_tree("sampled-chain", target, head, [[1, 5, 9]], **how)
    length = num_draft or head.max_draft_tokens or head.default_draft_tokens
    assert tree == StaticTree(tuple((0,) * n for n in range(1, length + 1)), sampled=True)
    assert isinstance(tree, StaticTree) and tree.num_nodes == tree.depth == length and not tree.is_chain
    source = torch.Generator().manual_seed(0)
    text = generate(target, head, [[1, 5, 9], [1]], max_new_tokens=16, tree=tree, temperature=1.0, generator=source)
    assert {one.num_drafted for one in text.rounds[1:]} == {length}


def test_a_sampled_chain_longer_than_the_head_is_refused(target):
    head = untrained("medusa", target, num_depths=2)
    with pytest.raises(BadInput, match="^num_draft_tokens 3: this drafter drafts 1 to 2 tokens$"):
        named_tree("sampled-chain", target, head, [[1]], max_new_tokens=4, num_nodes=4, num_draft_tokens=3)


@pytest.mark.parametrize("name", ["sampled", "sampled-chain"])
def test_draws_need_a_temperature(name):
    assert WantedDrafts.of([], ["ngram"], [name], 8, temperature=0.7).trees == [name]
    with pytest.raises(BadInput, match=f"^--tree {name}: needs --temperature above 0$"):
        WantedDrafts.of([], ["ngram"], [name], 8, temperature=0.0)


def test_what_cannot_be_drafted_is_refused(target, target_as_drafter):
    with pytest.raises(BadInput, match="^--tree bush: expected one of chain, static"):
        named_tree("bush", target, target_as_drafter(target), [[1]], max_new_tokens=4, num_nodes=4)
    with pytest.raises(BadInput, match="drafts chains only$"):
        named_tree("static", target, target_as_drafter(target), [[1]], max_new_tokens=4, num_nodes=4)
    assert named_tree("chain", target, target_as_drafter(target), [[1]], max_new_tokens=4, num_nodes=4) is None
