"""Greedy text is transformers' own, token for token: every head x every tree, over rows and architectures. Of drafters
without training: tests/eval/drafters.

Over a vocabulary of 12, so that untrained heads guess right now and then, and long and short paths are accepted.
"""

from functools import cache

import pytest
import torch
from drafted import own_text, untrained
from headstart.engines.heads import HEADS
from headstart.eval.decoding import generate
from headstart.heads.drafting.trees import DynamicTree
from headstart.targets.cpu.build import supported_sets
from headstart.targets.cpu.decoder import CpuDecoder
from headstart.targets.target import Target
from perturbing import perturb

VOCABULARY, NUM_NEW = 12, 14
PROMPTS = [[1, 5, 9, 5, 9], [1, 7, 8, 3, 11, 10, 4, 6, 7, 8], [1], [1, 10, 3, 10]]  # of 5, 10, 1 and 4 tokens
TREES = {
    "chain": None,
    "narrow": DynamicTree(num_nodes=4, depth=2, top_k=2),
    "dynamic": DynamicTree(num_nodes=7, depth=3, top_k=3),
}
ARCHITECTURES, ROWS = ["llama", "qwen3", "gemma3"], ["1 row", "4 ragged rows"]
# every head with every tree; any two of head, tree, architecture and number of rows meet
HEAD_CASES = [
    (name, tree, ARCHITECTURES[(i + j) % 3]) for i, name in enumerate(sorted(HEADS)) for j, tree in enumerate(TREES)
]
CASES = [(*case, ROWS[(i + i // 4) % 2]) for i, case in enumerate(HEAD_CASES)]


@pytest.fixture(scope="module")
def target_of(tiny_target):
    """target_of(family), made once."""
    return cache(lambda family: tiny_target(family, vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def drafter_of(target_of):
    """drafter_of(name, family), made once; heads are untrained, with perturbed weights."""

    @cache
    def make(name, family):
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
    """narrow_of(architecture, name): a target in bf16 that the kernels decode, and a head of that family, untrained."""

    @cache
    def target_of(architecture):
        model = tiny_model(architecture, vocab_size=VOCABULARY).to(torch.bfloat16)
        return Target.of(model, name=f"narrow-{architecture}", fingerprint="")

    @cache
    def make(architecture, name):
        target = target_of(architecture)
        return target, untrained(name, target).to(torch.bfloat16)

    return make


SETS = supported_sets()
SET_CASES = [
    ("llama", SETS[(i + j) % len(SETS)], name, tree, [1, 8][(i + j) % 2])
    for i, name in enumerate(sorted(HEADS))
    for j, tree in enumerate(TREES)
]
# windows, norms elsewhere, parallel layers: in every set with every tree; the heads take turns, but for assistants, as
# not all of these may have one
OF_ANY = sorted(HEADS.keys() - {"assistant"})
SET_CASES += [
    (architecture, instructions, OF_ANY[(3 * i + j + k) % len(OF_ANY)], tree, [1, 8][(i + j) % 2])
    for k, architecture in enumerate(["gemma3", "olmo2", "cohere2"])
    for i, instructions in enumerate(SETS)
    for j, tree in enumerate(TREES)
]


@pytest.mark.fast_only(architecture=["llama"], name=["eagle3"])  # once in every set, with every tree
@pytest.mark.parametrize(("architecture", "instructions", "name", "tree", "batch_size"), SET_CASES)
def test_on_every_instruction_set_drafts_change_no_bit(
    architecture, instructions, name, tree, batch_size, narrow_of, monkeypatch
):
    """In bf16, where a product that depended on its neighbours would soon change a text."""
    monkeypatch.setenv("HEADSTART_CPU", instructions)
    target, head = narrow_of(architecture, name)
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
