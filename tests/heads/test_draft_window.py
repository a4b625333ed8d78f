"""A draft window set for decoding on heads that were trained without: what they attend to, keep, and draft."""

import pytest
import torch
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.eval.decoding import generate
from headstart.heads.drafting.drafter import Reading
from headstart.heads.drafting.trees import DynamicTree
from headstart.targets.caches.cache import SlotCache
from headstart.targets.caches.masks import hiding
from headstart.targets.caches.ring_cache import ROOM, DraftWindow, RingCache
from headstart.targets.layers.target_output import TargetOutput
from perturbing import perturb

LONG = {"max_position_embeddings": 1024}
CASES = {
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {}),
    "eagle3 of two layers": ("eagle3", {"num_layers": 2}),
    "p-eagle": ("eagle3", {"parallel": True, "mask_token_id": 0}),
    "mtp": ("mtp", {}),
    "dflash": ("block", {"mask_token_id": 0, "markov_rank": 0, "sample_from_anchor": False}),
    "dspark": ("block", {"mask_token_id": 0, "markov_rank": 8}),
}


class Whole(SlotCache):
    """Keeps all positions, and hides those that the window leaves out."""

    def __init__(self, *, num_layers, max_length, window):
        super().__init__(num_layers=num_layers, max_length=max_length)
        self.kept = window

    def read_mask(self, positions, last, *, dtype):
        slots, positions, last = torch.arange(self.extent), positions[..., None], last[..., None]
        seen = (slots <= last) & ((slots < self.kept.sink) | (slots > positions - self.kept.size))
        return hiding(~seen, dtype=dtype)[:, None]

    def mask(self, positions, *, dtype, **kwargs):
        return self.read_mask(positions, positions, dtype=dtype)


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def head(request, tiny_target):
    family, options = request.param
    head = untrained(family, tiny_target("llama", **LONG), **options)
    perturb(head, 0.1, seed=3)
    return head


@torch.no_grad()
def rounds(head, *, lengths, max_length=1024):
    """The draft logits of three rounds behind two prompts of these lengths, some of whose drafts are rejected, then a
    tree's tokens; and the state."""
    source, found, size = torch.Generator().manual_seed(0), [], head.target.hidden_size
    state = head.begin(batch_size=2, max_length=max_length)
    starts = torch.zeros(2, dtype=torch.long)
    for width, num_valid in ((max(lengths), lengths), (5, [1, 5]), (5, [3, 2])):
        tokens, following = (torch.randint(3, 61, (2, width), generator=source) for _ in range(2))
        states = torch.randn(2, width, 6, size, generator=source)
        output, valid = TargetOutput(states[:, :, : len(head.feature_layers)], states[:, :, 5]), torch.tensor(num_valid)
        read = Reading(tokens, following, output, starts, valid, int(starts.max()) + width + 40)
        if width > 5:
            head.commit_prompts(state, read, most=2048)
            read = read.again(5)
        head.commit(state, read)
        found += head.propose(state, num_draft_tokens=3).logits
        starts = starts + valid
    tree = head.propose_tree(state, DynamicTree(num_nodes=8, depth=3, top_k=3))
    return torch.stack(found), tree.tokens, state


def test_what_the_ring_lost_is_what_the_window_leaves_out(head, monkeypatch):
    """Behind padding, rejected drafts and several turns of the ring; and it does leave something out."""
    head.draft_window, lengths = DraftWindow(20, 3), [500, 170]
    window = head.draft_window
    ring, ring_tree, state = rounds(head, lengths=lengths)
    assert isinstance(state.cache, RingCache)
    monkeypatch.setattr(head, "new_cache", lambda n, length: Whole(num_layers=n, max_length=length, window=window))
    whole, tree, _ = rounds(head, lengths=lengths)
    torch.testing.assert_close(ring, whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(ring_tree, tree)
    monkeypatch.undo()
    head.draft_window = None
    assert not torch.allclose(rounds(head, lengths=lengths)[0], whole, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("size", [600, 5000], ids=["than the text", "than any"])
def test_a_window_wider_than_the_text_changes_no_bit(head, size):
    plain, tree, _ = rounds(head, lengths=[300, 41])
    head.draft_window = DraftWindow(size, 4)
    windowed, windowed_tree, _ = rounds(head, lengths=[300, 41])
    assert torch.equal(plain, windowed) and torch.equal(tree, windowed_tree)


def test_what_is_kept_and_read_does_not_grow_with_the_text(head):
    head.draft_window, sizes = DraftWindow(20, 3), []
    for length in (400, 800):
        cache = rounds(head, lengths=[length, 40], max_length=length + 64)[2].cache
        assert cache.extent == cache.num_slots == cache.stored[0].shape[-2]
        sizes.append(cache.num_slots)
    assert sizes[0] == sizes[1] <= 20 + 3 + ROOM + 64


def test_texts_stay_the_targets_own(head):
    source, target = torch.Generator().manual_seed(1), head.target
    prompts = [torch.randint(3, 61, (n,), generator=source).tolist() for n in (210, 9, 140)]
    own = generate(target, None, prompts, max_new_tokens=20, eos_token_ids=[]).token_ids
    head.draft_window = DraftWindow(8, 2)
    for tree in (None, DynamicTree(num_nodes=8, depth=3, top_k=3)):
        drafted = generate(target, head, prompts, max_new_tokens=20, num_draft_tokens=3, tree=tree, eos_token_ids=[])
        assert drafted.token_ids == own


def test_a_tree_without_room_is_refused(tiny_target):
    head = untrained("eagle3", tiny_target("llama", **LONG))
    head.draft_window = DraftWindow(20)
    tree = DynamicTree(num_nodes=200, depth=6, top_k=30)
    with pytest.raises(BadInput, match="a tree of 150 expanded nodes, at most 128"):
        generate(head.target, head, [[1, 5, 9]], max_new_tokens=400, tree=tree)


@pytest.mark.parametrize("text", ["", "0", "-3", "12:", "12:x", "a"])
def test_what_is_no_window_is_refused(text):
    with pytest.raises(BadInput, match=r"expected N or N:SINK"):
        DraftWindow.parse(text)
