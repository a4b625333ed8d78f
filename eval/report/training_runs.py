"""Run folders as `headstart compare` reads and shows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .conclusion import Conclusion, Table
from .results.one_result import number
from .sections import cell


@dataclass(frozen=True)
class TrainingRun:
    """A run folder as read."""

    name: str  # short
    folder: str
    finished: bool
    settings: dict[str, Any]  # its config, keys joined by dots
    tokens_per_second: float
    losses: Sequence[tuple[int, float]]  # (step, loss) of the logged steps
    taught: Sequence[tuple[int, float]]  # (step, acceptance length) of validations, teacher-forced
    decoded: Sequence[tuple[int, float]]  # the same, of validations that also decoded

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and acceptance length of the best validation."""
        return max(self.taught, key=lambda point: (point[1], point[0]), default=None)

    @property
    def decoded_at_best(self) -> float | None:
        """What decoding gave at the best validation."""
        return dict(self.decoded).get(self.best[0]) if self.best else None

    def to_json(self) -> dict[str, Any]:
        """The run as `compare --json` prints it, without the settings."""
        return {
            "run": self.folder,
            "finished": self.finished,
            "steps": self.losses[-1][0],
            "loss": round(self.losses[-1][1], 4),
            "tokens_per_second": self.tokens_per_second,
            "best_acceptance_length": self.best[1] if self.best else None,
            "best_step": self.best[0] if self.best else None,
            "last_acceptance_length": self.taught[-1][1] if self.taught else None,
            "decoded_acceptance_length": self.decoded_at_best,
        }


def runs_table(runs: Sequence[TrainingRun]) -> Table:
    columns = ["run", "steps", "loss", "tokens per second", "best tokens per forward", "at step", "decoded"]
    rows = []
    for run in runs:
        step, best = run.best or (None, None)
        decoded = run.decoded_at_best
        (steps, loss), speed = run.losses[-1], cell(round(run.tokens_per_second))
        rows.append([run.name, cell(steps), number(loss), speed, number(best), cell(step), number(decoded)])
    return Table("", columns, rows)


def runs_conclusion(runs: Sequence[TrainingRun], settings: Sequence[str]) -> Conclusion:
    """Which run validated best. Args: settings: of each run, those in which they differ."""
    best = max((run for run in runs if run.best), key=lambda run: (run.best or (0, 0.0))[1], default=None)
    headline = "No run was validated yet."
    if best is not None and best.best is not None:
        step, length = best.best
        headline = f"{best.name} validated best: {length:.2f} tokens per forward at step {step:,}."
    reasons = ["The seed alone changes these figures: compare several of each before a difference counts."]
    if unfinished := [run.name for run in runs if not run.finished]:
        reasons.append(f"Not finished: {', '.join(unfinished)}.")
    return Conclusion(False, headline, reasons=reasons, cautions=settings)


def differing_settings(runs: Sequence[TrainingRun]) -> dict[str, list[Any]]:
    """The settings that not all runs share, but their folders: the value of each run, None if it has none."""
    keys = sorted({key for run in runs for key in run.settings} - {"train.output_dir"})
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: settings for key, settings in values.items() if any(value != settings[0] for value in settings)}
