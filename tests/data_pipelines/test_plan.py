"""The plan's figures follow from counts and measured rates, and the estimate before writing is what is written."""

import json
from dataclasses import asdict

import pytest
from headstart.configs.errors import BadInput
from headstart.data_pipelines import plan as plan_module
from headstart.data_pipelines.comparison import Online, compare_storages
from headstart.data_pipelines.plan import (
    ExtractionRates,
    Survey,
    estimate,
    in_hours,
    measure_storages,
    row_stride,
    samples_for_time,
    survey_samples,
)
from headstart.data_pipelines.storage.extract import ExtractConfig, Extraction, fields_of, in_bytes
from headstart.data_pipelines.storage.features import Reads
from headstart.data_pipelines.storage.samples import Sample
from headstart.data_pipelines.storage.shard_file import StoredSample
from headstart.data_pipelines.storage.shards import Shards, ShardWriter
from headstart.heads.registry import HEADS, build_head
from headstart.heads.target import Target
from headstart.scripts.data.plan import plan as plan_command


@pytest.fixture
def head(target):
    return build_head(HEADS["eagle3"].config_class(type="eagle3"), target)


def make_samples(num_rows=30):
    return [Sample.of([5] * (10 + row % 7), [i >= 4 for i in range(10 + row % 7)]) for row in range(num_rows)]


def test_a_survey_counts_all_rows_and_draws_some():
    samples, reads = make_samples(), Reads((1, 2, 3), "context", "labels")
    found = survey_samples(iter(samples), reads, hidden_size=32, num_drawn=8)
    assert (found.num_rows, found.num_tokens) == (30, sum(map(len, samples)))
    assert found.num_supervised_tokens == sum(len(sample) - 4 for sample in samples)
    for name, item, scale in (("float32", 4, 0), ("bfloat16", 2, 0), ("8bit", 1, 2)):
        kept = sum(3 * (len(sample) - 2) + len(sample) - 5 for sample in samples)  # features to the last start; labels
        assert found.num_bytes[name] == 28 * 30 + 5 * found.num_tokens + kept * (32 * item + scale)
    assert len(found.drawn) == 8
    assert found.drawn == survey_samples(samples, reads, hidden_size=32, num_drawn=8).drawn
    assert found.drawn != samples[:8]


def test_the_epochs_from_which_the_cache_pays_off():
    found = Survey(100, 36_000_000, 30_000_000, {"float32": 10**12, "8bit": 10**11})
    rates = {"float32": ExtractionRates(1000.0, 800.0, 1125.0), "8bit": ExtractionRates(1000.0, 1000.0, 10_000.0)}
    comparison = compare_storages(found, rates, free_bytes=5 * 10**11, num_processes=2)
    exact, small = comparison.extracted
    assert comparison.online == Online(2000.0, 18_000.0)
    assert small.extraction_hours == 5.0 and small.seconds_saved_per_epoch == 16_200.0
    assert small.pays_off_after_epochs == 2 and small.fits and not exact.fits
    assert exact.pays_off_after_epochs == 12 and exact.extraction_over_forward == 0.8
    slow = {"8bit": ExtractionRates(1000.0, 900.0, 500.0)}
    assert compare_storages(found, slow, free_bytes=0).extracted[0].pays_off_after_epochs is None
    json.dumps(asdict(comparison))


def test_the_estimate_says_what_is_left(target, head, extract, tmp_path):
    writer = ShardWriter(tmp_path / "tokens")
    for sample in make_samples():
        writer.add(StoredSample(sample))
    writer.finish()
    samples, reads, config = Shards(tmp_path / "tokens"), Reads.of(head), ExtractConfig(shard_bytes=9000)
    extraction = Extraction(samples, target, reads, config=config, fields=fields_of(target, reads, config, {}))
    said = estimate(extraction, tmp_path / "out")
    tokens = int(samples.lengths.sum())
    assert f"{tokens:,} tokens, {in_bytes(extraction.num_bytes)} in 8bit" in said and f"for the {tokens:,} tok" in said
    extraction.run(tmp_path / "out", rank=1, num_ranks=2)
    left = extraction.num_tokens(0, 2)
    assert 0 < left < tokens and f"for the {left:,} tok" in estimate(extraction, tmp_path / "out")
    extract(samples, target, head, tmp_path / "out", config=config)
    assert sorted(path.name[:5] for path in (tmp_path / "out").iterdir())[0] == "manif", "nothing is left of measuring"


def test_sizes_and_times_in_words():
    assert [in_bytes(x) for x in (5_000, 2.4e6, 1.234e9, 38e12)] == ["5 kB", "2.4 MB", "1.23 GB", "38 TB"]
    assert [in_hours(x) for x in (0.05, 2.345)] == ["3 minutes", "2.35 hours"]


