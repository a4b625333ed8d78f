"""The trainings of both runs: their configs, and how many steps there is time for.

`headstart auto` trains candidates up to a step in each rung, and the chosen one for the rest of the time. A training in
a rung ends with a validation: the head decodes answers to the validation prompts. `headstart refit` trains the old head
further.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from ...configs.errors import BadInput
from ...configs.files import write_text
from ...configs.jsonl import read_appended
from ...data_pipelines.storage.samples import Sample
from ...data_pipelines.vocab import count_supervised, coverage, most_frequent, worthwhile_size
from ...heads.base import DraftHead, HeadConfig
from ...heads.targets.fit import row_share
from ...train.trend import Validated
from .answers import VALIDATION
from .candidates import TRAINING, Candidate, find_candidates
from .clock import TRAINED
from .journal import AnswerCounts, Measured, Score, TrainingPlan, known
from .machine import predict_length
from .session import AutoRun, RefitSettings, Settings
from .steps import StepRecord

LEAST_STEPS = 10  # optimizer steps of a training, and of a candidate in a rung, lower limit
WARMUP = 10  # steps
SAVE_SECONDS = 60.0  # between checkpoints

# headstart auto
NEVER = 1_000_000  # max_steps in rungs, never reached; learning rates are constant there, so it has no other effect
DECODE_TOKENS = 64  # decoded per validation prompt
NUM_VALIDATIONS = 6  # validations of the final training
FITTING = 1.3  # time to fit a fresh head, relative to that of the target's forwards on the tokens that it is fitted on
EXTRACTED = 1.2  # times as many steps that extracting the target's states must allow
TIME_IS_UP = "its time ran out before it was scored"

# headstart refit
REFIT_VALIDATIONS = 4  # validations of the training
PATIENCE = 2  # validations without improvement after which it ends
MOST_EPOCHS = 10  # passes over the rows, upper limit
RATE = 0.1  # learning rates, relative to a fresh head's: at those a trained head first loses much of what it knew


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
    settings: Settings,
    *,
    head: dict[str, Any],
    data: dict[str, Any],
    train: dict[str, Any],
    dtype: str,
    step_seconds: float,
) -> None:
    """Writes the run config of a training. Args: train: what is not the same in all of them."""
    adapter = settings.adapter if isinstance(settings, RefitSettings) else ""
    same = {
        "precision": "bf16" if dtype == "bfloat16" else "fp32",
        "seed": settings.seed,
        "device": "cpu" if settings.device == "cpu" else None,
        "checkpoint_every": max(int(SAVE_SECONDS / step_seconds), 1),
        "keep_checkpoints": 1,
    }
    config = {
        "target": {"path": settings.target, **({"adapter": adapter} if adapter else {}), "dtype": dtype},
        "head": head,
        "data": {**data, "layout": "bucketed"},
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

    @property
    def answers(self) -> AnswerCounts:
        return known(self.run.journal.answers)

    @property
    def measured(self) -> Measured:
        return next(found for found in self.run.machine.candidates if found.name == self.candidate.name)

    @property
    def validation_seconds(self) -> float:
        """Seconds of a validation, upper limit: it decodes all its prompts as one batch."""
        return 2 * DECODE_TOKENS * self.run.machine.baseline_ms / 1000 * self.answers.validation / VALIDATION[0]

    @property
    def fitting_seconds(self) -> float:
        """Seconds to fit a fresh head before its first step (`DraftHead.begin_training`)."""
        answers = self.answers
        tokens = min(self.run.machine.start_tokens * answers.row_tokens / answers.tokens, answers.row_tokens)
        return FITTING * tokens * self.measured.token_seconds

    @property
    def pace(self) -> Pace:
        """As in the candidate's last rung, or as measured in a single step before any."""
        step, steps_before = self.measured.step_seconds, 0
        continued = self.run.machine.start_seconds + self.validation_seconds
        overhead = continued + self.fitting_seconds
        for score in self.run.journal.scores_of(self.candidate.name):
            if score.steps > steps_before:
                # at least a tenth of the last estimate: the overhead itself is an estimate
                step = max((score.seconds - overhead) / (score.steps - steps_before), step / 10)
                steps_before, overhead = score.steps, continued
        return Pace(step, overhead)

    def planned(self, seconds: float) -> tuple[int, bool]:
        """Steps of the final training in that many seconds, and whether the target's states are extracted before it.

        Extracted, they are read once, however often the rows are; else in every step anew.
        """
        pace, answers, validating = self.pace, self.answers, (NUM_VALIDATIONS - 1) * self.validation_seconds
        num_rows = answers.written + answers.sampled
        row_seconds = self.measured.token_seconds * answers.row_tokens / max(num_rows, 1)  # of the target's forward
        step = max(pace.step - self.candidate.train["batch_size"] * row_seconds, pace.step / 10)
        extracting = self.run.machine.start_seconds + row_seconds * (num_rows + answers.given)
        plain = steps_in(seconds, pace, validating=validating)
        extracted = steps_in(seconds - extracting, Pace(step, pace.overhead), validating=validating)
        extracts = extracted > EXTRACTED * max(plain, LEAST_STEPS)
        return extracted if extracts else plain, extracts

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
        config, answers, rows = self.run.folder / "configs" / f"{file}.yaml", self.answers, self.run.data
        if not config.exists():
            files = {"train": str(rows / "train.jsonl"), "validation": str(rows / "validation.jsonl")}
            decoding = {"decode_prompts": answers.validation, "decode_tokens": DECODE_TOKENS}
            write_run(
                config,
                self.run.settings,
                head=self.candidate.with_vocabulary(answers.draft_vocab_size).head.as_dict(),
                data={**files, "max_length": answers.max_length},
                train={**self.candidate.train, **decoding, **train},
                dtype=self.run.machine.dtype,
                step_seconds=self.pace.step,
            )
        stop_after = max(round(seconds - self.run.machine.start_seconds - self.validation_seconds, 1), 1.0)
        return ["train", str(config), f"train.stop_after={stop_after}"]

    def score(self, output: Path, record: StepRecord, *, steps_before: int) -> Score:
        """The candidate's score from the last validation in its run folder.

        The score has a `problem` if training failed, or there was no validation after step `steps_before`.
        """
        name, (reached, rates) = self.candidate.name, (validations(output) or [(None, [])])[-1]
        if reached is None or reached.step <= steps_before or (record.exit_code and not record.stopped):
            problem = TIME_IS_UP if record.stopped else f"it failed: see {record.log}"
            return Score(name, seconds=record.seconds, problem=problem)
        num_draft_tokens, speedup = predict_length(rates, self.measured.costs)
        figures = (reached.step, record.seconds, reached.acceptance_length, rates, num_draft_tokens, speedup)
        return Score(name, *figures, num_rounds=reached.num_rounds)


