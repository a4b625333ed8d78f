"""The three walks of CONTRIBUTING.md, each in a copy of the repository: what is added in the named places works."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.slow

HEAD_IMPORTS = '''"""A low-rank correction of the target's last state per depth, read by its output layer."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .base import ChainStarts, DraftBatch, DraftHead, HeadConfig
from .drafter import Reading
from .target import Target


'''
RULE = '''def nothing(drafted: Candidates) -> AcceptedPath:
    """The target's own token, whatever was drafted."""
    own = drafted.chosen()[:, 0]
    path = drafted.parents.new_zeros(len(own), drafted.depth)
    return AcceptedPath(torch.zeros_like(own), path, own)


'''


class Walk:
    """A copy of the repository, and what CONTRIBUTING.md says about adding something to it."""

    def __init__(self, folder: Path, question: str):
        self.folder = folder
        self.said = (ROOT / "CONTRIBUTING.md").read_text().split(f"**{question}**", 1)[1].split("\n\n", 1)[0]
        asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in listed.rstrip("\0").split("\0"):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name, follow_symlinks=False)
        self.touched: list[str] = []

    def write(self, name: str, text: str, *, called: str = "") -> None:
        """Write a file of a named place. Args: called: the file's name in the walk, where that is a pattern."""
        assert f"`{called or name}`" in self.said, f"the walk does not name {called or name}: {self.said}"
        (self.folder / name).write_text(text)
        self.touched.append(name)

    def insert(self, name: str, *pairs: tuple[str, str]) -> None:
        """Put texts into a file of a named place. pairs: what stands there once, and what to put in front of it."""
        text = (self.folder / name).read_text()
        for there, new in pairs:
            assert text.count(there) == 1, (name, there)
            text = text.replace(there, new + there)
        self.write(name, text)

    def run(self, *words: str | Path) -> str:
        """What a command says that runs in the copy, on its code."""
        place = {"PYTHONPATH": str(self.folder / ".typings"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            list(map(str, words)), cwd=self.folder, env={**os.environ, **place}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def check(self, *tests: str, named: str) -> None:
        """`make check`, of types in touched files alone, and tests. Args: tests: files. named: an expression for -k."""
        self.run(BIN / "ruff", "check", ".")
        self.run(BIN / "ruff", "format", "--check", ".")
        self.run(BIN / "pyright", "--pythonpath", sys.executable, *(n for n in self.touched if n.endswith(".py")))
        how = ["-p", "no:cacheprovider", "-n", "0", "-k", named]
        said = self.run(sys.executable, "-m", "pytest", *how, *tests)
        assert "[100%]" in said, said

    def report(self, saved_target: Path, *options: str | Path) -> tuple[dict, str]:
        """The result in report.json, and the page, of `headstart eval` with these options."""
        prompts = self.folder / "prompts.jsonl"
        prompts.write_text('{"prompt": "w5 w9 w13"}\n{"prompt": "w1 w7"}\n')
        asked = ["--target", saved_target, "--prompts", prompts, "--output", "out", "--device", "cpu"]
        self.run(BIN / "python", "-m", "headstart.scripts.cli", "eval", *asked, "--max-new-tokens", "12", *options)
        [result] = json.loads((self.folder / "out" / "report.json").read_text())["results"]
        return result, (self.folder / "out" / "report.html").read_text()


@pytest.fixture
def walk(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    return lambda question: Walk(tmp_path, question)


def test_a_head_is_added_in_three_places(walk):
    """The example's family, which then trains, drafts and keeps the promises of all."""
    copy, example = walk("add a head?"), (ROOT / "examples" / "own_head.py").read_text()
    source = example[example.index("@dataclass(kw_only=True)") : example.index('HEADS["low_rank"]')].rstrip() + "\n"
    copy.write("heads/low_rank.py", HEAD_IMPORTS + source, called="heads/<name>.py")
    line = '    "low_rank": LowRankHead,\n'
    copy.insert(
        "heads/families.py",
        ("from .medusa import", "from .low_rank import LowRankHead\n"),
        ('    "block": BlockHead,\n', line),
    )
    config = "# Low-rank corrections (heads/low_rank.py).\nhead:\n  type: low_rank\n  rank: 16 # per depth\n"
    copy.write("configs/heads/low_rank.yaml", config, called="configs/heads/<name>.yaml")
    copy.check(
        "tests/heads/test_contract.py",
        "tests/scripts/test_cli.py",
        "tests/test_layout.py",
        "tests/heads/export/test_export.py",
        "tests/scripts/test_heads_command.py",
        "tests/scripts/unattended/test_auto_decisions.py",
        "tests/benchmarks/test_bench_train.py",
        named="low_rank and (test_contract or train_then_eval) or test_layout and not serving_image or every_family or "
        "the_families_and_what_they_read",
    )


def test_an_accept_rule_is_added_in_one_place(walk, saved_target):
    """Then `--accept` takes its name, and the tests of what it claims are of it too."""
    copy, line = walk("add an accept rule?"), '        AcceptRule("nothing", nothing, is_lossless=True),\n'
    copy.insert(
        "eval/decoding/verify.py",
        ("@dataclass(frozen=True)\nclass AcceptRule", RULE),
        ('        AcceptRule("typical"', line),
    )
    tests = ("tests/eval/decoding/test_verify_sampling.py", "tests/eval/decoding/test_verify_cost.py")
    copy.check(*tests, named="nothing and (some or once_per_verification or ragged and (raw or top))")
    result, page = copy.report(saved_target, "--drafter", "ngram", "--accept", "nothing")
    assert result["accept"] == "nothing" and result["acceptance_length"] == 1.0 and result["lossless"]["identical"] == 2
    assert "nothing" in page and "lossy" not in page


def test_a_figure_is_added_in_three_places(walk, saved_target):
    """Then report.json has it, and older reports are still read; with a line more the page has it."""
    copy = walk("add a figure to the report?")
    field = "    most_committed: int | None = None  # tokens of a row in a round\n"
    value = "most_committed=max((max(done.num_committed) for done in rounds), default=None)"
    row = "| `most_committed` | tokens | the most that a round committed of a row |\n"
    copy.insert("eval/measurement/result.py", ("    acceptance_length_ci95: Ends = (None, None)\n", field))
    copy.insert("eval/measurement/summary.py", ("        acceptance_length=length,\n", f"        {value},\n"))
    copy.insert("docs/report_schema.md", ("| `conventions` |", row))
    copy.insert(
        "eval/report/sections.py",
        ('"speedup [95 %]", "p10 / median / p90"', '"most in a round",\n        '),
        (
            '            speedup_words(result),\n            " / ".join',
            "            number(result.most_committed, 0),\n",
        ),
    )
    tests = ("tests/eval/report/test_schema.py", "tests/eval/measurement/test_result.py")
    copy.check(*tests, "tests/eval/report/test_report_page.py", named="test_schema or test_result or settings")
    result, page = copy.report(saved_target, "--drafter", "ngram")
    assert result["most_committed"] >= result["acceptance_length"] and "most in a round" in page
