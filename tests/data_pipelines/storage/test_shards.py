"""Samples on disk come back as they were written, whatever happened meanwhile; what was damaged is named."""

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from headstart.base.errors import BadInput
from headstart.base.files import unfinished_name
from headstart.data_pipelines.rows.samples import Sample
from headstart.data_pipelines.storage import shards as shards_module
from headstart.data_pipelines.storage.quantise import Packed, pack, unpack
from headstart.data_pipelines.storage.shard_file import PackedStates, StoredSample
from headstart.data_pipelines.storage.shards import Shards, ShardWriter
from run_files import contents
from safetensors.torch import load_file


def make_rows(num_rows=40, *, storage=None, size=16):
    """Rows of 1 to 30 tokens; with a storage dtype, with states of two layers at random tokens."""
    source, rows = np.random.default_rng(3), []
    for _ in range(num_rows):
        length = int(source.integers(1, 31))
        sample = Sample(
            input_ids=source.integers(0, 200_000, length).astype(np.int32),
            segments=source.integers(0, 3, length).astype(np.uint8),
            loss_mask=source.random(length) < 0.6,
        )
        rows.append(StoredSample(sample, kept_of(length, storage, size, source) if storage else None))
    return rows


def kept_of(length, storage, size, source):
    at = [source.random(length) < 0.7 for _ in range(2)]
    features = torch.from_numpy(source.standard_normal((int(at[0].sum()), 2, size), dtype=np.float32))
    post_norm = torch.from_numpy(source.standard_normal((int(at[1].sum()), size), dtype=np.float32))
    return PackedStates(at[0], pack(features, storage), at[1], pack(post_norm, storage), torch.float32)


def write(folder, rows, *, storage=None, shard_bytes=1000, **fields):
    fields = {"storage_dtype": storage, "dtype": "float32" if storage else None, **fields}
    writer = ShardWriter(folder, fields=fields, shard_bytes=shard_bytes)
    for row in rows:
        writer.add(row)
    return writer.finish()


def test_samples_come_back_in_any_order(tmp_path):
    rows = make_rows()
    manifest = write(tmp_path / "a", rows)
    found = Shards(tmp_path / "a")
    assert len(manifest.shards) > 3 and len(found) == len(rows)
    for i in [39, 0, 17, *range(40), -1]:
        assert found[i].sample == rows[i].sample and found[i].states is None
    assert found.lengths.tolist() == [len(row.sample) for row in rows]
    assert found.manifest.num_supervised_tokens == sum(int(row.sample.loss_mask.sum()) for row in rows)
    assert manifest.bytes == sum(path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors"))
    assert manifest.bytes_per_token == pytest.approx(manifest.bytes / manifest.num_tokens, abs=1e-3)
    assert sorted(path.name for path in (tmp_path / "a").iterdir() if "shard" not in path.name) == ["manifest.json"]
    with pytest.raises(IndexError):
        found[40]


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "8bit"])
def test_states_come_back_dense(storage, tmp_path):
    rows = make_rows(storage=storage)
    write(tmp_path / "a", rows, storage=storage)
    for stored, row in zip(Shards(tmp_path / "a"), rows, strict=True):
        assert stored.sample == row.sample and row.packed is not None and stored.states is not None
        for name in ("features", "post_norm"):
            dense, at = getattr(stored.states, name), torch.from_numpy(getattr(row.packed, f"{name}_at"))
            assert len(dense) == len(row.sample) and not dense[~at].any()
            torch.testing.assert_close(dense[at], unpack(getattr(row.packed, name), torch.float32), rtol=0, atol=0)


def test_a_shard_is_a_plain_safetensors_file(tmp_path):
    rows = make_rows(storage="8bit")
    write(tmp_path / "a", rows, storage="8bit", shard_bytes=10**9)
    tensors = load_file(tmp_path / "a" / "shard_00000.safetensors")
    assert tensors["input_ids"].tolist() == np.concatenate([row.sample.input_ids for row in rows]).tolist()
    assert tensors["features"].shape[1:] == (2, 16) and tensors["features_scales"].dtype == torch.bfloat16


def test_few_files_are_open_at_a_time_and_folders_can_be_sent(tmp_path, monkeypatch):
    rows = make_rows(12)
    write(tmp_path / "a", rows, shard_bytes=1)  # a shard per row
    monkeypatch.setattr(shards_module, "MOST_OPEN", 3)
    found = Shards(tmp_path / "a")
    assert [stored.sample for stored in found] == [row.sample for row in rows]
    assert len(found._open) == 3
    sent = pickle.loads(pickle.dumps(found))
    assert not sent._open and sent[5].sample == rows[5].sample


