"""A drafter of your own, measured: `python examples/own_drafter.py MODEL PROMPTS.jsonl`.

It drafts what followed the last token the last time it occurred, over all texts that it has read, also of earlier
prompts. A drafter on the host needs no more than a row that reads a text and drafts behind it.
"""

import sys
from collections.abc import Sequence

from headstart.eval.decoding.draft_setting import chain
from headstart.eval.drafters.host import RowText, TextDrafter
from headstart.eval.measurement.measure import measure
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.suites.prompts import load_suite
from headstart.targets.target import Target


class FollowerRow(RowText):
    """The text of one row; `follower` is shared by all rows."""

    def __init__(self, follower: dict[int, int]):
        self.follower, self.last = follower, 0

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.follower[self.last] = self.last = token

    def draft(self, num_tokens: int) -> list[int]:
        drafted = [self.last]
        for _ in range(num_tokens):
            drafted.append(self.follower.get(drafted[-1], 0))
        return drafted[1:]


class Bigrams(TextDrafter):
    def __init__(self) -> None:
        self.follower: dict[int, int] = {}

    def new_rows(self, batch_size: int) -> list[RowText]:
        return [FollowerRow(self.follower) for _ in range(batch_size)]


def main(model: str, prompts: str) -> None:
    target = Target.load(model)
    suite = load_suite(prompts, target, max_new_tokens=64)
    config = MeasureConfig(setting=chain(3), max_new_tokens=64, num_repeats=1)
    result, _ = measure(target, Bigrams(), suite, config, name="bigrams")
    ends = result.speedup_ci95
    interval = "too few prompts for an interval" if None in ends else "[{:.2f}, {:.2f}]".format(*ends)
    print(f"{result.acceptance_length:.2f} tokens per forward; speedup {result.speedup:.2f} {interval}")
    lossless = result.lossless
    print(f"{lossless.identical} of {lossless.checked} texts equal the baseline's, token for token")


if __name__ == "__main__":
    main(*sys.argv[1:])
