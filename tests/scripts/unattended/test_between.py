"""How far a head goes from its old weights: what lies between, and which of it is taken."""

from dataclasses import replace

import pytest
import torch
from headstart.data_pipelines.storage.samples import Sample
from headstart.data_pipelines.traffic import ServedChat
from headstart.data_pipelines.vocab import SIZE_STEP
from headstart.heads.folder import read_tensors
from headstart.heads.registry import HEADS, build_head, load_head, save_head, start_head
from headstart.scripts.unattended.comparing import best_share, head_between, is_enough, write_between
from headstart.scripts.unattended.journal import Share
from headstart.scripts.unattended.machine import ready
from headstart.scripts.unattended.training import grown_vocabulary

FEW, MORE = [1, 2, 3, 5, 8, 13, 21], [1, 2, 3, 4, 5, 8, 13, 14, 21]  # draft vocabularies
ROWS = [ServedChat({"messages": []}, f"logs:{i}", f"q{i}") for i in range(4)]


@pytest.mark.parametrize(
    ("lengths", "share"),
    [
        ({0.0: (1.0, 3.0), 1.0: (1.5, 2.9), 0.5: (1.4, 2.99), 0.2: (1.2, 3.1)}, 0.5),
        ({0.0: (1.0, 3.0), 1.0: (1.5, 3.0), 0.5: (1.6, 3.0)}, 0.5),
        ({0.0: (1.0, 3.0), 1.0: (1.5, 2.0), 0.5: (1.4, 2.5)}, 0.1),
        ({0.0: (1.0, None), 1.0: (1.5, None), 0.5: (1.4, None)}, 1.0),
    ],
)
def test_as_far_from_the_old_weights_as_old_rows_allow(lengths, share):
    assert best_share([Share(at, *pair) for at, pair in lengths.items()]) == share


def test_a_choice_needs_rows_of_both_sides():
    rows = {f"{side}:{i}": row for side in ("new", "old") for i, row in enumerate(ROWS)}
    assert is_enough(rows, has_old=True)
    few = {key: row for key, row in rows.items() if key != "old:0"}
    assert not is_enough(few, has_old=True) and is_enough(few, has_old=False)


@pytest.fixture
def folders(target, tmp_path):
    """An old head of 7 tokens, and one that learnt on from it with 9."""
    few, more = torch.tensor(FEW), torch.tensor(MORE)
    config = HEADS["eagle3"].config_class(type="eagle3", draft_vocab_size=7)
    old = save_head(build_head(config, target, draft_token_ids=few, seed=5), tmp_path / "old")
    trained = start_head(replace(config, draft_vocab_size=9), target, old, draft_token_ids=more)
    with torch.no_grad():
        for value in trained.parameters():
            value.add_(1.0)
    return str(old), str(save_head(trained, tmp_path / "trained", training={"steps": 3}))


def test_weights_are_between_and_the_ends_are_the_two_heads(folders, target, tmp_path):
    old, trained = folders
    half = head_between(old, trained, target, 0.5)
    ends = [head_between(old, trained, target, share).state_dict() for share in (0.0, 1.0)]
    for name, value in half.state_dict().items():
        assert torch.allclose(value, ends[0][name] + 0.5, atol=1e-5), name
    assert all(torch.equal(value, read_tensors(trained)[0][name]) for name, value in ends[1].items())
    kept = torch.isin(torch.tensor(MORE), torch.tensor(FEW))
    assert torch.equal(ends[0]["lm_head.weight"][kept], read_tensors(old)[0]["lm_head.weight"])


def test_the_head_that_is_written_is_the_one_that_was_read(folders, target, tmp_path):
    old, trained = folders
    folder = write_between(old, trained, target, 0.3, tmp_path / "head")
    written, read = load_head(folder, target), ready(head_between(old, trained, target, 0.3), target)
    assert all(torch.equal(value, read.state_dict()[name]) for name, value in written.state_dict().items())
    assert not read.training and not any(value.requires_grad for value in read.parameters())


def test_more_tokens_only_where_the_rows_need_them(tiny_target):
    config, few = HEADS["eagle3"].config_class(type="eagle3", draft_vocab_size=4), torch.tensor([1, 2, 3, 5])
    head = build_head(config, tiny_target("llama", vocab_size=1024), draft_token_ids=few)
    known, unknown = (Sample.of([1, *tokens * 200], [False, *[True] * 600]) for tokens in ([2, 3, 5], [4, 6, 1000]))
    same, more = grown_vocabulary(head, [known]), grown_vocabulary(head, [known, unknown])
    assert same is not None and torch.equal(same, few)
    assert more is not None and len(more) == SIZE_STEP and {*few.tolist(), 4, 6, 1000} <= set(more.tolist())
    whole = build_head(HEADS["eagle3"].config_class(type="eagle3"), tiny_target("llama"))
    assert grown_vocabulary(whole, [known]) is None