def test_an_interrupted_writer_goes_on_with_the_shards_that_are_missing(tmp_path):
    rows, fields = make_rows(), {"storage_dtype": None, "dtype": None}
    shards = [rows[:7], rows[7:23], rows[23:]]

    def written(folder, numbers):
        writer = ShardWriter(tmp_path / folder, fields=fields)
        missing = [number for number in numbers if number not in writer.done]
        for number in missing:
            writer.write(number, shards[number])
        return writer, missing

    written("whole", range(3))[0].finish()
    assert [written("cut", numbers)[1] for numbers in ([0], [0, 1])] == [[0], [1]]
    leftover = tmp_path / "cut" / unfinished_name("shard_00002.safetensors", 999999999)
    leftover.write_bytes(b"half a shard")
    (tmp_path / "cut" / "shard_00001.safetensors").write_bytes(b"")  # as a loss of power may leave it
    writer, missing = written("cut", range(3))
    writer.finish()
    assert missing == [1, 2] and contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_folder_of_something_else_is_refused(tmp_path):
    ShardWriter(tmp_path / "a", fields={"storage_dtype": "8bit", "layers": [1]})
    with pytest.raises(BadInput, match=r"a: holds unfinished shards with layers \[1\], now \[1, 2\]"):
        ShardWriter(tmp_path / "a", fields={"storage_dtype": "8bit", "layers": [1, 2]})
    with pytest.raises(BadInput, match="a: unfinished; run the command that wrote it again to complete it"):
        Shards(tmp_path / "a")
    write(tmp_path / "b", make_rows())
    with pytest.raises(BadInput, match="b: holds finished shards"):
        ShardWriter(tmp_path / "b")
    with pytest.raises(BadInput, match="manifest.json: no such file"):
        Shards(tmp_path / "c")


def damage(kind, path, other):
    data = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(data[:-7])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "longer":
        path.write_bytes(data + b"more")
    elif kind == "header":
        path.write_bytes(data[:8] + b"?" * 40 + data[48:])
    elif kind == "foreign":
        shutil.copy(other / path.name, path)
    elif kind == "swapped":
        shutil.copy(path.with_name("shard_00002.safetensors"), path)


@pytest.mark.parametrize("kind", ["missing", "truncated", "empty", "longer", "header", "foreign", "swapped"])
def test_a_damaged_or_foreign_shard_is_named_on_opening(kind, tmp_path):
    source = np.random.default_rng(0)
    rows = [StoredSample(Sample.of(source.integers(0, 9, 50).tolist(), [True] * 50)) for _ in range(20)]
    write(tmp_path / "a", rows)  # shards of like sizes
    write(tmp_path / "b", rows[::-1], target_fingerprint="another")
    damage(kind, tmp_path / "a" / "shard_00001.safetensors", tmp_path / "b")
    with pytest.raises(BadInput, match="shard_00001.safetensors"):
        Shards(tmp_path / "a")


def test_damage_inside_a_shard_is_found_by_its_checksum(tmp_path):
    write(tmp_path / "a", make_rows())
    Shards(tmp_path / "a").verify()
    path = tmp_path / "a" / "shard_00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadInput, match="shard_00002.safetensors: damaged: sha256"):
        Shards(tmp_path / "a").verify()


def test_a_manifest_of_another_format_is_refused(tmp_path):
    write(tmp_path / "a", make_rows())
    path = tmp_path / "a" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format": "another"}))
    with pytest.raises(BadInput, match="manifest.json: format 'another', expected"):
        Shards(tmp_path / "a")
    for damaged in ({**manifest, "shards": [{"name": 1}]}, {**manifest, "shards": 3}, {"format": manifest["format"]}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(BadInput, match="manifest.json: not a manifest of shards"):
            Shards(tmp_path / "a")
    path.write_text("{")
    with pytest.raises(BadInput, match="manifest.json: damaged"):
        Shards(tmp_path / "a")


# ---------------------------------------------------------------------------------------------------------------------
# 8 bits


def error(states, storage="8bit"):
    """[n] share of each vector's norm that is lost."""
    return (unpack(pack(states, storage), torch.float32) - states).norm(dim=-1) / states.norm(dim=-1)


def test_8_bits_lose_one_percent_of_an_even_vector():
    torch.manual_seed(0)
    assert error(torch.randn(64, 3, 512)).max() < 0.012
    assert error(1e-12 * torch.randn(64, 512)).max() < 0.012
    assert error(1e12 * torch.randn(64, 512)).max() < 0.012


def test_8_bits_keep_what_lies_beside_massive_activations():
    torch.manual_seed(0)
    states = torch.randn(64, 512)
    states[:, 7] = 400.0
    states[::2, 9] = -3000.0
    rest = torch.ones(512, dtype=torch.bool)
    rest[[7, 9]] = False
    found = unpack(pack(states, "8bit"), torch.float32)[:, rest]
    assert ((found - states[:, rest]).norm(dim=-1) / states[:, rest].norm(dim=-1)).max() < 0.04
    as_int8 = (states / states.abs().amax(-1, keepdim=True) * 127).round() / 127 * states.abs().amax(-1, keepdim=True)
    assert (as_int8[:, rest] - states[:, rest]).norm() > 0.6 * states[:, rest].norm(), "what one step size would do"


def test_zeros_the_largest_values_and_vectors_without_values_are_no_special_case():
    states = torch.zeros(4, 32)
    states[1] = 5.0
    states[2, 3] = -1e4
    found = unpack(pack(states, "8bit"), torch.float32)
    assert torch.equal(found[0], states[0]) and found.isfinite().all()
    torch.testing.assert_close(found[1:3], states[1:3], rtol=0.01, atol=0)
    for storage in ("float32", "bfloat16", "8bit"):
        packed = pack(torch.zeros(5, 0, 8), storage)
        assert unpack(packed, torch.float32).shape == (5, 0, 8)
        assert [part.values.shape[0] for part in packed.split([2, 0, 3])] == [2, 0, 3]
        assert isinstance(packed, Packed)
