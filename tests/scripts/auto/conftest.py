"""A target that can be asked, prompts for it, and runs whose steps are taken in this process."""

import json
import sys
from types import SimpleNamespace

import pytest
from headstart.scripts import cli
from headstart.scripts.auto import run as stages
from headstart.scripts.auto.journal import Machine, Measured
from headstart.scripts.auto.prediction import RoundCost
from headstart.scripts.unattended import clock
from headstart.scripts.unattended.steps import Runner, StepRecord
from transformers import AutoTokenizer

TEMPLATE = (
    "{% for m in messages %}w1 {{ m['content'] }} {% if m['role'] == 'assistant' %}w2 {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w3 {% endif %}"
)


@pytest.fixture
def chat_target(saved_target, tmp_path):
    """The saved target's folder, with a chat template."""
    folder = tmp_path / "target"
    folder.mkdir()
    for path in saved_target.iterdir():
        (folder / path.name).symlink_to(path)
    tokenizer = AutoTokenizer.from_pretrained(saved_target)
    tokenizer.chat_template = TEMPLATE
    for path in folder.glob("token*"):
        path.unlink()
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def traffic(tmp_path):
    """traffic(40): a file of as many prompts."""

    def write(count):
        rows = [{"prompt": f"w{5 + i % 50} w{7 + 3 * i % 50} w{9 + i * i % 50}"} for i in range(count)]
        path = tmp_path / "traffic.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


SECONDS = {"train": 4.0}  # that a step is said to take; others 1


@pytest.fixture
def in_process(monkeypatch):
    """Steps are run in this process, and take the time that they are said to; returns their words as they are run."""
    ran, now = [], [0.0]

    def run(self, name, words, *, until=None):
        code, seconds = 0, SECONDS.get(words[0], 1.0)
        ran.append(words)
        self.logs.mkdir(exist_ok=True)
        log = self.logs / f"{name}.log"
        log.touch()
        monkeypatch.setattr(sys, "argv", ["headstart", *words])
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        assert code in (0, 1), words
        now[0] += seconds
        return StepRecord(name, self.shown(words), str(log), seconds, int(code), False)

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(clock, "LEAST_BUDGET", 1.0)
    monkeypatch.setattr(stages, "start_seconds", lambda: 0.1)
    return ran


@pytest.fixture
def machine_is(monkeypatch):
    """machine_is(medusa=1.5, ...): these candidates, with rounds that take 1.5 steps of the target for each K."""

    def given(**costs):
        found = [
            Measured(name, 1000, [RoundCost(1, steps), RoundCost(3, steps)], 2.0, 3, 0.2, "" if steps < 2 else "dear")
            for name, steps in costs.items()
        ]
        machine = Machine(2.0, 1, "float32", "cpu", 0.1, found)
        monkeypatch.setattr(stages, "measure_machine", lambda *_, **__: machine)

    return given
