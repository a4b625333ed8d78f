"""`make smoke` as a newcomer runs it: its report, its heads, and the bars they have to clear."""

import json
import subprocess
from pathlib import Path

import pytest

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
