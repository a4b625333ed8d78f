"""Prompts for a target, and machines that were measured before."""

import json

import pytest
from headstart.scripts.auto import run as stages
from headstart.scripts.auto.journal import Machine, Measured
from headstart.scripts.auto.prediction import RoundCost


@pytest.fixture
def traffic(tmp_path):
    """traffic(40): a file of as many prompts."""

    def write(count):
        rows = [{"prompt": f"w{5 + i % 50} w{7 + 3 * i % 50} w{9 + i * i % 50}"} for i in range(count)]
        path = tmp_path / "traffic.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def machine_is(monkeypatch):
    """machine_is(medusa=1.5, ...): these candidates, with rounds that take 1.5 steps of the target for each K."""

    def given(**costs):
        found = [
            Measured(
                name,
                parameters=1000,
                costs=[RoundCost(1, steps), RoundCost(3, steps)],
                bound=2.0,
                bound_num_draft_tokens=3,
                step_seconds=0.2,
                out="" if steps < 2 else "dear",
            )
            for name, steps in costs.items()
        ]
        machine = Machine(2.0, 1, "float32", "cpu", start_seconds=0.1, start_tokens=64, candidates=found)
        monkeypatch.setattr(stages, "measure_machine", lambda *_, **__: machine)

    return given
