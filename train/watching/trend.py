"""Where a run is heading: a loss that diverges."""

from dataclasses import dataclass, field
from statistics import median

WINDOW, FACTOR = 3, 3.0
ADVICE = "take a lower train.learning_rate, in another train.output_dir, or check the data"


@dataclass
class Trend:
    """The losses of a run; it diverges while the median of the last three is above three times the first."""

    first: float = 0.0
    last: list[float] = field(default_factory=list)
    diverges_since: int = 0  # the step at which it was seen; 0: it does not diverge

    def take(self, step: int, loss: float) -> bool:
        """Record the loss of a step (1-based); returns whether divergence starts here. A loss of 0, of a step without
        supervised tokens, is ignored."""
        if loss == 0:
            return False
        self.first = self.first or loss
        self.last = [*self.last, loss][-WINDOW:]
        if len(self.last) < WINDOW or median(self.last) <= FACTOR * self.first:
            self.diverges_since = 0
            return False
        self.diverges_since = self.diverges_since or step
        return self.diverges_since == step

    def __str__(self) -> str:
        losses = ", ".join(f"{loss:.4g}" for loss in self.last)
        return f"losses of late {losses}; of the first step {self.first:.4g}" if losses else "no loss before"
