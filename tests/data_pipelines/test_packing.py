"""Every layout holds each sample once an epoch, whatever is asked first; packed rows are full and never too long."""

from collections import Counter

import numpy as np
import pytest
from headstart.data_pipelines.loader import BatchPlan
from headstart.data_pipelines.packing import BLOCKS_PER_WINDOW, WINDOW, RowSequence

LENGTHS = np.random.default_rng(0).integers(4, 120, 1000)


def sequence(layout: str, *, seed: int = 3, block: int = 4, lengths: np.ndarray = LENGTHS) -> RowSequence:
    return RowSequence(lengths, layout=layout, seed=seed, block=block, capacity=256)


@pytest.mark.parametrize("layout", ["padded", "bucketed", "packed"])
def test_every_sample_comes_once_an_epoch(layout: str) -> None:
    rows = sequence(layout)
    num_samples = {"padded": 2000, "bucketed": 125 * BLOCKS_PER_WINDOW * 4, "packed": 3 * WINDOW}[layout]
    seen: Counter[int] = Counter()
    place = 0
    while seen.total() < num_samples:
        seen.update(rows[place])
        place += 1
    whole, rest = divmod(seen.total(), len(LENGTHS))
    assert seen.total() == num_samples and len(seen) == len(LENGTHS)
    assert set(seen.values()) <= {whole, whole + 1} and sum(count > whole for count in seen.values()) == rest


@pytest.mark.parametrize("layout", ["padded", "bucketed", "packed"])
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
        for lengths in ([LENGTHS[row].sum() for row in plan.rows(n) + other.rows(n)] for n in range(40))
    ]
    assert np.mean(spread) < 8  # of 116; at random about 90
    assert plan.padding() < 0.06 < BatchPlan(sequence("padded"), batch_size=4).padding()


def test_packed_rows_are_nearly_full_and_never_too_long() -> None:
    plan = BatchPlan(sequence("packed"), batch_size=4)
    totals = [LENGTHS[row].sum() for number in range(60) for row in plan.rows(number)]
    assert max(totals) <= 256 and np.mean(totals) > 0.97 * 256
    assert plan.padding() < 0.03


@pytest.mark.parametrize("layout", ["padded", "bucketed", "packed"])
def test_ranks_share_the_batch_that_one_rank_would_have(layout: str) -> None:
    whole = BatchPlan(sequence(layout, block=8), batch_size=8)
    parts = [BatchPlan(sequence(layout, block=8), batch_size=4, num_ranks=2, rank=rank) for rank in (0, 1)]
    for number in (0, 5, 300):
        assert parts[0].rows(number) + parts[1].rows(number) == whole.rows(number)


@pytest.mark.parametrize("layout", ["padded", "bucketed", "packed"])
def test_epochs_are_counted_in_samples(layout: str) -> None:
    plan = BatchPlan(sequence(layout), batch_size=4)
    for number in (0, 50, 900):
        held = sum(len(row) for before in range(number) for row in plan.rows(before))
        assert plan.epoch(number) == pytest.approx(held / len(LENGTHS), abs=0.05)
