"""Trains candidates with `headstart train`: up to a step in each rung, and the chosen one for the rest of the time.

A training in a rung ends with a validation: the head is saved, and decodes answers to the validation prompts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...configs.files import write_text
from ...configs.jsonl import read_appended
from ..unattended.steps import StepRecord
from .candidates import Candidate
from .data import VALIDATION
from .halving import Pace, steps_within
from .journal import Answers, Chosen, Machine, Measured, Rung, Score
from .prediction import RoundCost, predict

NEVER = 1_000_000  # max_steps in rungs, never reached; learning rates are constant there, so it has no other effect
WARMUP = 10  # steps
DECODE_TOKENS = 64  # decoded per validation prompt
SAVE_SECONDS = 60.0  # between checkpoints
NUM_VALIDATIONS = 6  # validations of the final training
SAFETY = 0.9  # share of the available time that is planned for
FITTING = 1.3  # time to fit a fresh head, relative to that of the target's forwards on the tokens that it is fitted on
TIME_IS_UP = "its time ran out before it was scored"


@dataclass(frozen=True)
class Learner:
    """Writes the run configs of candidates, builds the commands that train them, and scores the results."""

    folder: Path  # of the `headstart auto` run
    target: str
    machine: Machine
    answers: Answers
    seed: int

    @property
    def validation_seconds(self) -> float:
        """Seconds of a validation, upper limit: it decodes all its prompts as one batch."""
        return 2 * DECODE_TOKENS * self.machine.baseline_ms / 1000 * self.answers.validation / VALIDATION[0]

    def fitting_seconds(self, name: str) -> float:
        """Seconds to fit a fresh head before its first step (`DraftHead.begin_training`)."""
        answers = self.answers
        tokens = min(self.machine.start_tokens * answers.row_tokens / answers.tokens, answers.row_tokens)
        return FITTING * tokens * self.measured(name).token_seconds

    def measured(self, name: str) -> Measured:
        return next(candidate for candidate in self.machine.candidates if candidate.name == name)

    def costs(self, name: str) -> list[RoundCost]:
        return self.measured(name).costs

    def pace(self, name: str, rungs: list[Rung]) -> Pace:
        """A candidate's training speed: as in the last of these rungs, or as measured in a single step before any."""
        step, steps_before = self.measured(name).step_seconds, 0
        continued = self.machine.start_seconds + self.validation_seconds
        overhead = continued + self.fitting_seconds(name)
        for rung in rungs:
            score = next((score for score in rung.scores if score.name == name and not score.problem), None)
            if score and score.steps > steps_before:
                # at least a tenth of the last estimate: the overhead itself is an estimate
                step = max((score.seconds - overhead) / (score.steps - steps_before), step / 10)
                steps_before, overhead = score.steps, continued
        return Pace(step, overhead)

    def write_config(self, candidate: Candidate, path: Path, *, pace: Pace, train: dict[str, Any]) -> None:
        """Writes a run config. Args: train: keys that override the `train` section."""
        precision = "bf16" if self.machine.dtype == "bfloat16" else "fp32"
        candidate = candidate.with_vocabulary(self.answers.draft_vocab_size)
        config = {
            "target": {"path": self.target, "dtype": self.machine.dtype},
            "head": candidate.head.as_dict(),
            "data": {
                "train": str(self.folder / "data" / "train.jsonl"),
                "validation": str(self.folder / "data" / "validation.jsonl"),
                "max_length": self.answers.max_length,
                "layout": "bucketed",
            },
            "train": {
                **candidate.train,
                "precision": precision,
                "seed": self.seed,
                "device": "cpu" if self.machine.device == "cpu" else None,
                "decode_prompts": self.answers.validation,
                "decode_tokens": DECODE_TOKENS,
                "checkpoint_every": max(int(SAVE_SECONDS / pace.step), 1),
                "keep_checkpoints": 1,
                **train,
            },
        }
        write_text(path, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))

    def rung_training(self, candidate: Candidate, *, steps: int, seconds: float, pace: Pace) -> list[str]:
        """Arguments of the `headstart train` that continues a candidate up to a step and validates it there.

        If that takes longer than `seconds`, it is validated and stops earlier, after at least one step. The config is
        written for the first rung only: later ones continue the same run.
        """
        config = self.folder / "configs" / f"{candidate.name}.yaml"
        if not config.exists():
            output = str(self.folder / "candidates" / candidate.name)
            train = {"output_dir": output, "max_steps": NEVER, "warmup_steps": WARMUP, "min_lr_ratio": 1.0}
            train["compile"] = False  # would take much of each rung's time
            self.write_config(candidate, config, pace=pace, train=train)
        until = f"train.stop_at_step={steps}", f"train.validate_every={steps}"
        return ["train", str(config), *until, f"train.stop_after={self.stop_after(seconds)}"]

    def final_training(
        self, candidate: Candidate, chosen: Chosen, start_from: Path | None, rungs: list[Rung], *, seconds: float
    ) -> list[str]:
        """Arguments of the `headstart train` of the chosen candidate, whose learning rate decays to 0.

        Args:
            start_from: folder of the head to start from; None: a fresh one.
            seconds: after which it is validated and stops, if it has not ended by then.
        """
        config = self.folder / "configs" / "chosen.yaml"
        if not config.exists():
            train = {
                "output_dir": str(self.folder / "training"),
                "start_from": None if start_from is None else str(start_from),
                "max_steps": chosen.max_steps,
                "warmup_steps": min(WARMUP, chosen.max_steps - 1),
                "validate_every": max(chosen.max_steps // NUM_VALIDATIONS, 1),
            }
            self.write_config(candidate, config, pace=self.pace(candidate.name, rungs), train=train)
        return ["train", str(config), f"train.stop_after={self.stop_after(seconds)}"]

    def stop_after(self, seconds: float) -> float:
        """`train.stop_after` of a command that has that many seconds, of which its start and a validation take some."""
        return max(round(seconds - self.machine.start_seconds - self.validation_seconds, 1), 1.0)

    def score(self, name: str, output: Path, record: StepRecord, *, steps_before: int) -> Score:
        """The score of a candidate from the last validation in its run folder.

        The score has a `problem` if training failed, or there was no validation after step `steps_before`.
        """
        found = last_validation(output)
        if found is None or found[0] <= steps_before or (record.exit_code and not record.stopped):
            problem = TIME_IS_UP if record.stopped else f"it failed: see {record.log}"
            return Score(name, 0, record.seconds, 0.0, [], 0, 0.0, problem)
        step, length, rates = found
        best = predict(extended(rates, self.max_draft_tokens(name)), self.costs(name))
        return Score(name, step, record.seconds, length, rates, best.num_draft_tokens, best.speedup)

    def max_draft_tokens(self, name: str) -> int:
        """The longest chain whose cost was measured."""
        return max(cost.num_draft_tokens for cost in self.costs(name))

    def steps_in(self, seconds: float, pace: Pace) -> int:
        """Optimizer steps of the final training in that many seconds, validations included; 0 or more."""
        spare = SAFETY * (seconds - (NUM_VALIDATIONS - 1) * self.validation_seconds) - pace.overhead
        return max(int(spare / pace.step), 0)


def last_validation(run: Path) -> tuple[int, float, list[float | None]] | None:
    """Step, acceptance length and acceptance rates of the last decoded validation of a run; None if there is none."""
    rows = [row for row in read_appended(run / "metrics.jsonl") if "validation" in row]
    decoded = [(row["step"], row["validation"].get("decoded")) for row in rows]
    found = [(step, each) for step, each in decoded if each and each["acceptance_length"] is not None]
    if not found:
        return None
    step, each = found[-1]
    return step, each["acceptance_length"], each["acceptance_rate"]


def extended(rates: list[float | None], num_positions: int) -> list[float | None]:
    """The rates cut or extended to `num_positions`; added positions repeat the last rate."""
    known = rates[:num_positions]
    return known + [known[-1]] * (num_positions - len(known))


def plan_rung(names: list[str], seconds: float, learner: Learner, rungs: list[Rung]) -> dict[str, int]:
    """By candidate, the step count (since the start of its training) up to which it is trained in the next rung.

    Args:
        seconds: of the rung, shared equally.
        rungs: the earlier ones.
    """
    done = {score.name: score.steps for rung in rungs for score in rung.scores}
    each = SAFETY * seconds / len(names)
    return {name: done.get(name, 0) + steps_within(each, learner.pace(name, rungs)) for name in names}
