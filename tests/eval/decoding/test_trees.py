"""Draft trees: their shapes, that every node is what a chain along its path would draft, and that text stays exact."""

from functools import partial

import pytest
import torch
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.eval.decoding import generate
from headstart.eval.decoding.draft_setting import named_tree
from headstart.heads.drafting.drafter import Reading
from headstart.heads.drafting.trees import (
    Draws,
    DynamicTree,
    SampledChain,
    draft_chain,
    draft_dynamic,
)
from headstart.scripts.evaluating.eval_drafts import WantedDrafts
from headstart.targets.caches.cache import SlotCache
from headstart.targets.caches.tree_nodes import agreeing_paths, ancestors
from perturbing import perturb

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]
DYNAMIC = DynamicTree(num_nodes=12, depth=4, top_k=3)


@pytest.fixture
def head(head_type, target):
    """An untrained head with perturbed weights."""
    return perturb(untrained(head_type, target, num_depths=4), 0.1, seed=3)


@pytest.fixture
def state_of(head, target):
    """A factory of drafting states behind two prompts of different lengths."""

    def make():
        rows = [[1, 9, 14, 33, 20, 7, 51, 8], [1, 9, 14, 33, 20, 0, 0, 0]]
        tokens, num_valid = torch.tensor(rows), torch.tensor([7, 4])
        state = head.begin(batch_size=2, max_length=64)
        output = target.forward(tokens, feature_layers=head.feature_layers)
        head.commit(state, Reading(tokens, tokens.roll(-1, 1), output, torch.tensor([0, 0]), num_valid))
        return state

    return make


def paths_of(proposal, row):
    """Each node's drafted tokens from the root down."""
    assert proposal.parents is not None
    parents, tokens = proposal.parents[row].tolist(), proposal.tokens[row].tolist()
    paths: list[list[int]] = []
    for parent, token in zip(parents, tokens, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


@torch.no_grad()
def scored_along(head, state, path, row):
    """Draft log-probabilities behind every prefix of a path, drafted as a chain."""
    logits = [head.first_logits(state)]
    for depth, token in enumerate(path, 1):
        if depth < head.num_depths:
            logits.append(head.expand(state, torch.tensor([[token]] * 2), None, depth=depth)[:, 0])
    return [x[row].log_softmax(-1) for x in logits]


@torch.no_grad()
def test_dynamic_tree_keeps_the_most_probable_nodes(head, state_of):
    """Against a plain search: the frontier of each level by joint probability, then the best of all candidates."""
    proposal = draft_dynamic(head, state_of(), DYNAMIC)
    for row in (0, 1):
        candidates: dict[tuple[int, ...], float] = {}
        frontier: dict[tuple[int, ...], float] = {(): 0.0}
        for _ in range(DYNAMIC.depth):
            level = {}
            for path, score in frontier.items():
                best = scored_along(head, state_of(), list(path), row)[len(path)].topk(DYNAMIC.top_k)
                for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    level[(*path, token)] = score + value
            candidates |= level
            frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: DYNAMIC.top_k])
        wanted = sorted(candidates, key=lambda path: -candidates[path])[: DYNAMIC.num_nodes]
        assert {tuple(path) for path in paths_of(proposal, row)} == set(wanted)
        assert proposal.parents is not None
        parents = proposal.parents[row].tolist()
        assert all(parent < node for node, parent in enumerate(parents))


def test_a_tree_of_one_path_is_the_chain(head, state_of):
    chain = draft_chain(head, state_of(), num_draft_tokens=4)
    line = draft_dynamic(head, state_of(), DynamicTree(num_nodes=4, depth=4, top_k=1))
    assert torch.equal(chain.tokens, line.tokens)


def test_drawn_tokens_are_those_of_the_distribution_behind_them(head, state_of):
    """Each from what the head scores behind the tokens drawn before it."""
    draws = Draws(0.5, head.target.vocab_size, torch.Generator().manual_seed(0))
    drawn = head.propose_tree(state_of(), SampledChain(4), draws=draws)
    assert drawn.parents is None and drawn.draft_probs is not None
    for row in (0, 1):
        scored = scored_along(head, state_of(), drawn.tokens[row, :-1].tolist(), row)
        wanted = torch.stack([(one / 0.5).softmax(-1) for one in scored])
        torch.testing.assert_close(drawn.draft_probs[row], wanted, rtol=1e-4, atol=1e-5)
    many = torch.randn(5, generator=torch.Generator().manual_seed(1)).expand(40_000, -1)
    tokens, probs = draws(many)
    counts = torch.bincount(tokens, minlength=5) / len(many)
    torch.testing.assert_close(counts, probs[0], rtol=0, atol=0.015)


def test_ancestors_of_a_small_tree():
    seen = ancestors(torch.tensor([[-1, -1, 0, 2, 1]]), 3)[0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [0, 1, 0, 0, 1]]


