"""Every layout holds each sample once an epoch, whatever is asked first; bucketed rows are padded little."""

from collections import Counter

import numpy as np
import pytest
from headstart.data_pipelines.loader import BatchPlan
from headstart.data_pipelines.row_sequence import BLOCKS_PER_WINDOW, RowSequence

LENGTHS = np.random.default_rng(0).integers(4, 120, 1000)


def sequence(layout: str, *, seed: int = 3, block: int = 4, lengths: np.ndarray = LENGTHS) -> RowSequence:
    return RowSequence(lengths, layout=layout, seed=seed, block=block)


@pytest.mark.parametrize("layout", ["padded", "bucketed"])
def test_every_sample_comes_once_an_epoch(layout: str) -> None:
    rows, num = sequence(layout), {"padded": 2000, "bucketed": 9 * BLOCKS_PER_WINDOW * 4}[layout]
    seen = Counter(rows[place] for place in range(num))
    whole, rest = divmod(num, len(LENGTHS))
    assert len(seen) == len(LENGTHS)
    assert set(seen.values()) <= {whole, whole + 1} and sum(count > whole for count in seen.values()) == rest


@pytest.mark.parametrize("layout", ["padded", "bucketed"])
def test_a_row_does_not_depend_on_what_was_asked_before(layout: str) -> None:
    in_order = [sequence(layout)[place] for place in (0, 1, 700, 2500, 2501)]
    rows = sequence(layout)
    assert [rows[place] for place in (2501, 2500, 700, 1, 0)] == in_order[::-1]
    other = sequence(layout, seed=4)
    assert [other[place] for place in (0, 1, 700, 2500, 2501)] != in_order


def test_bucketed_rows_of_one_batch_are_of_like_length() -> None:
    plan = BatchPlan(sequence("bucketed", block=8), batch_size=4, num_ranks=2)
    other = BatchPlan(plan.sequence, batch_size=4, num_ranks=2, rank=1)
    spread = [
        max(lengths) - min(lengths)
        for lengths in ([LENGTHS[row] for row in plan.rows(n) + other.rows(n)] for n in range(40))
    ]
    assert np.mean(spread) < 8  # of 116; at random about 90
    assert plan.padding() < 0.06 < BatchPlan(sequence("padded"), batch_size=4).padding()


@pytest.mark.parametrize("num_samples", [8, 100, 128, 500, 1000])
def test_a_bucketed_batch_within_an_epoch_has_no_row_twice(num_samples: int) -> None:
    """Neither of few rows, which a window of 64 batches would hold several times."""
    plan = BatchPlan(sequence("bucketed", block=8, lengths=LENGTHS[:num_samples]), batch_size=8)
    window = min(64, num_samples // 8)
    batches = [plan.rows(number) for number in range(3 * window)]
    spanning = [batch for batch in batches if len(set(batch)) < 8]
    assert not spanning if num_samples % (8 * window) == 0 else len(spanning) <= 2  # at most one an epoch's end
    seen = Counter(row for batch in batches for row in batch)
    assert max(seen.values()) - min(seen[row] for row in range(num_samples)) <= 1


@pytest.mark.parametrize("layout", ["padded", "bucketed"])
def test_ranks_share_the_batch_that_one_rank_would_have(layout: str) -> None:
    whole = BatchPlan(sequence(layout, block=8), batch_size=8)
    parts = [BatchPlan(sequence(layout, block=8), batch_size=4, num_ranks=2, rank=rank) for rank in (0, 1)]
    for number in (0, 5, 300):
        assert parts[0].rows(number) + parts[1].rows(number) == whole.rows(number)
    assert [parts[0].epoch(number) for number in (0, 50, 125)] == [0, 0.4, 1]
