"""The command line in this process, and what it is given."""

import json
import shlex
import sys
from types import SimpleNamespace

import pytest
import yaml
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.engines.heads import save_head
from headstart.scripts import cli
from headstart.scripts.unattended.running import clock
from headstart.scripts.unattended.running.steps import CommandRunner, StepRecord
from headstart.targets.target import Target
from words import with_template


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
    return save_head(untrained("medusa", Target.load(saved_target)), tmp_path / "head")


@pytest.fixture
def run_config(saved_target, tmp_path):
    """run_config(head_type): a run YAML for three steps."""

    def write(head_type="medusa"):
        path = tmp_path / f"{head_type}.yaml"
        sections = {
            "target": {"path": str(saved_target)},
            "head": {"type": head_type, "num_depths": 3},
            "data": {"train": str(saved_target.with_name("rows.jsonl"))},
            "train": {"max_steps": 3, "batch_size": 2, "device": "cpu", "output_dir": str(tmp_path / "run")},
        }
        path.write_text(yaml.safe_dump(sections))
        return path

    return write


@pytest.fixture
def prompts(tmp_path):
    """prompts(row, ...): a JSONL file; text is written as it is."""

    def write(*rows):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


# Runs that nobody watches

TEMPLATE = (
    "{% for m in messages %}w1 {{ m['content'] }} {% if m['role'] == 'assistant' %}w2 {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w3 {% endif %}"
)


@pytest.fixture
def chat_target(saved_target, tmp_path):
    """The saved target's folder, with a chat template."""
    return with_template(saved_target, tmp_path / "target", TEMPLATE)


SECONDS = {"train": 4.0}  # that a step is said to take; others 1


@pytest.fixture
def in_process(monkeypatch):
    """Steps are run in this process, and take the time that they are said to; returns their words as they are run.

    Trainings are not stopped by the true time, which another load of the machine would change.
    """
    ran, now = [], [0.0]

    def run(self, name, words, *, until=None, meanwhile=None):
        code, seconds = 0, SECONDS.get(words[0], 1.0)
        ran.append(words)
        self.logs.mkdir(exist_ok=True)
        log = self.logs / f"{name}.log"
        log.touch()
        timeless = [word for word in words if not word.startswith("train.stop_after")]
        monkeypatch.setattr(sys, "argv", ["headstart", *timeless])
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        now[0] += seconds
        if code == 2:  # as the real one; here what it said is on stderr
            raise BadInput(f"{name}: ended with code 2")
        assert code in (0, 1), words
        return StepRecord(name, self.command_line(words), str(log), seconds, int(code), False)

    monkeypatch.setattr(CommandRunner, "run", run)
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(clock, "LEAST_BUDGET", 1.0)
    for part in ("machine", "refit"):
        monkeypatch.setattr(f"headstart.scripts.unattended.{part}.start_seconds", lambda check_stop: 0.1)
    return ran
