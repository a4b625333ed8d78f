"""Several texts in one row: each is read, drafted for and paid for as if it stood alone."""

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.heads.base import DraftBatch
from headstart.heads.nn.documents import Documents
from headstart.heads.registry import HEADS, build_head
from perturbing import perturb

LENGTHS = [9, 14, 6]
PADDED = 32
TARGETS = ["llama", "mistral", "gemma3", "gpt_neox"]  # plain, sliding windows, both kinds, rotary over a part


def texts() -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(11)
    return [torch.randint(3, 61, (length,), generator=source) for length in LENGTHS]


def packed(target, head, rows: list[torch.Tensor]) -> DraftBatch:
    """One row that holds all texts, all of it supervised but the first token of each, and padding."""
    ids, mask = torch.zeros(1, PADDED, dtype=torch.long), torch.zeros(1, PADDED, dtype=torch.bool)
    start = 0
    for row in rows:
        ids[0, start : start + len(row)] = row
        mask[0, start + 1 : start + len(row)] = True
        start += len(row)
    documents = Documents.of([[len(row) for row in rows]], num_positions=PADDED)
    output = target.forward(ids, feature_layers=head.feature_layers, documents=documents)
    return DraftBatch(ids, mask, output, documents=documents)


def alone(target, head, row: torch.Tensor) -> DraftBatch:
    mask = torch.arange(len(row))[None] >= 1
    return DraftBatch(row[None], mask, target.forward(row[None], feature_layers=head.feature_layers))


def shaken(head_type, target, **changes):
    head = build_head(HEADS[head_type].config_class(type=head_type, **changes), target, seed=1)
    return perturb(head, 0.1, seed=3).eval()


def by_chain(head, batch: DraftBatch, *, behind: int = 0) -> dict[tuple[int, int], torch.Tensor]:
    """The draft logits of each valid chain, by where it starts, less `behind`, and depth."""
    starts, logits = head.teacher_forced_logits(batch)
    places = starts.valid[0].nonzero().tolist()
    return {(int(starts.positions[0, at]) - behind, depth): logits[0, at, depth] for at, depth in places}


OPTIONS = [(name, {}) for name in sorted(HEADS)] + [
    ("eagle", {"num_layers": 2}),
    ("eagle3", {"num_layers": 2, "fc_norm": True, "norm_output": True}),
    ("hydra", {"prefix_attention": True}),
    ("mtp", {"independent": True}),
    *((name, {"parallel": True, "num_depths": 4}) for name in ("draft_lm", "eagle3")),
]
# every head on one target, and on every target one with layers of its own and one with the target's
CASES = [(*option, TARGETS[0]) for option in OPTIONS]
CASES += [(name, {}, family) for name in ("eagle3", "mtp") for family in TARGETS[1:]]


@pytest.mark.parametrize(("head_type", "changes", "family"), CASES, ids=str)
def test_packed_texts_are_drafted_for_as_if_alone(head_type, changes, family, tiny_target):
    target = tiny_target(family)
    head, rows = shaken(head_type, target, **changes), texts()
    together, start = by_chain(head, packed(target, head, rows)), 0
    expected = {}
    for row in rows:
        expected |= by_chain(head, alone(target, head, row), behind=-start)
        start += len(row)
    assert together.keys() == expected.keys() and len(expected) > 20
    for key, logits in expected.items():
        torch.testing.assert_close(together[key], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_type", sorted(HEADS))
def test_the_loss_of_a_packed_row_is_that_of_its_texts(head_type, target):
    head, rows = shaken(head_type, target), texts()
    together = head.loss(packed(target, head, rows))
    parts = [head.loss(alone(target, head, row), together.depth_count) for row in rows]
    torch.testing.assert_close(together.loss, torch.stack([part.loss for part in parts]).sum(), rtol=1e-4, atol=1e-5)
    assert together.hits.sum() == sum(part.hits.sum() for part in parts)


@pytest.mark.parametrize("head_type", sorted(HEADS))
def test_another_text_in_the_row_changes_nothing(head_type, target):
    """All of the middle text replaced: not one bit moves in the others' logits."""
    head, rows = shaken(head_type, target), texts()
    before = by_chain(head, packed(target, head, rows))
    rows[1] = (rows[1] + 17) % 58 + 3
    after = by_chain(head, packed(target, head, rows))
    inside = range(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    assert {place for place, _ in before} & set(inside)
    for (place, depth), logits in before.items():
        same = torch.equal(after[place, depth], logits)
        assert same != (place in inside), (place, depth)


def test_what_a_mask_lets_through_is_noticed(target):
    """The check above can fail: without documents the texts see each other."""
    head, rows = shaken("eagle3", target), texts()
    batch = packed(target, head, rows)
    leaky = DraftBatch(batch.input_ids, batch.loss_mask, batch.output)
    kept_apart, mixed = by_chain(head, batch), by_chain(head, leaky)
    second = [key for key in kept_apart if key[0] >= LENGTHS[0]]
    assert second and not any(torch.allclose(kept_apart[key], mixed[key], atol=1e-3) for key in second)


def test_a_target_that_cannot_keep_texts_apart_is_refused(target, monkeypatch):
    monkeypatch.setattr(target.config, "layer_types", ["linear_attention"] * 4, raising=False)
    with pytest.raises(BadInput, match="linear_attention reads a row as one text: use data.layout padded"):
        target.forward(torch.ones(1, 4, dtype=torch.long), documents=Documents.of([[2, 2]], num_positions=4))
