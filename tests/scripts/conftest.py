"""The command line in this process, and what it is given."""

import json
import shlex
import sys

import pytest
from headstart.heads.registry import HEADS, build_head, save_head
from headstart.scripts import cli


@pytest.fixture
def headstart(monkeypatch, capsys):
    """headstart("train ..."): runs the command line in this process; returns exit code, stdout, stderr."""

    def call(line, *more):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["headstart", *shlex.split(line), *map(str, more)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
            sys.exit(0)
        code = caught.value.code
        return (0 if code is None else code, *capsys.readouterr())

    return call


@pytest.fixture
def head_folder(saved_target, tmp_path):
    """An untrained head of the saved target."""
    from headstart.heads.target import Target

    head = build_head(HEADS["medusa"].config_class(type="medusa"), Target.load(saved_target))
    return save_head(head, tmp_path / "head")


@pytest.fixture
def prompts(tmp_path):
    """prompts(row, ...): a JSONL file; text is written as it is."""

    def write(*rows):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write
