"""The time budget of an unattended run: how it is divided, and how much is used over all starts of the run."""

import json
import re
import time
from contextlib import suppress
from pathlib import Path

from ....base.errors import BadInput
from ....base.files import write_text

UNITS = {"s": 1, "m": 60, "h": 3600}  # in seconds
LEAST_BUDGET = 60.0  # seconds; a run starts several commands, each of which takes seconds to start
MOST_BUDGET = 1000 * 3600.0
SAVE_EVERY = 1.0  # seconds between two writes of the used time

# shares of the budget of `headstart auto`
MACHINE = 0.12  # upper limit: measuring the machine
TRIAL = 0.15  # upper limit: trying the engine's server
SERVED_EVALUATION = 0.4  # upper limit: measuring in it; where the least takes more, our own engine decides
ANSWERS = 0.25  # the target answers prompts
EVALUATION = 0.22  # upper limit: evaluation, export and check
HALVING = 0.4  # of the remaining training time: successive halving; the chosen candidate gets the rest
# of both verbs
TRAINED = 0.9  # of the time for a training: what its planned steps take


def parse_budget(text: str) -> float:
    """Seconds of a time such as `90s`, `20m`, `2h` or `1h30m`. Raises BadInput, also below LEAST_BUDGET."""
    if not re.fullmatch(r"(\d+(\.\d+)?[smh])+", text):
        raise BadInput(f"--budget {text}: expected a time such as 90s, 20m or 2h")
    seconds = sum(float(number) * UNITS[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([smh])", text))
    if seconds < LEAST_BUDGET:
        raise BadInput(f"--budget {text}: too short to train anything; the minimum is {LEAST_BUDGET:.0f}s")
    if seconds > MOST_BUDGET:
        raise BadInput(f"--budget {text}: the maximum is {MOST_BUDGET / 3600:.0f}h")
    return seconds


def clock_text(seconds: float) -> str:
    """Seconds as `3:07` (minutes) or `1:02:03` (hours)."""
    whole = max(round(seconds), 0)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Clock:
    """Counts the seconds of a budget that are used, including those of earlier starts, which are kept in a file."""

    def __init__(self, path: Path, budget: float):
        """Args: budget: seconds. path: JSON file of the used time; a missing or damaged one counts as 0."""
        self.path, self.budget, self.before = path, budget, 0.0
        with suppress(OSError, ValueError, KeyError, TypeError):
            self.before = float(json.loads(path.read_text())["seconds"])
        self._started = time.monotonic()
        self._saved = self.before

    @property
    def used(self) -> float:
        """Seconds used so far."""
        return self.before + time.monotonic() - self._started

    @property
    def left(self) -> float:
        """Seconds left; negative when the budget is exceeded."""
        return self.budget - self.used

    def save(self) -> None:
        """Write the used time to the file, unless it was written within the last SAVE_EVERY seconds."""
        if self.used - self._saved >= SAVE_EVERY:
            self._saved = self.used
            write_text(self.path, json.dumps({"seconds": round(self.used, 1)}) + "\n")
