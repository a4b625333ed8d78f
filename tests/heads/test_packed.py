"""Heads draft by the kernels for bf16 on a CPU what they draft in fp32, as near to it as their own layers in bf16:
through rejected drafts, in trees, and in whole texts."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from headstart.engines.heads import HEADS, build_head
from headstart.heads.base import DraftHead
from headstart.heads.drafting.drafter import Reading
from headstart.heads.drafting.trees import draft_chain
from headstart.targets.caches.ring_cache import DraftWindow
from headstart.targets.cpu.build import kernels
from headstart.targets.cpu.decoder import CpuLayers
from headstart.targets.layers.target_output import TargetOutput
from headstart.targets.target import Target

needs_kernels = pytest.mark.skipif(kernels() is None, reason="no products of bf16 on this processor, or no compiler")
SHAPES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
DFLASH2 = {"mask_token_id": 0, "markov_rank": 0, "conv_group_size": 16, "selector_rank": 7, "selector_top_k": 5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "eagle3 of two layers": ("eagle3", {"num_layers": 2, "norm_output": True, "fc_norm": True}),
    "eagle3 of others": ("eagle3", {"norm_before_residual": True, "draft_vocab_size": 20}),
    "eagle3, a window": ("eagle3", {"sliding_window": 5}),
    "eagle": ("eagle", {"num_layers": 2}),
    "eagle3, a draft window": ("eagle3", {"draft_window": DraftWindow(5, 2)}),
    "eagle, cut vocabulary": ("eagle", {"draft_vocab_size": 20}),
    "dspark": ("block", {"mask_token_id": 0, "markov_rank": 8}),
    "dspark, a window": ("block", {"mask_token_id": 0, "markov_rank": 8, "sliding_window": 8}),
    "dspark, a draft window": ("block", {"mask_token_id": 0, "markov_rank": 8, "draft_window": DraftWindow(8, 2)}),
    "convolutions": ("block", {"mask_token_id": 0, "markov_rank": 0, "conv_group_size": 16}),
    "dflash": ("block", {"mask_token_id": 0, "markov_rank": 0, "sample_from_anchor": False}),
}


@dataclass
class Versions:
    """The same weights in fp32; in bf16; and in bf16 by the kernels."""

    wide: DraftHead
    plain: DraftHead
    packed: DraftHead

    @property
    def all(self) -> tuple[DraftHead, ...]:
        return self.wide, self.plain, self.packed


@pytest.fixture(scope="module", params=list(CASES.values()), ids=list(CASES))
def versions(request, tiny_model):
    family, options = request.param
    options = dict(options)
    window = options.pop("draft_window", None)
    model = tiny_model("llama", **SHAPES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * (0.5 if parameter.ndim > 1 else 1.0)).bfloat16())
    narrow = tiny_model("llama", **SHAPES)
    narrow.load_state_dict(model.state_dict())
    wide = Target.of(model, name="wide", fingerprint="")
    target = Target.of(narrow.to(torch.bfloat16), name="narrow", fingerprint="")
    config = HEADS[family].config_class(type=family, **options)
    ids = None if config.draft_vocab_size is None else torch.arange(0, 60, 3)
    made = build_head(config, wide, draft_token_ids=ids, seed=2)
    source = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn(parameter.shape, generator=source)).bfloat16())
    heads = []
    for _ in range(2):
        head = build_head(config, target, draft_token_ids=ids).to(torch.bfloat16)
        head.load_state_dict(made.state_dict())
        heads.append(head.eval().requires_grad_(False))
    heads[1].pack()
    versions = Versions(made.eval(), *heads)
    for head in versions.all:
        head.draft_window = window
    return versions


@torch.no_grad()
def drafted(head, *, in_tree):
    """Logits of three rounds of two rows with given tokens, which reject some drafts, and the caches behind them."""
    source, found = torch.Generator().manual_seed(0), []
    state = head.begin(batch_size=2, max_length=64)
    starts, widths = torch.zeros(2, dtype=torch.long), (9, 4, 4)
    for width, num_valid in zip(widths, ([9, 6], [1, 3], [4, 2]), strict=True):
        tokens, following = (torch.randint(3, 61, (2, width), generator=source) for _ in range(2))
        states = torch.randn(2, width, 5, 64, generator=source).bfloat16()
        dtype = next(head.parameters()).dtype
        output = TargetOutput(states[:, :, : len(head.feature_layers)].to(dtype), states[:, :, 4].to(dtype))
        valid = torch.tensor(num_valid)
        head.commit(state, Reading(tokens, following, output, starts, valid, 40))
        found.append(head.first_logits(state))
        parents = torch.zeros(2, 3 if in_tree else 1, dtype=torch.long)
        for depth in (1, 2):
            nodes = torch.randint(3, 61, parents.shape, generator=source)
            found.append(head.expand(state, nodes, parents if in_tree else None, depth=depth))
            parents = torch.tensor([[0, 0, 2], [1, 2, 2]]) if in_tree else parents
        starts = starts + valid
    used = state.cache.stored[0][..., : int(starts.min()), :]
    return torch.cat([part.flatten() for part in found]).float(), used.float()


@needs_kernels
@pytest.mark.parametrize("in_tree", [False, True], ids=["chain", "tree"])
def test_logits_and_caches_are_as_near_to_fp32_as_the_heads_own(versions, in_tree):
    assert isinstance(versions.packed.packed, CpuLayers), "the kernels are used"
    exact, plain, ours = (drafted(head, in_tree=in_tree) for head in versions.all)
    for true, usual, found in zip(exact, plain, ours, strict=True):
        error, of_plain = (found - true).norm(), (usual - true).norm()
        assert of_plain < 0.1 * true.norm(), "the comparison means something"
        assert error <= 1.5 * of_plain + 1e-3


@needs_kernels
@torch.no_grad()
def test_its_own_layers_read_what_the_kernels_do_not(versions, monkeypatch):
    """Such as long prompts."""
    exact, plain, before = (drafted(head, in_tree=False)[0] for head in versions.all)
    monkeypatch.setattr("headstart.targets.cpu.decoder.most_kernel_tokens", lambda: 0)
    monkeypatch.setattr(CpuLayers, "__call__", None)
    after, _ = drafted(versions.packed, in_tree=False)
    of_plain, size = (plain - exact).norm(), exact.norm()
    assert (after - before).norm() < max(0.05 * size, 2 * of_plain) < 0.2 * size


@needs_kernels
@torch.no_grad()
def test_many_positions_leave_what_few_at_a_time_do(versions):
    """To the bit: of many the layer's output is computed at the last one alone."""
    head, source = versions.packed, torch.Generator().manual_seed(3)
    tokens, following = (torch.randint(3, 61, (2, 40), generator=source) for _ in range(2))
    states = torch.randn(2, 40, 5, 64, generator=source).bfloat16()
    output = TargetOutput(states[:, :, : len(head.feature_layers)], states[:, :, 4])
    read = Reading(tokens, following, output, torch.zeros(2, dtype=torch.long), torch.tensor([40, 33]), 64)
    found = []
    for step in (40, 4):
        state, last = head.begin(batch_size=2, max_length=64), torch.zeros(0)
        for first in range(0, 40, step):
            head.commit(state, read.part(first, first + step))
            if first < 33 <= first + step:
                last = head.first_logits(state)[1]
        used = state.cache.stored[0]
        found.append([head.first_logits(state)[0], last, used[:, :, 0, :, :40], used[:, :, 1, :, :33]])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@needs_kernels
