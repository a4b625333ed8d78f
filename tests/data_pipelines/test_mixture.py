"""A mixture keeps its proportions wherever it is cut, the order of each source, and never repeats a row unasked."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from headstart.configs.errors import BadInput
from headstart.data_pipelines.mixture import interleave
from headstart.data_pipelines.sources import Row, iter_rows


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """a.jsonl, b.jsonl and c.jsonl, of 600, 300 and 30 rows."""
    monkeypatch.chdir(tmp_path)
    for name, size in (("a", 600), ("b", 300), ("c", 30)):
        lines = (json.dumps({"text": f"{name}{index}"}) + "\n" for index in range(size))
        Path(f"{name}.jsonl").write_text("".join(lines))


def mix(*weights: float | None, **how: Any) -> list[Row]:
    specs = [{"source": f"{name}.jsonl", "weight": weight} for name, weight in zip("abc", weights, strict=False)]
    return list(iter_rows(specs, **how))


def texts(rows: list[Row]) -> list[str]:
    return [row.data["text"] for row in rows]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("weights", [(2.0, 1.0), (0.7, 0.3), (5.0, 4.0)])
def test_two_sources_have_their_shares_to_within_a_row_at_every_cut(weights: tuple[float, ...], seed: int) -> None:
    counts, total = [0, 0], sum(weights)
    for row in mix(*weights, seed=seed):
        counts[row.source == "b.jsonl"] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - sum(counts) * weight / total) <= 1


def test_many_sources_have_their_shares_to_within_a_row_each() -> None:
    weights = [10.0, 5, 1, 1, 0.5]
    streams = [iter([index] * 2000) for index in range(5)]
    seen = Counter()
    for number, index in enumerate(islice(interleave(streams, weights=weights, seed=3), 3000), start=1):
        seen[index] += 1
        assert all(abs(seen[i] - number * weights[i] / sum(weights)) < len(weights) for i in range(5))


def test_each_source_keeps_its_order_and_no_row_comes_twice() -> None:
    rows = texts(mix(3.0, 2.0, 1.0))
    assert len(set(rows)) == len(rows)
    for name in "abc":
        own = [text for text in rows if text.startswith(name)]
        assert own == [f"{name}{index}" for index in range(len(own))]


def test_the_order_is_a_function_of_the_seed() -> None:
    first = texts(mix(1.0, 1.0, seed=0))
    assert texts(mix(1.0, 1.0, seed=0)) == first != texts(mix(1.0, 1.0, seed=1))
    assert texts(mix(1.0, 1.0, seed=0, num_rows=50)) == first[:50]


def test_it_ends_with_the_first_source_or_goes_on_to_the_end_of_all() -> None:
    counts = Counter(row.source for row in mix(1.0, 1.0, 1.0))
    assert counts["c.jsonl"] == 30 and all(abs(count - 30) <= 1 for count in counts.values())
    counts = Counter(row.source for row in mix(1.0, 1.0, 1.0, until="all"))
    assert counts == {"a.jsonl": 600, "b.jsonl": 300, "c.jsonl": 30}


def test_a_source_without_a_weight_counts_one_beside_others_that_have_one() -> None:
    counts = Counter(row.source for row in mix(2.0, None))
    assert abs(counts["a.jsonl"] - 600) <= 1 and abs(counts["b.jsonl"] - 300) <= 1
    assert [row.source for row in mix(None, None)] == ["a.jsonl"] * 600 + ["b.jsonl"] * 300


def test_a_source_repeats_only_when_asked_and_says_which_time_it_is() -> None:
    specs = [{"source": "a.jsonl", "weight": 10}, {"source": "c.jsonl", "weight": 1, "epochs": 2}]
    rows = list(iter_rows(specs))
    again = [row for row in rows if row.epoch == 1]
    assert [row.data["text"] for row in again] == [f"c{index}" for index in range(30)]
    assert abs(len(rows) - 660) <= 1


def test_num_rows_of_a_source_ends_it() -> None:
    specs = [{"source": "a.jsonl", "weight": 1, "num_rows": 20}, {"source": "b.jsonl", "weight": 3}]
    counts = Counter(row.source for row in iter_rows(specs))
    assert counts["a.jsonl"] == 20 and abs(counts["b.jsonl"] - 60) <= 3


def test_another_end_is_refused() -> None:
    with pytest.raises(BadInput, match="^until 'last': expected first or all$"):
        mix(1.0, 1.0, until="last")