def random_trees(num_rows, size, *, seed):
    """Parents [B, S] of trees, and tokens [B, S] of which siblings differ."""
    source = torch.Generator().manual_seed(seed)
    above = [torch.randint(-1, max(node, 1), (num_rows,), generator=source).clamp(max=node - 1) for node in range(size)]
    return torch.stack(above, 1), torch.stack([torch.randperm(size, generator=source) for _ in range(num_rows)])


@pytest.mark.parametrize("seed", range(20))
def test_trees_are_read_on_a_cpu_as_on_a_gpu(seed, monkeypatch):
    """Node by node, without tensor operations."""
    parents, tokens = random_trees(3, 9, seed=seed)
    wanted = torch.randint(9, (3, 10), generator=torch.Generator().manual_seed(seed))
    wanted[0, 0] = tokens[0, int((parents[0] == -1).nonzero()[0])]  # a row that accepts
    here = ancestors(parents, 9), *agreeing_paths(wanted, tokens, parents, depth=9)
    monkeypatch.setattr("headstart.targets.caches.tree_nodes.is_readable", lambda _: False)
    seen, num, path, at = ancestors(parents, 9), *agreeing_paths(wanted, tokens, parents, depth=9)
    valid = torch.arange(9) < num[:, None]
    assert num[0] > 0 and torch.equal(here[0], seen) and torch.equal(here[1], num) and torch.equal(here[3], at)
    assert torch.equal(here[2][valid], path[valid])


@pytest.mark.parametrize("depth", range(1, 9))
def test_ancestors_of_a_chain_of_any_length(depth, monkeypatch):
    monkeypatch.setattr("headstart.targets.caches.tree_nodes.is_readable", lambda _: False)
    assert torch.equal(ancestors(torch.arange(-1, depth - 1)[None], depth)[0], torch.ones(depth, depth).tril().bool())


def test_accepted_nodes_are_moved_only_if_they_are_elsewhere():
    cache = SlotCache(num_layers=2, max_length=64)
    cache.seek(torch.arange(8).expand(2, -1), extent=8)
    for layer in range(2):
        slots = torch.arange(8.0)[:, None].expand(2, 2, 8, 4)
        cache.update(slots, slots, layer)
    cache.move(torch.tensor([[2, 5, 6], [2, 3, 7]]), torch.tensor([[2, 3, 4], [2, 3, 4]]), num=torch.tensor([2, 2]))
    assert cache.stored[0][0, 0, :, 0, :4, 0].tolist() == [[0, 1, 2, 5], [0, 1, 2, 3]]
    before = cache.stored[0].clone()
    cache.move(torch.tensor([[2, 3, 6]] * 2), torch.tensor([[2, 3, 4]] * 2), num=torch.tensor([2, 0]))
    assert torch.equal(cache.stored[0], before)


@pytest.mark.parametrize("num_draft", [None, 2])
@pytest.mark.fast_only(head_type=["eagle3", "medusa"])
def test_named_trees_are_as_deep_as_the_chain(num_draft, head_type, target):
    head = untrained(head_type, target)
    length = num_draft or head.max_draft_tokens or head.default_draft_tokens
    named = partial(named_tree, target=target, drafter=head, num_nodes=9, num_draft_tokens=num_draft)
    assert named("chain") is None and named("sampled-chain") == SampledChain(length)
    assert named("dynamic") == DynamicTree(num_nodes=9, depth=length, top_k=4)
    how = {"tree": named("sampled-chain"), "generator": torch.Generator().manual_seed(0), "temperature": 1.0}
    text = generate(target, head, [[1, 5, 9], [1]], max_new_tokens=16, **how)
    assert {one.num_drafted for one in text.rounds[1:]} == {length}


def test_what_cannot_be_drafted_is_refused(target, target_as_drafter):
    head, model = untrained("medusa", target, num_depths=2), target_as_drafter(target)
    cases = [
        ("bush", head, None, "^--tree bush: expected one of chain, dynamic, sampled-chain$"),
        ("dynamic", model, None, "^--tree dynamic: not with TargetAsDrafter$"),
        ("sampled-chain", model, None, "^--tree sampled-chain: not with TargetAsDrafter$"),
        ("sampled-chain", head, 3, "^num_draft_tokens 3: this drafter drafts 1 to 2 tokens$"),
    ]
    for name, drafter, num_draft, line in cases:
        with pytest.raises(BadInput, match=line):
            named_tree(name, target, drafter, num_nodes=4, num_draft_tokens=num_draft)
    with pytest.raises(BadInput, match="num_draft_tokens 4"):  # as deep as that
        generate(target, head, [1, 2], tree=DYNAMIC)
    assert WantedDrafts(["ngram"], ["sampled-chain"], 8, temperature=0.7).trees == ["sampled-chain"]
    with pytest.raises(BadInput, match="^--tree sampled-chain: needs --temperature above 0$"):
        WantedDrafts(["ngram"], ["sampled-chain"], 8, temperature=0.0)
