"""What training counts: every loss and every head, by depth and by weights of tokens."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from headstart.configs.loader import build, read_config, shipped
from headstart.engines.heads import HEADS, head_class
from headstart.heads.assistant import AssistantHead
from headstart.heads.base import DraftBatch
from headstart.heads.loss import chunked as depth_loss
from headstart.heads.loss import functions as losses
from headstart.heads.loss.chains import chain_starts
from headstart.heads.loss.functions import LOSSES, depth_weights_of
from perturbing import losses_on, perturbed


def source(seed=0):
    return torch.Generator().manual_seed(seed)


trained_looking = partial(perturbed, scale=0.2)


@pytest.mark.parametrize("loss", [None, {"l1": 1.0, "topk_ce": 0.5, "feature": 0.1}])
def test_a_chunked_loss_is_the_whole_one(head_type, loss, target, make_batch, monkeypatch):
    results = []
    for chunk in (1, 10**9):
        monkeypatch.setattr(depth_loss, "CHUNK", {"cpu": chunk})
        head = trained_looking(head_type, target, **({} if loss is None else {"loss": loss}))
        out = head.loss(make_batch(target, head))
        out.loss.backward()
        results.append((out.loss.detach(), out.depth_loss, out.hits.float(), *[p.grad for p in head.parameters()]))
    for chunked, whole in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=2e-5 + 1e-5 * float(whole.abs().max()))


@pytest.mark.parametrize(("gigabytes", "size"), [(16, 2**28), (24, 2**28), (40, 2**29), (80, 2**30), (900, 2**31)])
def test_chunks_are_larger_where_a_gpus_memory_allows(gigabytes, size, monkeypatch):
    """With a vocabulary of 152k, 19 additions to the output layer's gradient become 5 on a GPU of 80 GB."""
    properties = SimpleNamespace(total_memory=gigabytes * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    depth_loss.most_logits.cache_clear()
    assert depth_loss.chunk_size(2**14, torch.device("cuda")) == size // 2**14
    depth_loss.most_logits.cache_clear()


def test_a_cpu_scores_enough_positions_at_a_time_of_any_vocabulary():
    """Else it reads the output layer again for every few of them: of 49,152 tokens and 7 depths, for every 5."""
    cpu = torch.device("cpu")
    sizes = [depth_loss.chunk_size(8 * vocabulary, cpu) for vocabulary in (512, 4096, 49152, 152064)]
    assert sizes == [512, 64, 64, 64]


# each loss with one head, as all are functions of logits; every head with that of its states: with its default loss,
# test_contract.py
PAIRS = [(name, "eagle3") for name in LOSSES if name != "feature"] + [("feature", name) for name in sorted(HEADS)]


@pytest.mark.parametrize(("name", "head_type"), PAIRS)
def test_every_loss_trains_every_head(name, head_type, target, make_batch):
    """Ten steps on one batch lower it; `feature` alone leaves out an output layer of the head's own."""
    head = trained_looking(head_type, target, num_depths=2, loss={name: 1.0})
    batch = make_batch(target, head)
    values = losses_on(head, batch, lr=3e-3, num_steps=10)
    assert values[-1] < values[0] - 1e-3
    if name != "feature":
        assert all(parameter.grad is not None for parameter in head.parameters())


def test_the_state_that_feature_compares_is_what_the_output_layer_or_the_next_depth_reads(
    head_type, target, make_batch
):
    head = trained_looking(head_type, target, num_depths=2)
    batch = make_batch(target, head)
    layers = [
        m for m in (*head.modules(), target.output_layer) if getattr(m, "out_features", None) == target.vocab_size
    ]
    read = []
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0])) for layer in layers]
    for depth, hidden in enumerate(head.unroll(batch, chain_starts(batch.loss_mask, 2))):
        state = head.predicted_state(hidden, depth)
        assert state.shape[-1] == target.hidden_size
        read.clear()
        head.draft_logits(hidden, depth)
        if isinstance(head, AssistantHead):  # whose output layer is narrower
            read = [head.fed_back(hidden)]
        assert any(torch.equal(state.reshape(-1, target.hidden_size), x.reshape(-1, target.hidden_size)) for x in read)
    for hook in hooks:
        hook.remove()


