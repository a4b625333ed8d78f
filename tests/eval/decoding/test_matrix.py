"""Greedy text is transformers' own, token for token: every drafter x every tree it can do, over rows and architectures.

Over a vocabulary of 12, so that untrained heads guess right now and then, and long and short paths are accepted.
"""

from functools import cache

import pytest
import torch
from drafted import own_text, untrained
from headstart.eval.decoding import generate
from headstart.eval.drafters.draft_model import DraftModelDrafter
from headstart.eval.drafters.lookup import NgramDrafter, SuffixDrafter
from headstart.eval.drafters.sparse_self import SparseSelfDrafter
from headstart.eval.measurement.tree_search import optimal_tree, static_tree
from headstart.heads.decoders.cpu.build import supported_sets
from headstart.heads.decoders.cpu.decoder import CpuDecoder
from headstart.heads.drafting import DynamicTree
from headstart.heads.registry import HEADS
from headstart.heads.target import Target
from perturbing import perturb

VOCABULARY, NUM_NEW = 12, 14
PROMPTS = [[1, 5, 9, 5, 9], [1, 7, 8, 3, 11, 10, 4, 6, 7, 8], [1], [1, 10, 3, 10]]  # of 5, 10, 1 and 4 tokens
ACCURACIES = [[0.4, 0.3, 0.2], [0.5, 0.3], [0.5, 0.2]]  # made up: they shape the trees
TREES = {
    "chain": None,
    "static": static_tree(ACCURACIES, num_nodes=8),
    "dynamic": DynamicTree(num_nodes=7, depth=3, top_k=3),
    "optimal": optimal_tree(ACCURACIES, verify_ms=lambda n: 9 + 0.8 * n, draft_ms=lambda d: 0.5 * d)[0],
}
LOOKUPS = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
ARCHITECTURES, ROWS = ["llama", "qwen3", "gemma3"], ["1 row", "4 ragged rows"]
OTHERS = [
    (name, "chain", architecture) for name in (*LOOKUPS, "draft-model", "sparse-self") for architecture in ARCHITECTURES
]
# every head with every tree; any two of head, tree, architecture and number of rows meet
HEAD_CASES = [
    (name, tree, ARCHITECTURES[(i + j) % 3]) for i, name in enumerate(sorted(HEADS)) for j, tree in enumerate(TREES)
]
CASES = [(*case, ROWS[(i + i // 4) % 2]) for i, case in enumerate([*OTHERS, *HEAD_CASES])]


@pytest.fixture(scope="module")
def target_of(tiny_target):
    """target_of(family), made once."""
    return cache(lambda family: tiny_target(family, vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def drafter_of(target_of):
    """drafter_of(name, family), made once; heads are untrained, with perturbed weights."""

    @cache
    def make(name, family):
        if name in LOOKUPS:
            return LOOKUPS[name]()
        if name == "draft-model":
            return DraftModelDrafter(target_of("qwen2"))
        if name == "sparse-self":
            return SparseSelfDrafter(target_of(family), 32)
        return perturb(untrained(name, target_of(family)), 0.1, seed=3)

    return make


@pytest.fixture(scope="module")
def wanted_of(target_of):
    """wanted_of(family): what transformers' own generate writes behind each prompt."""

    @cache
    def write(family):
        return [own_text(target_of(family).model, prompt, NUM_NEW, eos_token_id=None) for prompt in PROMPTS]

    return write


@pytest.mark.parametrize(("drafter", "tree", "architecture", "rows"), CASES, ids=[" ".join(case) for case in CASES])
def test_greedy_text_is_that_of_transformers(architecture, drafter, tree, rows, target_of, drafter_of, wanted_of):
    which = slice(0, 1) if rows == "1 row" else slice(None)
    out = generate(
        target_of(architecture),
        drafter_of(drafter, architecture),
        PROMPTS[which],
        max_new_tokens=NUM_NEW,
        tree=TREES[tree],
        num_draft_tokens=3 if TREES[tree] is None else None,
        eos_token_ids=[],
    )
    assert out.token_ids == wanted_of(architecture)[which]
    if tree != "chain" and len(out.token_ids) > 1:
        accepted = [num for one in out.rounds[1:] for num in one.num_accepted]
        assert 0 in accepted and any(accepted), "a case in which nothing is accepted, or all, shows little"


@pytest.fixture(scope="module")
def narrow_of(tiny_model):
    """narrow_of(name): a target in bf16 that the kernels decode, and a head of that family, untrained."""
    target = Target(tiny_model("llama", vocab_size=VOCABULARY).to(torch.bfloat16), name="narrow", fingerprint="")

    @cache
    def make(name):
        return target, untrained(name, target).to(torch.bfloat16)

    return make


SETS = supported_sets()
SET_CASES = [
    (SETS[(i + j) % len(SETS)], name, tree, [1, 8][(i + j) % 2])
    for i, name in enumerate(sorted(HEADS))
    for j, tree in enumerate(["chain", "static", "dynamic"])
]


@pytest.mark.fast_only(name=["eagle3"])  # once in every set, with every tree
@pytest.mark.parametrize(("instructions", "name", "tree", "batch_size"), SET_CASES)
def test_on_every_instruction_set_drafts_change_no_bit(instructions, name, tree, batch_size, narrow_of, monkeypatch):
    """In bf16, where a product that depended on its neighbours would soon change a text."""
    monkeypatch.setenv("HEADSTART_CPU", instructions)
    target, head = narrow_of(name)
    assert isinstance(target.decoder, CpuDecoder)
    head.pack()
    source = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 24, (40,), generator=source)
    prompts = [torch.randint(0, VOCABULARY, (int(n),), generator=source).tolist() for n in lengths]
    how = {"max_new_tokens": NUM_NEW, "eos_token_ids": []}
    plain = [text for prompt in prompts for text in generate(target, None, [prompt], **how).token_ids]
    how |= {"tree": TREES[tree], "num_draft_tokens": 3 if tree == "chain" else None}
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    assert [text for batch in batches for text in generate(target, head, batch, **how).token_ids] == plain


def test_the_trees_branch_and_differ():
    assert [tree and (tree.num_nodes, tree.depth) for tree in TREES.values()] == [None, (8, 3), (7, 3), (5, 2)]


def test_a_lossy_engine_is_caught(target_of, drafter_of, wanted_of, monkeypatch):
    """The bonus is taken from the last node but one of the path: what the matrix must be able to see."""
    from headstart.eval.decoding import verify

    accept = verify.accept_tree

    def wrong(chosen, drafted, parents, *, depth):
        accepted = accept(chosen, drafted, parents, depth=depth)
        accepted.bonus = torch.where(accepted.num_accepted > 0, chosen[:, 0], accepted.bonus)
        return accepted

    monkeypatch.setattr(verify, "accept_tree", wrong)
    head = drafter_of("medusa", "llama")
    how = {"max_new_tokens": NUM_NEW, "tree": TREES["static"], "eos_token_ids": []}
    assert generate(target_of("llama"), head, PROMPTS, **how).token_ids != wanted_of("llama")
