"""The time budget of an unattended run, and how much of it is used, over all its restarts."""

import json
import re
import time
from contextlib import suppress
from pathlib import Path

from ...configs.errors import BadInput
from ...configs.files import write_text

UNITS = {"s": 1, "m": 60, "h": 3600}
LEAST_BUDGET = 60.0  # seconds: a handful of commands has to start in it
TICK = 1.0  # seconds between two notes of the time


def parse_budget(text: str) -> float:
    """`90s`, `20m`, `2h` or `1h30m` in seconds. Raises BadInput, also below LEAST_BUDGET."""
    if not re.fullmatch(r"(\d+(\.\d+)?[smh])+", text):
        raise BadInput(f"--budget {text}: expected a time such as 90s, 20m or 2h")
    seconds = sum(float(number) * UNITS[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([smh])", text))
    if seconds < LEAST_BUDGET:
        raise BadInput(f"--budget {text}: too short for anything to be learnt; the least is {LEAST_BUDGET:.0f}s")
    return seconds


def clock_words(seconds: float) -> str:
    """`3:07`, or `1:02:03`."""
    whole = max(round(seconds), 0)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Clock:
    """Seconds of a budget that are used, those before a kill too. They are noted in a file, at most TICK apart."""

    def __init__(self, path: Path, budget: float):
        self.path, self.budget, self.before = path, budget, 0.0
        with suppress(OSError, ValueError, KeyError, TypeError):
            self.before = float(json.loads(path.read_text())["seconds"])
        self._began = time.monotonic()
        self._noted = self.before

    @property
    def used(self) -> float:
        return self.before + time.monotonic() - self._began

    @property
    def left(self) -> float:
        return self.budget - self.used

    def note(self) -> None:
        """Write the used time to the file, unless that was just done."""
        if self.used - self._noted >= TICK:
            self._noted = self.used
            write_text(self.path, json.dumps({"seconds": round(self.used, 1)}) + "\n")
