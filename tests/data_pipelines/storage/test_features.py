"""Training from stored states is training from the live target, and an interrupted extraction changes nothing."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from headstart.base.errors import BadInput
from headstart.base.owned import LOCK, MARKER
from headstart.configs.loader import PACKAGE_CONFIGS
from headstart.data_pipelines.loader import collate
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.rows.samples import Sample
from headstart.data_pipelines.storage import extract as extract_module
from headstart.data_pipelines.storage.extract import ExtractConfig, Extraction, batches, fields_of
from headstart.data_pipelines.storage.features import Reads, check_features, origin_of, positions
from headstart.data_pipelines.storage.quantise import pack
from headstart.data_pipelines.storage.shard_file import PackedStates, StoredSample
from headstart.data_pipelines.storage.shards import Shards, ShardWriter
from headstart.engines.heads import HEADS, build_head
from headstart.scripts.data.extract import extract as extract_command
from run_files import contents

MORE = {  # variants of families that could read other things than their default
    "eagle3 of two layers": {"type": "eagle3", "num_layers": 2},
    "medusa, soft": {"type": "medusa", "loss": {"soft_ce": 1.0}},
}


def fresh(variant, target, **changes):
    how = {**MORE.get(variant, {"type": variant}), **changes}
    return build_head(HEADS[how["type"]].config_class(**how), target, seed=1)


def make_samples(num_rows=20, *, longest=40, seed=3):
    """Rows of several answers between prompts, and some with nothing to draft."""
    source, samples = np.random.default_rng(seed), []
    for row in range(num_rows):
        length = int(source.integers(2, longest + 1))
        turns = np.cumsum(source.random(length) < 0.15) % 2 == 1  # prompt, answer, prompt ...
        ids = source.integers(3, 61, length)
        samples.append(Sample.of(ids.tolist(), turns.tolist() if row % 7 else [False] * length))
    return samples


def stored(folder, samples):
    writer = ShardWriter(folder)
    for sample in samples:
        writer.add(StoredSample(sample))
    writer.finish()
    return Shards(folder)


def batch_of(rows, *, live=None):
    """A padded batch, with the states that rows have or those of a live target and its head."""
    batch = collate(rows)
    if live is None:
        return batch.filled(lambda *_, **__: pytest.fail("reads the target"))
    target, head = live
    read = partial(target.forward, feature_layers=head.feature_layers)
    return replace(batch, output=None).filled(read)


def test_which_positions_are_kept():
    mask = np.array([bool(int(c)) for c in "00111001011100"])
    found = {name: "".join(str(int(x)) for x in at) for name, at in positions(mask).items()}
    assert found["starts"] == "01100000110000", "the next two tokens are supervised"
    assert found["labels"] == "00110000011000", "post_norm there predicts the second and later tokens of an answer"
    assert found["context"] == "11111111110000"
    for short in (0, 1, 2):
        assert not any(at.any() for at in positions(np.ones(short, dtype=bool)).values())


def test_what_each_family_has_kept(target, tiny_target):
    kept = {name: Reads.of(fresh(name, target)) for name in [*HEADS, *MORE]}
    for name in ("eagle3", "eagle3 of two layers"):
        assert kept[name] == Reads((1, 2, 3), "context", "labels")
    for name in ("eagle", "mtp"):
        assert kept[name] == Reads((), "nowhere", "context")
    assert kept["medusa"] == Reads((), "nowhere", "starts")
    assert kept["draft_lm"] == Reads((), "nowhere", "labels")
    with pytest.raises(BadInput, match="head medusa: trains adapters of the target"):
        Reads.of(fresh("medusa", tiny_target("llama"), target_lora_rank=2))


@pytest.mark.parametrize("variant", [*sorted(HEADS), *MORE])
def test_losses_from_exact_storage_are_those_of_the_live_target(variant, target, extract, tmp_path):
    head = fresh(variant, target).train()
    samples = stored(tmp_path / "tokens", make_samples())
    extract(samples, target, head, tmp_path / "out", config=ExtractConfig(storage_dtype="float32", batch_tokens=100))
    rows = list(Shards(tmp_path / "out"))
    assert [row.sample for row in rows] == [row.sample for row in samples]
    check_features(Shards(tmp_path / "out"), head, target)
    gradients, rounding = [], 1e-3 if variant.startswith("assistant") else 1e-4  # by scores that are not scaled
    for batch in (batch_of(rows), batch_of(rows, live=(target, head))):
        head.zero_grad()
        out = head.loss(batch)
        out.loss.backward()
        gradients.append([out.loss.detach()] + [p.grad.clone() for p in head.parameters() if p.grad is not None])
    for ours, live in zip(*gradients, strict=True):
        assert (ours - live).norm() <= rounding * live.norm() + 1e-6


@pytest.mark.parametrize("storage", ["bfloat16", "8bit"])
def test_losses_from_fewer_bits_are_close(storage, target, extract, tmp_path):
    head = fresh("eagle3", target)
    samples = stored(tmp_path / "tokens", make_samples())
    extract(samples, target, head, tmp_path / "out", config=ExtractConfig(storage_dtype=storage))
    rows = list(Shards(tmp_path / "out"))
    ours, live = head.loss(batch_of(rows)), head.loss(batch_of(rows, live=(target, head)))
    torch.testing.assert_close(ours.loss, live.loss, rtol=0.01, atol=0)
    assert rows[1].states is not None and rows[1].states.features.dtype == target.dtype


def test_the_manifest_says_what_it_holds(target, extract, tmp_path):
    head, samples = fresh("eagle3", target), stored(tmp_path / "tokens", make_samples(60))
    config = ExtractConfig(shard_bytes=20_000)
    origin = {"data": {"max_length": 40}, "tokenizer_hash": "ab"}
    manifest = extract(samples, target, head, tmp_path / "out", config=config, origin=origin)
    assert manifest.as_json() == json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest.num_rows == 60 and manifest.num_tokens == int(samples.lengths.sum())
    assert manifest.num_supervised_tokens == samples.manifest.num_supervised_tokens
    assert manifest.fields["layers"] == [1, 2, 3] and manifest.fields["storage_dtype"] == "8bit"
    assert manifest.fields["target_fingerprint"] == target.fingerprint and manifest.fields["tokenizer_hash"] == "ab"
    assert len(manifest.shards) == 5
    on_disk = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert manifest.bytes == on_disk
    fields = fields_of(target, Reads.of(head), config, origin)
    foreseen = Extraction(samples, target, Reads.of(head), config=config, fields=fields).num_bytes
    headers = 1300 * len(manifest.shards)
    assert foreseen < on_disk < foreseen + headers
    Shards(tmp_path / "out").verify()


def test_a_token_takes_less_than_half_of_what_specforge_writes(tmp_path):
    """8 D + 16 bytes, for EAGLE-3 at D 1024; every file counts, a fifth of each row is prompt."""
    size, length, num_rows = 1024, 500, 2
    reads, source = Reads((2, 14, 25), "context", "labels"), torch.Generator().manual_seed(0)
    writer = ShardWriter(tmp_path / "out", fields={"storage_dtype": "8bit", "dtype": "bfloat16"})
    for _ in range(num_rows):
        sample = Sample.of([7] * length, [i >= length // 5 for i in range(length)])
        features_at, post_norm_at = reads.positions(sample.loss_mask)
        features = pack(torch.randn(int(features_at.sum()), 3, size, generator=source), "8bit")
        post_norm = pack(torch.randn(int(post_norm_at.sum()), size, generator=source), "8bit")
        writer.add(StoredSample(sample, PackedStates(features_at, features, post_norm_at, post_norm, torch.bfloat16)))
    writer.finish()
    on_disk = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert on_disk / (num_rows * length) < (8 * size + 16) / 2
    assert Shards(tmp_path / "out")[0].states.post_norm.dtype == torch.bfloat16


def test_batches_hold_rows_of_like_length():
    lengths = np.random.default_rng(0).integers(1, 300, 500)
    found = batches(lengths, batch_tokens=2048)
    assert sorted(np.concatenate(found).tolist()) == list(range(500))
    taken = [len(rows) * int(lengths[rows].max()) for rows in found]
    assert max(taken) <= 2048 and sum(taken) < 1.05 * lengths.sum()
    assert [rows.tolist() for rows in batches(np.array([9, 5000]), batch_tokens=2048)] == [[1], [0]]


# ---------------------------------------------------------------------------------------------------------------------
# Interruptions and several processes


def prepared(tmp_path, target, *, num_rows=60):
    samples = stored(tmp_path / "tokens", make_samples(num_rows))
    reads, config = Reads.of(fresh("eagle3", target)), ExtractConfig(shard_bytes=20_000, batch_tokens=256)
    return Extraction(samples, target, reads, config=config, fields=fields_of(target, reads, config, {}))


def test_killed_before_any_of_its_files_is_there_it_ends_as_if_it_had_not_been(target, tmp_path):
    """Each start is killed one renaming later than the one before."""
    extraction, replace = prepared(tmp_path, target), os.replace

    def work(output):
        extraction.run(output)
        extraction.finish(output)

    def ends(number):
        """Whether it has its manifest before its renaming of this number, at which it is killed."""
        child = os.fork()
        if child == 0:
            left = iter(range(number))
            os.replace = lambda *paths: os._exit(9) if next(left, None) is None else replace(*paths)
            try:
                work(tmp_path / "cut")
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 9)
        return (tmp_path / "cut" / "manifest.json").exists()

    work(tmp_path / "whole")
    assert next(number for number in itertools.count() if ends(number)) > 3
    assert extract_module.is_finished(tmp_path / "cut", extraction.fields)
    extract_module.clear_unfinished(tmp_path / "cut")  # as every start does
    assert contents(tmp_path / "cut", but=MARKER) == contents(tmp_path / "whole", but=MARKER)


def test_the_number_of_processes_changes_nothing(target, tmp_path):
    extraction = prepared(tmp_path, target)
    for output, num_ranks in ((tmp_path / "one", 1), (tmp_path / "three", 3)):
        told = [0] * num_ranks
        for rank in reversed(range(num_ranks)):

            def say(count, rank=rank, told=told):
                told[rank] += count

            extraction.run(output, rank=rank, num_ranks=num_ranks, on_tokens=say)
        assert told == [extraction.num_tokens(rank, num_ranks) for rank in range(num_ranks)]
        extraction.finish(output)
    assert contents(tmp_path / "one", but=MARKER) == contents(tmp_path / "three", but=MARKER)


def test_a_failing_writer_stops_the_extraction(target, tmp_path, monkeypatch):
    extraction = prepared(tmp_path, target)

    def full(*args, **how):
        raise BadInput("shard_00000.safetensors: No space left on device")

    monkeypatch.setattr("headstart.data_pipelines.storage.shards.write_shard", full)
    with pytest.raises(BadInput, match="No space left"):
        extraction.run(tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_a_disk_that_is_too_small_is_refused_before_anything_is_read(target, tmp_path, monkeypatch):
    extraction, free = prepared(tmp_path, target), 50_000
    monkeypatch.setattr("headstart.data_pipelines.storage.extract.disk_free", lambda _: free)
    with pytest.raises(BadInput, match=r"out: .* are still to be written, 50\.0 kB of this disk are free"):
        extraction.check_disk(tmp_path / "out")
    free = extraction.num_bytes
    extraction.check_disk(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))
    extraction.run(tmp_path / "out")
    free = 0
    extraction.check_disk(tmp_path / "out")  # nothing is missing any more


def test_states_that_are_no_numbers_are_refused(tiny_target, extract, tmp_path):
    target = tiny_target("llama")
    samples = stored(tmp_path / "tokens", make_samples())
    with torch.no_grad():
        target.base.norm.weight[3] = float("nan")
    for storage in ("8bit", "float32"):
        with pytest.raises(BadInput, match="tiny-llama: its states are not finite"):
            extract(
                samples,
                target,
                fresh("medusa", target),
                tmp_path / storage,
                config=ExtractConfig(storage_dtype=storage),
            )


def test_features_of_something_else_are_refused_with_key_and_values(
    target, tiny_target, chat_tokenizer, extract, tmp_path, monkeypatch
):
    monkeypatch.setattr(target, "_tokenizer", chat_tokenizer("chatml"))
    samples, eagle3 = stored(tmp_path / "tokens", make_samples()), fresh("eagle3", target)
    data = DataConfig(train="a.jsonl", max_length=40)
    extract(samples, target, eagle3, tmp_path / "out", origin=origin_of(data, target.tokenizer))
    found = Shards(tmp_path / "out")
    check_features(found, eagle3, target, data=replace(data, layout="bucketed", validation="b.jsonl"))
    check_features(found, fresh("draft_lm", target), target)  # reads less
    found.manifest.fields["dtype"] = "bfloat16"
    with pytest.raises(BadInput, match="states of a target in bfloat16, here float32: set target.dtype"):
        check_features(found, eagle3, target)
    found.manifest.fields["dtype"] = "float32"
    other = tiny_target("qwen3")
    with pytest.raises(BadInput, match="target tiny-llama .* not tiny-qwen3"):
        check_features(found, fresh("eagle3", other), other)
    with pytest.raises(BadInput, match=r"layers \[1, 2, 3\], head eagle3 reads \[0, 2\]"):
        check_features(found, fresh("eagle3", target, feature_layers=[0, 2]), target)
    with pytest.raises(BadInput, match="post_norm_at labels, head medusa needs starts"):
        check_features(found, fresh("medusa", target), target)
    with pytest.raises(BadInput, match="extracted with data.max_length 40, now 39"):
        check_features(found, eagle3, target, data=replace(data, max_length=39))
    with pytest.raises(BadInput, match="holds token ids only"):
        check_features(samples, eagle3, target)


# ---------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def run_yaml(tmp_path, saved_target):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"target: {{path: {saved_target}}}\nhead: {{type: eagle3, draft_vocab_size: 20}}\n"
        f"data: {{train: {saved_target.with_name('rows.jsonl')}}}\n"
    )
    return str(path)


def test_the_command_says_the_size_writes_and_then_has_nothing_to_do(run_yaml, tmp_path, capsys):
    how = {"output": tmp_path / "out", "storage_dtype": "bfloat16", "device": "cpu"}
    extract_command(run_yaml, overrides=["data.max_length=24"], **how)
    said = capsys.readouterr()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert json.loads(said.out)["num_rows"] == manifest["num_rows"] == 6
    assert "bytes per token" in said.err and "free" in said.err
    assert manifest["data"]["max_length"] == 24 and manifest["template_hash"] and manifest["tokenizer_hash"]
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.name not in (MARKER, LOCK))
    assert names == ["manifest.json", "shard_00000.safetensors"]
    extract_command(run_yaml, overrides=["data.max_length=24"], **how)
    assert "finished already" in capsys.readouterr().out
    for change in ({}, {"overrides": ["data.max_length=24"], "storage_dtype": "float32"}):
        with pytest.raises(BadInput, match="holds samples with (data|storage_dtype bfloat16, now float32)"):
            extract_command(run_yaml, **{**how, **change})


def test_a_refused_command_leaves_nothing_behind(run_yaml, tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        extract_command(run_yaml, output=tmp_path / "out", overrides=["data.train=nowhere.jsonl"], device="cpu")
    with pytest.raises(BadInput, match="storage_dtype 'int4': expected float32 or bfloat16 or 8bit"):
        extract_command(run_yaml, output=tmp_path / "out", storage_dtype="int4")
    assert not (tmp_path / "out").exists()


def test_a_late_failure_leaves_the_features_beside_it(run_yaml, tmp_path, monkeypatch):
    extract_command(run_yaml, output=tmp_path / "feat/a", device="cpu")
    before = contents(tmp_path / "feat")
    (tmp_path / "more").mkdir()
    monkeypatch.setattr(extract_module, "disk_free", lambda _: 10)
    for output in ("feat/b", "feat/c/d", "more"):
        with pytest.raises(BadInput, match=f"{output}: .* are still to be written, 10 bytes of this disk are free"):
            extract_command(run_yaml, output=tmp_path / output, device="cpu")
    assert contents(tmp_path / "feat") == before and not (tmp_path / "feat/b").exists()
    assert (tmp_path / "more").is_dir() and not list((tmp_path / "more").iterdir()), "it was there, and empty"


@pytest.mark.slow
def test_two_processes_write_what_one_does(run_yaml, tmp_path):
    """Launched by Accelerate."""
    how = ["-m", "headstart.scripts.data.extract", run_yaml, "--shard-bytes", "3000", "--device", "cpu", "--output"]
    ddp = PACKAGE_CONFIGS / "accelerate" / "ddp.yaml"
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(ddp), "--num_processes", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name, before in (("one", []), ("two", [*launch, "--main_process_port", "0"])):
        command = [sys.executable, *before, *how, str(tmp_path / name)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    assert len(list((tmp_path / "one").glob("shard_*"))) > 2
    assert contents(tmp_path / "one", but=MARKER) == contents(tmp_path / "two", but=MARKER)