def test_the_command(tmp_path, saved_target, capsys):
    path = tmp_path / "run.yaml"
    data = saved_target.with_name("rows.jsonl")
    path.write_text(f"target: {{path: {saved_target}}}\nhead: {{type: medusa}}\ndata: {{train: {data}}}\n")
    plan_command(str(path), disk=tmp_path, device="cpu", seconds=1.0, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert result["num_rows"] == 6 and result["post_norm_at"] == "starts"
    assert [row["storage_dtype"] for row in result["extracted"]] == ["float32", "bfloat16", "8bit"]
    plan_command(str(path), ["data.max_length=20"], disk=tmp_path, device="cpu", seconds=1.0, num_sampled=2)
    assert "pays off" in capsys.readouterr().out
    with pytest.raises(BadInput, match="--disk .*nowhere: no such folder"):
        plan_command(str(path), disk=tmp_path / "nowhere", device="cpu")
    with pytest.raises(BadInput, match="--num-sampled 0"):
        plan_command(str(path), num_sampled=0)


def test_the_measured_rows_fit_the_time(target, monkeypatch):
    """A forward of 14 tokens takes a second here: 176 s for four passes of forward and of three storages."""
    samples = make_samples(60)
    ticks = iter(range(100))
    monkeypatch.setattr(plan_module.time, "perf_counter", lambda: float(next(ticks)))
    kept = samples_for_time(samples, target, seconds=176)
    assert kept == samples[: len(kept)] and 0.9 < sum(map(len, kept)) / (176 / 5.5 / 4 * 13) <= 1
    assert len(samples_for_time(samples, target, seconds=0.001)) == 1
    assert len(samples_for_time(samples, target, seconds=1e6)) == 60


def test_rates_say_how_far_passes_differ_and_leave_nothing_behind(target, head, tmp_path):
    how = {"configs": [ExtractConfig(batch_tokens=64)], "folder": tmp_path}
    [rates] = measure_storages(make_samples(8), target, Reads.of(head), **how)
    assert 0 < rates.ratio < 5 and rates.reading > 0 and 0 <= rates.spread < 3
    assert not list(tmp_path.iterdir())
    found = survey_samples(make_samples(8), Reads.of(head), hidden_size=32, num_drawn=4)
    comparison = compare_storages(found, {"float32": ExtractionRates(1.0, 1.0, 1.0, 0.125)}, free_bytes=0)
    assert (comparison.num_measured, comparison.spread) == (4, 0.125)


class Clock:
    """Seconds that pass only where work is done."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(plan_module.time, "perf_counter", self.read)

    def read(self):
        self.now += 1e-6
        return self.now

    def slowed(self, function, seconds):
        def slow(*args, **kwargs):
            self.now += seconds(*args)
            return function(*args, **kwargs)

        return slow


@pytest.mark.parametrize("token_seconds", [1e-4, 0.01, 0.1])
def test_the_time_holds_for_any_target(token_seconds, tmp_path, saved_target, capsys, monkeypatch):
    """Forwards of so many seconds per token: 90 rows of 25 tokens are measured in three passes, or fewer are."""
    data, path = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    row = {"input_ids": [5] * 25, "prompt_length": 4}
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(90)))
    path.write_text(f"target: {{path: {saved_target}}}\nhead: {{type: medusa}}\ndata: {{train: {data}}}\n")
    clock = Clock(monkeypatch)
    slow = clock.slowed(Target.forward, lambda target, ids: token_seconds * ids.numel())
    monkeypatch.setattr(Target, "forward", slow)
    plan_command(str(path), disk=tmp_path, device="cpu", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["num_rows"] == 90 and found["seconds"] == 60.0
    assert found["seconds_used"] <= 60 and clock.now - found["seconds_loading"] <= 60
    assert found["num_measured_tokens"] == 25 * found["num_measured"]
    assert (found["num_measured"], found["num_passes"]) == (64, 3) or found["seconds_used"] > 15
    rate = found["online"]["tokens_per_second"]
    assert rate == pytest.approx(1 / token_seconds, rel=0.01) and found["extracted"][0]["extraction_over_forward"] > 0.9


def test_rows_beyond_the_time_are_counted_by_a_share(target, monkeypatch):
    """A second to encode a row: of 330, every 12th in 30 seconds, and the numbers stand for all."""
    clock, samples = Clock(monkeypatch), make_samples(330)

    def encode(rows):
        clock.now += len(rows)

    every = row_stride(iter(samples), encode, seconds=30)
    assert 10 <= every <= 12 and row_stride(iter(samples), encode, seconds=1e6) == 1
    how = {"hidden_size": 32, "num_drawn": 8}
    found = survey_samples(samples[::every], Reads((1,), "context", "labels"), **how).scaled(every)
    whole = survey_samples(samples, Reads((1,), "context", "labels"), **how)
    assert found.num_tokens == pytest.approx(whole.num_tokens, rel=0.1)
    assert found.num_bytes["8bit"] == pytest.approx(whole.num_bytes["8bit"], rel=0.1)
    assert compare_storages(found, {"8bit": ExtractionRates(1.0, 1.0, 1.0)}, free_bytes=0).one_row_of == every


@pytest.mark.slow
def test_what_is_predicted_is_what_other_rows_take(target, head, tmp_path, monkeypatch):
    """In processor seconds, of rows that were not measured; the best of eight tries counts."""
    monkeypatch.setattr(plan_module.time, "perf_counter", plan_module.time.process_time)
    rows = [Sample.of([5] * (200 + row % 40), [i >= 4 for i in range(200 + row % 40)]) for row in range(64)]
    config = ExtractConfig(batch_tokens=2048, storage_dtype="float32")
    how, reads = {"configs": [config], "folder": tmp_path, "num_passes": 2}, Reads.of(head)
    apart = []
    for _ in range(8):
        [predicted] = measure_storages(rows[:32], target, reads, **how)
        [measured] = measure_storages(rows[32:], target, reads, **how)
        apart.append(max(abs(predicted.forward / measured.forward - 1), abs(predicted.ratio / measured.ratio - 1)))
        if apart[-1] < 0.15:
            break
    assert min(apart) < 0.15
