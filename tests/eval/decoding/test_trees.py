"""Draft trees: their shapes, that every node is what a chain along its path would draft, and that text stays exact."""

from functools import cache

import pytest
import torch
from drafted import own_text, untrained
from headstart.configs.errors import BadInput
from headstart.eval.decoding import generate
from headstart.eval.measurement.metrics import acceptance
from headstart.heads.decoders.cache import SlotCache
from headstart.heads.decoders.tree_nodes import agreeing_paths, ancestors
from headstart.heads.drafter import Drafter, Reading
from headstart.heads.drafting import (
    DynamicTree,
    Proposal,
    StaticTree,
    draft_chain,
    draft_dynamic,
    draft_static,
)
from headstart.heads.registry import HEADS
from perturbing import perturb

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]
STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 1), (0, 0, 0), (0, 1, 0), (2, 1, 1), (0, 0, 0, 0)))
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
def test_static_nodes_are_what_a_chain_along_their_path_drafts(head, state_of):
    proposal = draft_static(head, state_of(), STATIC)
    for row in (0, 1):
        for path, ranks in zip(paths_of(proposal, row), STATIC.paths, strict=True):
            scored = scored_along(head, state_of(), path[:-1], row)
            assert path[-1] == scored[len(path) - 1].topk(ranks[-1] + 1).indices[-1], (row, ranks)


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
    line = draft_static(head, state_of(), StaticTree(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))))
    assert torch.equal(chain.tokens, line.tokens)


@pytest.fixture(scope="module")
def texts_of(tiny_target):
    """texts_of(family): the target, and what it writes without drafts."""

    @cache
    def write(family):
        target = tiny_target(family)
        return target, generate(target, None, PROMPTS, max_new_tokens=16).token_ids

    return write


# beside those of test_matrix.py; each with both trees, and each tree with every head
ELSEWHERE = ["gpt_neox", "mistral", "qwen2", "qwen3_moe"]
CASES = [
    (name, ELSEWHERE[(i + 2 * j) % 4], [STATIC, DYNAMIC][j]) for i, name in enumerate(sorted(HEADS)) for j in (0, 1)
]


@pytest.mark.parametrize(("head_type", "family", "tree"), CASES)
def test_greedy_trees_are_lossless(head_type, family, tree, texts_of):
    """Every family of target, sliding windows too; in a ragged batch and row by row."""
    target, wanted = texts_of(family)
    head = untrained(head_type, target)
    assert generate(target, head, PROMPTS, max_new_tokens=16, tree=tree).token_ids == wanted
    assert generate(target, head, PROMPTS[1], max_new_tokens=16, tree=tree).token_ids == wanted[1:2]


def test_a_tree_that_holds_the_targets_own_path_is_accepted_whole(target):
    """A head that scores as the target does, so that its best path stands: D + 1 tokens in every round."""

    class Oracle(Drafter):
        default_draft_tokens, drafts_trees = 4, True

        def begin(self, *, batch_size, max_length):
            return {}

        def commit(self, state, read):
            state["length"] = read.start + read.num_valid

        def propose_tree(self, state, tree, *, draws=None):
            best = torch.stack([text[i, n + 1 : n + 5] for i, n in enumerate(state["length"].tolist())])  # [B, 4]
            wrong = (best + 1) % target.vocab_size
            tokens = torch.stack(
                [wrong[:, 0], best[:, 0], wrong[:, 1], best[:, 1], best[:, 2], wrong[:, 3], best[:, 3]], 1
            )
            parents = torch.tensor([-1, -1, 1, 1, 3, 4, 4]).expand(len(best), -1)
            return Proposal(tokens, parents)

    wanted = generate(target, None, PROMPTS, max_new_tokens=60, eos_token_ids=[]).token_ids
    longest = max(map(len, PROMPTS))
    text = torch.tensor([p + new + [0] * (longest - len(p)) for p, new in zip(PROMPTS, wanted, strict=True)])
    shape = StaticTree(((0,), (1,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 0, 0), (1, 1, 0, 1)))
    out = generate(target, Oracle(), PROMPTS, max_new_tokens=41, tree=shape, eos_token_ids=[])  # type: ignore[arg-type]
    assert out.token_ids == [new[:41] for new in wanted]
    assert acceptance(out.rounds, num_draft_tokens=4).length == 5


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
    monkeypatch.setattr("headstart.heads.decoders.tree_nodes.is_readable", lambda _: False)
    seen, num, path, at = ancestors(parents, 9), *agreeing_paths(wanted, tokens, parents, depth=9)
    valid = torch.arange(9) < num[:, None]
    assert num[0] > 0 and torch.equal(here[0], seen) and torch.equal(here[1], num) and torch.equal(here[3], at)
    assert torch.equal(here[2][valid], path[valid])


@pytest.mark.parametrize("depth", range(1, 9))
def test_ancestors_of_a_chain_of_any_length(depth, monkeypatch):
    monkeypatch.setattr("headstart.heads.decoders.tree_nodes.is_readable", lambda _: False)
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


@pytest.mark.parametrize("paths", [(), ((),), ((0, 0),), ((0,), (0, 0), (1,)), ((0,), (1, 0)), ((0,), (0,))])
def test_malformed_trees_are_refused(paths):
    """A repeated path would be drafted and tried twice, which sampled verification does not allow for."""
    with pytest.raises(BadInput, match="tree"):
        StaticTree(paths)


def test_a_sampled_tree_has_the_children_that_were_drawn_before():
    """A rank that is missing, or stands later, would be verified as if it had been drawn first."""
    for paths in (((1,),), ((1,), (0,)), ((0,), (0, 1))):
        with pytest.raises(BadInput, match="sampled"):
            StaticTree(paths, sampled=True)
    StaticTree(((0,), (1,), (0, 0), (0, 1)), sampled=True)


def test_a_tree_deeper_than_the_head_is_refused(target):
    head = untrained("medusa", target, num_depths=2)
    with pytest.raises(BadInput, match="num_draft_tokens 4"):
        generate(target, head, [1, 2], tree=STATIC)


@pytest.mark.parametrize(("head_type", "tree"), [("block", None), ("eagle3", STATIC)])  # the engine is the same for all
def test_repetition_penalty_is_that_of_transformers(head_type, tree, target):
    head = untrained(head_type, target)
    for prompt in PROMPTS:
        out = generate(target, head, prompt, max_new_tokens=16, repetition_penalty=1.5, tree=tree)
        assert out.token_ids[0] == own_text(target.model, prompt, 16, repetition_penalty=1.5)
