"""However rows are laid out in batches, a run repeats and resumes exactly, and the same tokens pay the same loss."""

import json

import pytest
import torch
from headstart.data_pipelines.loader import collate
from headstart.data_pipelines.parallel import read_ahead
from headstart.data_pipelines.storage.samples import ANSWER, PROMPT, THINK, Sample
from headstart.data_pipelines.storage.shard_file import StoredSample
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.registry import build_head
from run_files import losses, metrics


@pytest.mark.fast_only(layout=["packed"])
@pytest.mark.parametrize("layout", ["bucketed", "packed"])
def test_a_run_of_any_layout_goes_on_exactly(layout, run):
    how = (f"data.layout={layout}", "data.max_length=60")
    whole = run("eagle3", "whole", *how)
    run("eagle3", "half", *how, "train.stop_at_step=3")
    half = run("eagle3", "half", *how)
    assert losses(half) == losses(whole) and len(losses(whole)) == 6
    assert losses(whole) != losses(run("eagle3", "padded", "data.max_length=60"))


def test_rows_are_encoded_once_and_an_interrupted_run_keeps_them(run):
    half = run("eagle3", "half", "train.stop_at_step=3")
    manifest = half / "tokens" / "manifest.json"
    written = manifest.stat().st_mtime_ns
    assert json.loads(manifest.read_text())["num_rows"] == 6
    run("eagle3", "half")
    assert manifest.stat().st_mtime_ns == written


def test_packing_pays_what_single_rows_pay(target):
    head = build_head(Eagle3Config(num_depths=3), target, seed=1).eval()
    source = torch.Generator().manual_seed(2)
    samples = []
    for length in (7, 12, 5, 9):
        ids = torch.randint(3, 61, (length,), generator=source).tolist()
        segments = [PROMPT] * 3 + [THINK] * 2 + [ANSWER] * (length - 5)
        samples.append(StoredSample(Sample.of(ids, [position >= 3 for position in range(length)], segments=segments)))

    def read(input_ids, documents=None):
        return target.forward(input_ids, feature_layers=head.feature_layers, documents=documents)

    weights = {"think": 0.25, "answer": 2.0}
    singles = head.loss(collate([[one] for one in samples], segment_weights=weights).filled(read))
    packed = collate([[samples[1], samples[0]], [samples[2], samples[3]]], segment_weights=weights)
    assert packed.num_tokens == 33 and packed.input_ids.shape == (2, 19)
    together = head.loss(packed.filled(read))
    torch.testing.assert_close(together.loss, singles.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.depth_count, singles.depth_count)
    unweighted = head.loss(collate([[one] for one in samples]).filled(read))
    assert not torch.allclose(unweighted.loss, singles.loss, rtol=1e-3)


def test_a_weight_that_all_tokens_share_is_none(run):
    plain, doubled = run("eagle3", "plain"), run("eagle3", "double", "data.segment_weights={answer: 2.0}")
    for one, other in zip(metrics(plain), metrics(doubled), strict=True):
        assert one["num_supervised"] == other["num_supervised"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_batches_are_read_ahead_in_order_and_errors_come_in_their_turn():
    def make(number: int) -> int:
        if number == 3:
            raise ValueError("the fourth")
        return number * number

    ahead = read_ahead(make, range(10))
    assert [next(ahead) for _ in range(3)] == [0, 1, 4]
    with pytest.raises(ValueError, match="the fourth"):
        next(ahead)
