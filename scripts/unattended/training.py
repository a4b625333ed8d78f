"""Trainings of unattended runs: their configs, how many steps there is time for, and those of `headstart auto`.

It trains candidates up to a step in each rung, and the chosen one for the rest of the time. A training in a rung ends
with a validation: the head decodes answers to the validation prompts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...base.files import write_text
from ...base.jsonl import read_appended
from ...eval.figures.recorded_training import RecordedTraining
from ...heads.stored.folder import read_record
from .answers import VALIDATION
from .candidates import Candidate, find_candidates
from .machine import predict_length
from .running.clock import TRAINED
from .running.journal import AnswerCounts, Measured, Score, known
from .running.session import AutoRun, Session
from .running.steps import StepRecord
from .target_server import TargetServer

LEAST_STEPS = 10  # optimizer steps of a training, and of a candidate in a rung, lower limit
WARMUP = 10  # steps
SAVE_SECONDS = 60.0  # between checkpoints

# headstart auto
NEVER = 1_000_000  # max_steps in rungs, never reached; learning rates are constant there, so it has no other effect
DECODE_TOKENS = 64  # decoded per validation prompt
NUM_VALIDATIONS = 6  # validations of the final training
FITTING = 1.3  # time to fit a fresh head, relative to that of the target's forwards on the tokens that it is fitted on
TIME_IS_UP = "its time ran out before it was scored"


@dataclass(frozen=True)
class Pace:
    """Training speed on this machine."""

    step: float  # seconds per optimizer step
    overhead: float  # seconds besides the steps: starting the process, fitting, the validation at the end of a rung


def steps_in(seconds: float, pace: Pace, *, validating: float = 0.0) -> int:
    """Optimizer steps that are planned for a training of so many seconds; negative if even its overhead takes longer.

    Args: validating: seconds of its validations, beyond the overhead.
    """
    return int((TRAINED * (seconds - validating) - pace.overhead) / pace.step)


def write_run(
    path: Path,
    run: Session[Any, Any],
    *,
    head: dict[str, Any],
    train: dict[str, Any],
    max_length: int,
    dtype: str,
    step_seconds: float,
) -> None:
    """Writes the run config of a training on the rows in data/. Args: train: what is not the same in all of them."""
    settings = run.settings
    same = {
        "precision": "bf16" if dtype == "bfloat16" else "fp32",
        "seed": settings.seed,
        "device": "cpu" if settings.device == "cpu" else None,
        "checkpoint_every": max(int(SAVE_SECONDS / step_seconds), 1),
        "keep_checkpoints": 1,
    }
    config = {
        "target": {"path": settings.target, "adapter": settings.adapter or None, "dtype": dtype},
        "head": head,
        "data": {
            "train": str(run.data / "train.jsonl"),
            "validation": str(run.data / "validation.jsonl"),
            "max_length": max_length,
            "layout": "bucketed",
        },
        "train": {**same, **train},
    }
    write_text(path, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def head_in(run: Path, *names: str) -> str:
    """The first of these head folders that is in a run folder; empty if there is none."""
    return next((str(run / name) for name in names if (run / name).is_dir()), "")


# headstart auto


@dataclass(frozen=True)
class Learner:
    """A candidate in a run: how fast it trains, the commands that train it, whose configs it writes, and its scores."""

    run: AutoRun
    candidate: Candidate
    is_served: bool = False  # trained from the states of a server: nothing is decoded then

    @property
    def answers(self) -> AnswerCounts:
        return known(self.run.journal.answers)

    @property
    def measured(self) -> Measured:
        return next(found for found in self.run.machine.candidates if found.name == self.candidate.name)

    @property
    def validation_seconds(self) -> float:
        """Seconds of a validation, upper limit: it decodes all its prompts as one batch, or reads its rows' states."""
        if self.is_served:
            answers = self.answers
            row_tokens = answers.row_tokens / max(answers.written + answers.sampled, 1)
            return 2 * answers.validation * row_tokens * self.measured.token_seconds
        return 2 * DECODE_TOKENS * self.run.machine.baseline_ms / 1000 * self.answers.validation / VALIDATION[0]

    @property
    def fitting_seconds(self) -> float:
        """Seconds to fit a fresh head before its first step (`DraftHead.begin_training`)."""
        answers = self.answers
        tokens = min(self.run.machine.start_tokens * answers.row_tokens / answers.tokens, answers.row_tokens)
        return FITTING * tokens * self.measured.token_seconds

    @property
    def pace(self) -> Pace:
        """The candidate's pace in its last rung, or in the single step that was timed before any."""
        step, steps_before = self.measured.step_seconds, 0
        continued = self.run.machine.begin_seconds + self.validation_seconds
        overhead = continued + self.fitting_seconds
        for score in self.run.journal.scores_of(self.candidate.name):
            if score.steps > steps_before:
                # at least a tenth of the last estimate: the overhead itself is an estimate
                if score.seconds > overhead:  # else it was resumed behind a kill, and these are not all of its seconds
                    step = max((score.seconds - overhead) / (score.steps - steps_before), step / 10)
                steps_before, overhead = score.steps, continued
        return Pace(step, overhead)

    def planned(self, seconds: float) -> int:
        """Steps of the final training in that many seconds."""
        return steps_in(seconds, self.pace, validating=(NUM_VALIDATIONS - 1) * self.validation_seconds)

    def rung_training(self, steps: int, *, seconds: float) -> list[str]:
        """Arguments of the `headstart train` that continues the candidate up to a step and validates it there.

        If that takes longer than `seconds`, it is validated and stops earlier, after at least one step. The config is
        written for the first rung only: later ones continue the same run.
        """
        train = {
            "output_dir": str(self.run.folder / "candidates" / self.candidate.name),
            "max_steps": NEVER,
            "warmup_steps": WARMUP,
            "min_lr_ratio": 1.0,
            "compile": False,  # would take much of each rung's time
        }
        arguments = self._training(self.candidate.name, train, seconds=seconds)
        return [*arguments, f"train.stop_at_step={steps}", f"train.validate_every={steps}"]

    def final_training(self, max_steps: int, start_from: str, *, seconds: float) -> list[str]:
        """Arguments of the `headstart train` of the chosen candidate, whose learning rate decays to 0.

        Args:
            start_from: folder of the head to start from; empty: a fresh one.
            seconds: after which it is validated and stops, if it has not ended by then.
        """
        train = {
            "output_dir": str(self.run.folder / "training"),
            "start_from": start_from or None,
            "max_steps": max_steps,
            "warmup_steps": min(WARMUP, max_steps - 1),
            "validate_every": max(max_steps // NUM_VALIDATIONS, 1),
        }
        return self._training("chosen", train, seconds=seconds)

    def _training(self, file: str, train: dict[str, Any], *, seconds: float) -> list[str]:
        """Arguments of a training by configs/FILE.yaml, which is written unless it is there."""
        config, answers = self.run.folder / "configs" / f"{file}.yaml", self.answers
        if not config.exists():
            decoding: dict[str, Any] = {"decode_prompts": answers.validation, "decode_tokens": DECODE_TOKENS}
            decoding["decode_window"] = self.run.settings.draft_window
            write_run(
                config,
                self.run,
                head=self.candidate.with_vocabulary(answers.draft_vocab_size).head.as_dict(),
                train={**self.candidate.train, **decoding, **train},
                max_length=answers.max_length,
                dtype=self.run.machine.dtype,
                step_seconds=self.pace.step,
            )
        stop_after = max(round(seconds - self.run.machine.start_seconds - self.validation_seconds, 1), 1.0)
        return ["train", str(config), f"train.stop_after={stop_after}"]

    def score(self, output: Path, record: StepRecord, *, steps_before: int) -> Score:
        """The candidate's score from the last validation in its run folder.

        The score has a `problem` if training failed, or there was no validation after step `steps_before`.
        """
        step, found = last_validation(output)
        if step <= steps_before or (record.exit_code and not record.stopped):
            problem = TIME_IS_UP if record.stopped else f"it failed: see {record.log}"
            return Score(self.candidate.name, seconds=record.seconds, problem=problem)
        length, rates = found["acceptance_length"], found["acceptance_rate"]
        return self._scored(step, length, rates, seconds=record.seconds)

    def score_of(self, head: str, *, seconds: float = 0.0) -> Score | None:
        """The score of a head that was written, by the validation of its own step, which need not be the last; None:
        there was none. Args: seconds: of the command that trained it."""
        training = read_record(head).training
        if training is None:
            return None
        recorded = RecordedTraining.from_json(training, where=f"head {head}").validation
        found = recorded and (recorded.decoded or recorded)
        if found is None or found.acceptance_length is None:
            return None
        return self._scored(training["steps"], found.acceptance_length, found.acceptance_rate, seconds=seconds)

    def _scored(self, step: int, length: float, rates: list[float | None], *, seconds: float) -> Score:
        num_draft_tokens, speedup = predict_length(rates, self.measured.costs)
        return Score(self.candidate.name, step, seconds, length, rates, num_draft_tokens, speedup)


def learners_of(run: AutoRun, server: TargetServer) -> dict[str, Learner]:
    """The candidates by name."""
    found = find_candidates(run.settings.engine.name)
    return {candidate.name: Learner(run, candidate, server.gives_states) for candidate in found}


def last_validation(run: Path) -> tuple[int, dict[str, Any]]:
    """The step and the figures of the last validation in a run folder: decoded, or as counted on the target's own
    answers where nothing was decoded; step 0 if there is none."""
    rows = [row for row in read_appended(run / "metrics.jsonl") if "validation" in row]
    figures = [(row["step"], row["validation"].get("decoded") or row["validation"]) for row in rows]
    return next((one for one in reversed(figures) if one[1]["acceptance_length"] is not None), (0, {}))