def learners_of(run: AutoRun) -> dict[str, Learner]:
    """The candidates by name."""
    found = find_candidates(run.settings.engine)
    return {candidate.name: Learner(run, candidate) for candidate in found}


def validations(run: Path) -> list[tuple[Validated, list[float | None]]]:
    """The decoded validations in a run folder, in order, with their acceptance rates by draft position."""
    rows = [row for row in read_appended(run / "metrics.jsonl") if "validation" in row]
    decoded = [(row["step"], row["validation"].get("decoded")) for row in rows]
    return [
        (Validated(step, part["acceptance_length"], part["num_rounds"]), part["acceptance_rate"])
        for step, part in decoded
        if part and part["acceptance_length"] is not None
    ]


# headstart refit


def training_of(config: HeadConfig) -> dict[str, Any]:
    """The `train` section with which `headstart auto` trains heads of that family, with lower learning rates."""
    alike = (candidate.train for candidate in find_candidates() if candidate.head.type == config.type)
    section = next(alike, TRAINING)
    return {key: RATE * float(value) if key.endswith("learning_rate") else value for key, value in section.items()}


def grown_vocabulary(head: DraftHead, samples: Sequence[Sample]) -> Tensor | None:
    """[Vd] the draft vocabulary with which a head learns on: its own and, if the rows need them, more tokens.

    The size is that of `worthwhile_size`, where that is not more than half of the target's vocabulary.

    Args: samples: the training rows.
    Returns None if the head's own vocabulary is whole.
    """
    if head.vocabulary is None:
        return None
    target, own = head.target, head.vocabulary.to_target.tolist()
    counts = count_supervised(samples, vocab_size=target.vocab_size)
    size, covered = worthwhile_size(counts, own, row_share=row_share(target))
    needs_more = covered is not None and round(coverage(counts, torch.tensor(own)), 4) < covered
    wider = max(size or 0, len(own)) if needs_more else len(own)
    return most_frequent(counts, size=wider, always=own)


def planned_steps(seconds: float, pace: Pace, *, validation_seconds: float, num_rows: int, batch_size: int) -> int:
    """Optimizer steps of a training in that many seconds; `num_rows` rows are read MOST_EPOCHS times at most.

    Args: validation_seconds: seconds of a validation. batch_size: rows per step.
    Raises: BadInput if there is no time for LEAST_STEPS steps.
    """
    validating = REFIT_VALIDATIONS * validation_seconds
    steps = steps_in(seconds, pace, validating=validating)
    if steps < LEAST_STEPS:
        missing = (LEAST_STEPS * pace.step + pace.overhead) / TRAINED + validating - seconds
        raise BadInput(f"--budget: too short for this target here; {-(-missing // 60):.0f}m more are the least")
    return min(steps, max(MOST_EPOCHS * num_rows // batch_size, LEAST_STEPS))


def write_refit(
    folder: Path, settings: RefitSettings, config: HeadConfig, plan: TrainingPlan, *, validates: bool
) -> None:
    """Writes refit.yaml, the config of the training on the rows in data/. Args: validates: on rows there."""
    files = {"train": str(folder / "data" / "train.jsonl"), "max_length": settings.max_length}
    train = {
        **training_of(config),
        "output_dir": str(folder / "training"),
        "start_from": settings.head,
        "max_steps": plan.max_steps,
        "warmup_steps": min(WARMUP, plan.max_steps - 1),
    }
    if validates:
        files["validation"] = str(folder / "data" / "validation.jsonl")
        train |= {
            "validate_every": max(plan.max_steps // REFIT_VALIDATIONS, 1),
            "patience": PATIENCE,
            "decode_prompts": 0,
        }
    write_run(
        folder / "refit.yaml",
        settings,
        head={**config.as_dict(), "draft_vocab_size": plan.draft_vocab_size},
        data=files,
        train=train,
        dtype=settings.dtype,
        step_seconds=plan.step_seconds,
    )
