"""Whether the loss of a run goes up instead of down."""

from collections import deque
from statistics import median

WINDOW, FACTOR = 3, 3.0
ADVICE = "take a lower train.learning_rate, in another train.output_dir, or check the data"


class Trend:
    """The losses of a run. It diverges where the median of the last three is above three times the first."""

    def __init__(self) -> None:
        self.first = 0.0
        self.last: deque[float] = deque(maxlen=WINDOW)
        self.is_diverging = False
        self.sound_step = 0  # the last step after which the loss had not gone up yet

    def take(self, step: int, loss: float) -> bool:
        """Takes in the loss of a step (1-based; 0 where it had nothing supervised); returns whether it begins to
        diverge."""
        if loss == 0:
            return False
        was_diverging, self.first = self.is_diverging, self.first or loss
        self.last.append(loss)
        self.is_diverging = len(self.last) == WINDOW and median(self.last) > FACTOR * self.first
        if not self.is_diverging:
            self.sound_step = step - WINDOW + 1  # one of the last three may be the beginning
        return self.is_diverging and not was_diverging

    def __str__(self) -> str:
        losses = ", ".join(f"{loss:.4g}" for loss in self.last)
        return f"losses of late {losses}; of the first step {self.first:.4g}" if losses else "no loss before"
