"""The data benchmark takes conversations through every stage and reports what the stages really did."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from headstart.configs.jsonl import iter_jsonl
from headstart.scripts.benchmarks.bench_data import (
    encode_stage,
    pack_stage,
    parse,
    prepare_stage,
    show,
    synthesise,
    train_tokenizer,
)


def test_every_stage_passes_on_what_the_one_before_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = tmp_path / "chats.jsonl"
    assert synthesise(chats, num_rows=401) == chats.stat().st_size
    tokenizer = train_tokenizer(chats, tmp_path / "tokenizer")
    arguments = parse(["--tokenizer", str(tokenizer)])
    prepared = prepare_stage(tmp_path, arguments)
    assert prepared["rows"] == 401 and prepared["dropped"] == {"duplicate": 2}
    encoded = encode_stage(tmp_path, arguments)
    assert encoded["rows"] == sum(1 for _ in iter_jsonl(tmp_path / "prepared" / "train.jsonl"))
    packed = pack_stage(tmp_path, arguments)
    assert packed["rows"] == encoded["rows"] and packed["padding"] < 0.5
    stages = {"prepare": prepared, "encode": encoded, "pack": packed}
    results = {name: stage | {"peak_rss_bytes": 2**30} for name, stage in stages.items()}
    show({"rows": 401, "bytes": 10, "stages": results})
    assert "1.00 GiB" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_measures_each_stage_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "headstart.scripts.benchmarks.bench_data",
        "--rows",
        "500",
        "--folder",
        str(tmp_path),
        "--json",
    ]
    results = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    for stage in results["stages"].values():
        assert stage["rows_per_second"] > 0 and 2**24 < stage["peak_rss_bytes"] < 2**31
    assert list(tmp_path.iterdir()) == []
