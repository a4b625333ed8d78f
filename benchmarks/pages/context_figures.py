"""The table of docs/data.md on long contexts, from docs/results/contexts.json.

    python -m headstart.benchmarks.pages.context_figures

A test finds it stale where the results have changed since.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...base.files import write_text
from ...configs.loader import build
from ...eval.figures.metrics import relative_and_interval
from .readme_figures import with_figures

RESULTS, PAGE = Path("docs/results/contexts.json"), Path("docs/data.md")


@dataclass(frozen=True, kw_only=True)
class ContextFigure:
    """What a head's drafts were accepted for on the same questions behind longer and longer chats, decoded."""

    target: str
    domain: str
    head: str
    training_rows: str  # their lengths in tokens
    num_draft_tokens: int
    max_new_tokens: int
    context: int  # tokens that the prompts have at most
    mean_prompt: int  # tokens that they have
    rounds: list[int]  # by prompt
    committed: list[int]  # tokens of these rounds, by prompt
    texts_equal: bool  # to those of the run's first head

    @property
    def acceptance_length(self) -> float:
        return sum(self.committed) / sum(self.rounds)


def main() -> None:
    write_text(PAGE, with_figures(PAGE.read_text(), table(read_figures(RESULTS)), name="contexts"))


def read_figures(path: Path) -> list[ContextFigure]:
    return [build(ContextFigure, entry, where=str(path)) for entry in json.loads(path.read_text())]


def table(figures: Sequence[ContextFigure]) -> str:
    """Markdown: a row per head, a column per context, and the length in the longest over that in the shortest."""
    contexts = sorted({figure.context for figure in figures})
    names = " | ".join(f"{context:,}" for context in contexts)
    lines = [
        f"| target | head | training rows | {names} | {contexts[-1]:,} over {contexts[0]:,} |",
        "|---" * (len(contexts) + 4) + "|",
    ]
    for key in dict.fromkeys((figure.target, figure.head, figure.training_rows) for figure in figures):
        own = {f.context: f for f in figures if (f.target, f.head, f.training_rows) == key}
        lengths = " | ".join(f"{own[context].acceptance_length:.2f}" for context in contexts)
        lines.append(f"| {' | '.join(key)} | {lengths} | {relative(own[contexts[-1]], own[contexts[0]])} |")
    return "\n".join([*lines, ""])


def relative(long: ContextFigure, short: ContextFigure) -> str:
    """The acceptance length in one context over that in another, with its 95 % interval over prompts."""
    ratio, ends = relative_and_interval((long.committed, long.rounds), (short.committed, short.rounds))
    assert ends[0] is not None and ends[1] is not None
    return f"{ratio:.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"


if __name__ == "__main__":
    main()
