"""Rows are encoded once for a run; segments weigh in the loss what is asked."""

import json
from functools import partial

import pytest
import torch
from headstart.data_pipelines.loader import collate
from headstart.data_pipelines.rows.parallel import read_ahead
from headstart.data_pipelines.rows.samples import ANSWER, PROMPT, THINK, Sample
from headstart.data_pipelines.storage.shard_file import StoredSample
from headstart.engines.heads import build_head
from headstart.heads.eagle3 import Eagle3Config


def test_rows_are_encoded_once_and_an_interrupted_run_keeps_them(run):
    half = run("eagle3", "half", "train.stop_at_step=3")
    manifest = half / "tokens" / "manifest.json"
    written = manifest.stat().st_mtime_ns
    assert json.loads(manifest.read_text())["num_rows"] == 6
    run("eagle3", "half")
    assert manifest.stat().st_mtime_ns == written


def test_rows_of_a_batch_pay_what_they_pay_alone_by_segment(target):
    head = build_head(Eagle3Config(num_depths=3), target, seed=1).eval()
    source = torch.Generator().manual_seed(2)
    samples = []
    for length in (7, 12, 5, 9):
        ids = torch.randint(3, 61, (length,), generator=source).tolist()
        segments = [PROMPT] * 3 + [THINK] * 2 + [ANSWER] * (length - 5)
        samples.append(StoredSample(Sample.of(ids, [position >= 3 for position in range(length)], segments=segments)))
    read, weights = partial(target.forward, feature_layers=head.feature_layers), {"think": 0.25, "answer": 2.0}
    batch = collate(samples, segment_weights=weights)
    assert batch.num_tokens == 33 and batch.input_ids.shape == (4, 12)
    together = head.loss(batch.filled(read))
    rows = [collate([one], segment_weights=weights).filled(read) for one in samples]
    alone = torch.stack([head.loss(row, together.depth_count).loss for row in rows])
    torch.testing.assert_close(together.loss, alone.sum(), rtol=1e-4, atol=1e-5)
    plain = head.loss(collate(samples).filled(read))
    assert not torch.allclose(plain.loss, together.loss, rtol=1e-3)
    doubled = head.loss(collate(samples, segment_weights={"think": 2.0, "answer": 2.0}).filled(read))
    torch.testing.assert_close(doubled.loss, plain.loss)  # a weight that all tokens share is none


def test_batches_are_read_ahead_in_order_and_errors_come_in_their_turn():
    def make(number: int) -> int:
        if number == 3:
            raise ValueError("the fourth")
        return number * number

    ahead = read_ahead(make, range(10))
    assert [next(ahead) for _ in range(3)] == [0, 1, 4]
    with pytest.raises(ValueError, match="the fourth"):
        next(ahead)