@pytest.mark.parametrize(
    "versions",
    [("eagle3", {}), ("eagle3", {"draft_vocab_size": 20}), ("eagle3", {"draft_window": DraftWindow(3, 1)})],
    indirect=True,
    ids=["all", "cut vocabulary", "draft window"],
)
@torch.no_grad()
def test_a_chain_drafted_by_one_call_is_that_drafted_token_by_token(versions, monkeypatch):
    """To the bit, through rejected drafts, with the probabilities of its tokens; what was committed does not change."""
    head, source = versions.packed, torch.Generator().manual_seed(5)
    at_once, by_token = (head.begin(batch_size=2, max_length=64) for _ in range(2))
    starts = torch.zeros(2, dtype=torch.long)
    for width, num_valid in ((9, [9, 6]), (5, [1, 5]), (5, [3, 2])):
        tokens, following = (torch.randint(3, 61, (2, width), generator=source) for _ in range(2))
        states = torch.randn(2, width, 4, 64, generator=source).bfloat16()
        output = TargetOutput(states[:, :, :3], states[:, :, 3])
        read = Reading(tokens, following, output, starts, torch.tensor(num_valid), 40)
        for state in (at_once, by_token):
            head.commit(state, read)
        committed = at_once.hidden.clone()
        with monkeypatch.context() as patch:
            patch.setattr(type(head), "expand", None)
            found = head.propose(at_once, num_draft_tokens=4)
        wanted = draft_chain(head, by_token, num_draft_tokens=4)
        assert torch.equal(found.tokens, wanted.tokens) and torch.equal(at_once.hidden, committed)
        assert all(torch.equal(*pair) for pair in zip(found.logits, wanted.logits, strict=True))
        torch.testing.assert_close(found.estimates(), wanted.estimates())
        assert torch.equal(at_once.cache.stored[0], by_token.cache.stored[0])
        starts = starts + torch.tensor(num_valid)


@needs_kernels
@pytest.mark.parametrize(
    "versions", [("block", DFLASH2), ("block", {**DFLASH2, "draft_vocab_size": 20, "output": "own"})], indirect=True
)
@torch.no_grad()
def test_the_kernels_choose_among_candidates_as_the_selector_does(versions):
    head = versions.packed
    state, source = head.begin(batch_size=2, max_length=64), torch.Generator().manual_seed(0)
    tokens, following = (torch.randint(3, 61, (2, 9), generator=source) for _ in range(2))
    states = torch.randn(2, 9, 5, 64, generator=source).bfloat16()
    output = TargetOutput(states[:, :, : len(head.feature_layers)], states[:, :, 4])
    start, num_read = torch.zeros(2, dtype=torch.long), torch.tensor([9, 6])
    head.commit(state, Reading(tokens, following, output, start, num_read, 40))
    chosen, one_by_one = head.propose(state, num_draft_tokens=4), draft_chain(head, state, num_draft_tokens=4)
    assert torch.equal(chosen.tokens, one_by_one.tokens)
    for ours, torchs in zip(chosen.logits, one_by_one.logits, strict=True):
        assert torch.equal(ours.isfinite(), torchs.isfinite()) and int(ours[0].isfinite().sum()) == 5
        assert torch.allclose(ours.float(), torchs.float(), rtol=0.02, atol=0.02)
