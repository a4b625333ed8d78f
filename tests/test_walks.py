"""The walks of CONTRIBUTING.md, each in a copy of the repository: what is added in the named places works."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from headstart.engines.heads import build_head, save_head
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.medusa import MedusaConfig
from headstart.targets.target import Target

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.slow

HEAD_IMPORTS = '''"""Hydra: heads that also read the tokens drafted before them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..targets.target import Target
from .base import ChainStarts, DraftBatch, DraftHead, HeadConfig
from .drafting.drafter import Reading


'''
RULE = '''def nothing(drafted: Candidates) -> AcceptedPath:
    """The target's own token, whatever was drafted."""
    own = drafted.chosen()[:, 0]
    path = drafted.parents.new_zeros(len(own), drafted.depth)
    return AcceptedPath(torch.zeros_like(own), path, own)


'''


ENGINE = '''"""Toy: what it calls the ways of drafting, and what it is told of a head."""

from shlex import quote

from .layouts.serving import EngineSupport, HeadFolder

NAMES = {"eagle3": "extrapolate", "draft_lm": "small"}


def command(head: HeadFolder, folder: str, *, target: str, to: str) -> str:
    """The command that serves an exported head."""
    return f"toy {quote(target)} --draft {NAMES[head.method]}:{quote(folder)} -k {head.num_drafted}"


TOY = EngineSupport(NAMES, command, reads="vllm")
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

    def run(self, *words: str | Path, code: int = 0) -> str:
        """What a command says that runs in the copy, on its code. Args: code: which it must exit with."""
        place = {"PYTHONPATH": str(self.folder / ".typings"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            list(map(str, words)), cwd=self.folder, env={**os.environ, **place}, capture_output=True, text=True
        )
        assert done.returncode == code, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
        return done.stdout if code == 0 else done.stderr

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
    copy, example = walk("add a head?"), (ROOT / "examples" / "own_family.py").read_text()
    source = example[example.index("@dataclass(kw_only=True)") : example.index('HEADS["hydra"]')].rstrip() + "\n"
    copy.write("heads/hydra.py", HEAD_IMPORTS + source, called="heads/<name>.py")
    line = '    "hydra": HydraHead,\n'
    copy.insert(
        "heads/families.py",
        ("from .medusa import", "from .hydra import HydraHead\n"),
        ('    "block": BlockHead,\n', line),
    )
    config = "# Hydra (heads/hydra.py).\nhead:\n  type: hydra\n  bias: true # of each depth's map\n"
    copy.write("configs/heads/hydra.yaml", config, called="configs/heads/<name>.yaml")
    copy.check(
        "tests/heads/test_contract.py",
        "tests/scripts/test_cli.py",
        "tests/test_layout.py",
        "tests/engines/test_export.py",
        "tests/scripts/test_export.py",
        "tests/scripts/unattended/test_auto_decisions.py",
        "tests/benchmarks/test_benches.py",
        named="hydra and (test_contract or train_then_eval) or test_layout and not serving_image or every_family or "
        "the_families_and_what_they_read",
    )


def test_an_engine_is_added_in_two_places(walk, saved_target, tmp_path_factory):
    """Then heads are exported for it in the folder that vLLM reads, checked, and its command is told."""
    copy, run = walk("add an engine?"), tmp_path_factory.mktemp("run")
    target = Target.load(saved_target)
    save_head(build_head(Eagle3Config(num_depths=3), target), run / "final")
    save_head(build_head(MedusaConfig(), target), run / "medusa" / "final")
    copy.write("engines/toy.py", ENGINE, called="engines/<name>.py")
    copy.insert(
        "engines/export.py",
        ("from .vllm import VLLM", "from .toy import TOY\n"),
        ('    "llama.cpp": LLAMACPP,\n', '    "toy": TOY,\n'),
    )
    tests = ("tests/engines/test_export.py", "tests/test_layout.py", "tests/scripts/test_export.py")
    copy.check(*tests, named="toy or eagle3 or known_not_to_be or told or test_layout and not serving_image")
    headstart = (BIN / "python", "-m", "headstart.scripts.cli")
    said = copy.run(*headstart, "export", run, run / "served", "--to", "toy")
    assert f"toy {saved_target} --draft extrapolate:{run}/served -k 3" in said and "sglang.launch_server" in said
    assert "fine" in copy.run(*headstart, "check", run / "served", "--to", "toy")
    refused = copy.run(*headstart, "export", run / "medusa", run / "not", "--to", "toy", code=2)
    assert "toy loads no medusa heads; expected --to vllm" in refused


def test_an_accept_rule_is_added_in_one_place(walk, saved_target):
    """Then `--accept` takes its name, and the tests of what it claims are of it too."""
    copy, line = walk("add an accept rule?"), '        AcceptRule("nothing", nothing),\n'
    copy.insert(
        "eval/decoding/verify.py",
        ("@dataclass(frozen=True)\nclass AcceptRule", RULE),
        ('        AcceptRule("exact"', line),
    )
    tests = ("tests/eval/decoding/test_verify_sampling.py", "tests/eval/decoding/test_verify_cost.py")
    copy.check(*tests, named="nothing and (some or once_per_verification or ragged and (raw or top))")
    result, page = copy.report(saved_target, "--drafter", "ngram", "--accept", "nothing")
    assert result["accept"] == "nothing" and result["acceptance_length"] == 1.0 and result["lossless"]["identical"] == 2
    assert "nothing" in page


def test_a_figure_is_added_in_three_places(walk, saved_target):
    """Then report.json has it, and older reports are still read; with a line more the page has it."""
    copy = walk("add a figure to the report?")
    field = "    most_committed: int | None = None  # tokens of a row in a round\n"
    value = "most_committed=max((max(done.num_committed) for done in rounds), default=None)"
    row = "| `most_committed` | tokens | the most that a round committed of a row |\n"
    copy.insert("eval/measurement/result.py", ("    acceptance_length: float | None = None\n", field))
    copy.insert("eval/measurement/summary.py", ("        acceptance_length=length,\n", f"        {value},\n"))
    copy.insert("docs/reference/report_schema.md", ("| `teacher_forced_acceptance_length` |", row))
    copy.insert(
        "eval/report/sections.py",
        ('"lossless"]', '"most in a round", '),
        (
            "            lossless_words(result),\n        ]",
            "            number(result.most_committed, 0),\n",
        ),
    )
    tests = ("tests/eval/report/test_schema.py", "tests/eval/measurement/test_result.py")
    copy.check(*tests, "tests/eval/report/test_report_page.py", named="test_schema or test_result or settings")
    result, page = copy.report(saved_target, "--drafter", "ngram")
    assert result["most_committed"] >= result["acceptance_length"] and "most in a round" in page
