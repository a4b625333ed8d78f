"""Candidates learn: run configs, visits of successive halving, and the chosen one's run for the rest of the time.

Every visit is `headstart train` up to a step, behind which the head is saved and decodes answers to validation prompts.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...configs.files import write_text
from ..unattended.steps import Runner, StepRecord
from .candidates import Candidate
from .halving import Pace, steps_within
from .journal import Answers, Chosen, Machine, Rung, Score
from .prediction import RoundCost, predict

NEVER = 1_000_000  # steps: halving ends before; rates are constant, so the number changes nothing
WARMUP = 10  # steps
DECODE_TOKENS = 64  # of the answer to each validation prompt
SAVE_SECONDS = 60.0  # of learning that a kill may cost
LOOKS = 6  # validations of the last run,
PATIENCE = 2  # which ends after so many without a better one
SAFETY = 0.9  # share of the time that a plan fills


@dataclass(frozen=True)
class Learner:
    """What all runs have in common."""

    folder: Path  # of the whole
    target: str
    machine: Machine
    answers: Answers
    runner: Runner
    seed: int

    @property
    def visit_seconds(self) -> float:
        """What a visit takes besides its steps: it starts, and decodes a validation."""
        return self.machine.start_seconds + 2 * DECODE_TOKENS * self.machine.baseline_ms / 1000

    def costs(self, name: str) -> list[RoundCost]:
        return next(each.costs for each in self.machine.candidates if each.name == name)

    def pace(self, name: str, rungs: list[Rung]) -> Pace:
        """Training speed of a candidate: from its last visit, or before the first one from a single measured step."""
        step = next(each.step_seconds for each in self.machine.candidates if each.name == name)
        before = 0
        for rung in rungs:
            score = next((score for score in rung.scores if score.name == name and not score.problem), None)
            if score and score.steps > before:
                step = max((score.seconds - self.visit_seconds) / (score.steps - before), step / 10)
                before = score.steps
        return Pace(step, self.visit_seconds)

    def config(self, candidate: Candidate, path: Path, *, pace: Pace, train: dict[str, Any]) -> None:
        """Writes a run's config. Args: train: keys of this kind of run."""
        precision = "bf16" if self.machine.dtype == "bfloat16" else "fp32"
        candidate = candidate.with_vocabulary(self.answers.draft_vocab_size)
        config = {
            "target": {"path": self.target, "dtype": self.machine.dtype},
            "head": candidate.head.as_dict(),
            "data": {
                "train": str(self.folder / "data" / "train.jsonl"),
                "validation": str(self.folder / "data" / "validation.jsonl"),
                "max_length": self.answers.max_length,
            },
            "train": {
                **candidate.train,
                "precision": precision,
                "seed": self.seed,
                "device": "cpu" if self.machine.device == "cpu" else None,
                "decode_tokens": DECODE_TOKENS,
                "checkpoint_every": max(int(SAVE_SECONDS / pace.step), 1),
                "keep_checkpoints": 1,
                **train,
            },
        }
        write_text(path, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))

    def visit_words(self, candidate: Candidate, *, steps: int, pace: Pace) -> list[str]:
        """`headstart train` up to a step, and a validation there."""
        config = self.folder / "configs" / f"{candidate.name}.yaml"
        if not config.exists():
            output = str(self.folder / "candidates" / candidate.name)
            own = {"output_dir": output, "max_steps": NEVER, "warmup_steps": WARMUP, "min_lr_ratio": 1.0}
            self.config(candidate, config, pace=pace, train=own)
        return ["train", str(config), f"train.stop_at_step={steps}", f"train.validate_every={steps}"]

    def last_words(self, candidate: Candidate, chosen: Chosen, start: Path | None, rungs: list[Rung]) -> list[str]:
        """`headstart train` of the chosen one, with a rate that falls to 0. start: its best so far."""
        config = self.folder / "configs" / "chosen.yaml"
        if not config.exists():
            own = {
                "output_dir": str(self.folder / "training"),
                "start_from": None if start is None else str(start),
                "max_steps": chosen.max_steps,
                "warmup_steps": min(WARMUP, chosen.max_steps - 1),
                "validate_every": max(chosen.max_steps // LOOKS, 1),
                "patience": PATIENCE,
            }
            self.config(candidate, config, pace=self.pace(candidate.name, rungs), train=own)
        return ["train", str(config)]

    def score(self, name: str, output: Path, record: StepRecord, steps: int) -> Score:
        """By the last validation of a run folder; with a `problem` where none is of that step or later."""
        found = last_validation(output)
        if found is None or found[0] < steps or (record.exit_code and not record.stopped):
            problem = "its time was over before it was scored" if record.stopped else f"it failed: see {record.log}"
            return Score(name, 0, record.seconds, 0.0, [], 0, 0.0, problem)
        step, length, rates = found
        best = predict(extended(rates, self.most(name)), self.costs(name))
        return Score(name, step, record.seconds, length, rates, best.num_draft_tokens, best.speedup)

    def most(self, name: str) -> int:
        """The longest chain whose cost was measured."""
        return max(cost.num_draft_tokens for cost in self.costs(name))

    def budgeted_steps(self, seconds: float, pace: Pace) -> int:
        """Steps of the chosen one's run in so many seconds, its validations counted; may be too few to be worth it."""
        validations = LOOKS * (self.visit_seconds - self.machine.start_seconds)
        spare = SAFETY * (seconds - validations) - self.machine.start_seconds
        return max(int(spare / pace.step), 0)


def last_validation(run: Path) -> tuple[int, float, list[float | None]] | None:
    """Step, acceptance length and rates of a run's last decoded validation; None if there is none."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return None
    rows = [json.loads(line) for line in path.read_text().splitlines() if '"validation"' in line]
    decoded = [(row["step"], row["validation"].get("decoded")) for row in rows]
    found = [(step, each) for step, each in decoded if each and each["acceptance_length"] is not None]
    if not found:
        return None
    step, each = found[-1]
    return step, each["acceptance_length"], each["acceptance_rate"]


def extended(rates: list[float | None], most: int) -> list[float | None]:
    """Rates of that many positions; those beyond the measured ones repeat the last."""
    known = rates[:most]
    return known + [known[-1]] * (most - len(known))


def visit_plan(names: list[str], seconds: float, learner: Learner, rungs: list[Rung]) -> dict[str, int]:
    """The step up to which each candidate trains in a rung of that many seconds, counted from its first step."""
    done = {score.name: score.steps for rung in rungs for score in rung.scores}
    each = SAFETY * seconds / len(names)
    return {name: done.get(name, 0) + steps_within(each, learner.pace(name, rungs)) for name in names}