# Depths


@pytest.mark.parametrize("kind", losses.DEPTH_WEIGHTS)
def test_the_loss_is_the_weighted_sum_over_depths(kind, head_type, target, make_batch):
    how = {"num_depths": 3, "depth_weights": kind, "depth_decay": 0.7}
    head = trained_looking(head_type, target, loss={"hard_ce": 0.1, "l1": 0.9}, **how)
    out = head.loss(make_batch(target, head))
    weights = depth_weights_of(kind, decay=0.7, num_depths=3)
    wanted = sum(w * s / n for w, s, n in zip(weights, out.depth_loss, out.depth_count, strict=True))
    torch.testing.assert_close(out.loss.detach(), wanted)


# Weights of tokens


def test_weights_of_tokens_are_those_of_the_labels(head_type, target, make_batch):
    head = trained_looking(head_type, target, num_depths=3)
    batch = make_batch(target, head)
    weights = torch.rand(batch.input_ids.shape, generator=source(6)) * 0.01  # their sum is below 1
    counts = chain_starts(batch.loss_mask, 3).counts(weights)
    sums = torch.zeros(3)
    starts = chain_starts(batch.loss_mask, 3)
    for row in range(len(weights)):
        for at, t in enumerate(starts.positions[row].tolist()):
            for depth in range(3):
                if starts.valid[row, at, depth]:
                    sums[depth] += weights[row, t + 2 + depth]
    torch.testing.assert_close(counts, sums)
    assert torch.equal(starts.counts(), starts.valid.sum((0, 1)).float())

    parts = [DraftBatch(batch.input_ids, batch.loss_mask, batch.output, w) for w in (weights, 3 * weights)]
    some, more = (head.loss(part) for part in parts)
    torch.testing.assert_close(some.loss, more.loss)
    torch.testing.assert_close(3 * some.depth_loss, more.depth_loss)
    torch.testing.assert_close(some.depth_count, counts)
    ones = head.loss(DraftBatch(batch.input_ids, batch.loss_mask, batch.output, torch.ones_like(weights)))
    torch.testing.assert_close(ones.loss, head.loss(batch).loss)
    assert torch.equal(ones.hits, some.hits)


def test_tokens_of_weight_zero_are_as_good_as_absent(head_type, target, make_batch):
    """The last supervised token of each row: with weight 0 it is no label, as if the row had ended before it."""
    head = trained_looking(head_type, target, num_depths=3)
    batch = make_batch(target, head)
    last = batch.loss_mask & ~torch.nn.functional.pad(batch.loss_mask, (0, 1))[:, 1:]
    assert last.sum() == len(last)
    muted = head.loss(DraftBatch(batch.input_ids, batch.loss_mask, batch.output, (~last).float()))
    shorter = head.loss(DraftBatch(batch.input_ids, batch.loss_mask & ~last, batch.output))
    torch.testing.assert_close(muted.loss, shorter.loss)
    torch.testing.assert_close(muted.depth_count, shorter.depth_count)
    nothing = head.loss(DraftBatch(batch.input_ids, batch.loss_mask, batch.output, torch.zeros(last.shape)))
    nothing.loss.backward()
    assert nothing.loss == 0 and all(p.grad is not None and p.grad.abs().sum() == 0 for p in head.parameters())


# The config


def test_shipped_heads_and_their_mixes_build(head_type, tmp_path):
    [path] = shipped(f"heads/{head_type}.yaml")
    config_class = head_class(head_type).config_class
    default = build(config_class, read_config(path)["head"])
    assert default.loss == config_class(type=head_type).loss, "the file says the default"
    more = build(config_class, read_config(path, ["head.loss.l1=5e-1"])["head"])
    assert more.loss == {**default.loss, "l1": 0.5}
    assert build(config_class, read_config(path, ["head.loss={kl: 1}"])["head"]).loss == {"kl": 1.0}
    run = tmp_path / "run.yaml"
    run.write_text(f"base: {path}\nhead: {{loss: !replace {{hard_ce: 0.1, l1: 0.9}}}}\n")
    assert build(config_class, read_config(run)["head"]).loss == {"hard_ce": 0.1, "l1": 0.9}
