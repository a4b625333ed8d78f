"""The script that compares two checkouts finds a checkout equal to itself, and a changed loss different."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compare(before: Path, after: Path) -> subprocess.CompletedProcess[str]:
    script = ["tests/digests/digests.py", "--before", str(before), "--after", str(after)]
    line = [sys.executable, *script, "--only", "losses/heads/medusa"]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_changed_loss_is_told_apart_and_an_equal_checkout_is_not(tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(ROOT, changed, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "build"))
    path = changed / "heads" / "base.py"
    text = path.read_text()
    assert text.count("return LossOutput(loss,") == 1
    path.write_text(text.replace("return LossOutput(loss,", "return LossOutput(1.0001 * loss,"))
    same = compare(ROOT, ROOT)
    assert same.returncode == 0, same.stdout[-2000:] + same.stderr[-2000:]
    different = compare(ROOT, changed)
    assert different.returncode == 1 and "DIFFERENT" in different.stdout
