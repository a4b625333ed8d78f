"""The record of what came of every kind, and docs/targets.md, which is rendered from it."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from headstart.heads.registry import HEADS
from kinds import GROUPS, KINDS

RECORD = Path(__file__).with_name("record.json")
PAGE = Path(__file__).parents[2] / "docs" / "targets.md"
COLUMNS = {
    "states": ["load", "heads", "states"],
    "packed": ["packed"],
    "plain": ["plain"],
    "chains": ["look ups", "chains", "eagle3 chains"],
    "trees": ["trees", "eagle3 trees"],
    "batches": ["batches", "batched trees"],
    "draft model": ["draft model"],
    "sparse-self": ["sparse self"],
}
NEVER = {"hydra": "no engine loads Hydra", "mtp": "engines load MTP modules only with targets of their own layout"}


INTRODUCTION = """# Targets

Which models Headstart trains on and decodes, tried on {count} kinds: tiny random models of the architectures in
transformers {transformers}, in fp32 on a CPU. {summary}. `make targets` tries them all and writes this page and its
record, `tests/targets/record.json`; `make test-slow` fails where a kind does not do what the record says.

- *states*: the model loads, `headstart heads` sizes every family on it, and features of all layers, post-norm states
  and logits are those of transformers' own forward.
- *packed*: rows of several texts (`data.layout=packed`) have the states that the texts have alone.
- *plain*, *chains*, *trees*, *batches*: decoded without drafts, with look-ups, with drafts that are right up to planted
  faults, and with a fresh EAGLE-3 head, in single rows and in batches of rows of 2 to 48 tokens, 48 being three windows:
  token for token the text of transformers' `generate`.
- *draft model*: the target as its own draft model; *sparse-self*: drafting over a part of its cache.
- *trains*: two steps of every family; *exports*: what trained, for vLLM, passes `headstart check`. Said once: {never}.

`yes`, or the number of the line below the table that says why not: *refused*, with the line that a user sees, or a fault
of ours, *wrong* or *crashed*; at *transformers*, that it fails itself.
""".replace("{never}", "; ".join(NEVER.values()))


@dataclass(frozen=True)
class Record:
    """Of one release of transformers."""

    transformers: str
    outcomes: dict[str, dict[str, str]]  # by kind and step, all that was not ok, as `walk.walked` gives it
    without_recipe: list[str]  # causal language models of that release that no kind is of

    @classmethod
    def read(cls) -> "Record":
        return cls(**json.loads(RECORD.read_text()))

    def write(self) -> None:
        """The record, and the page of it."""
        RECORD.write_text(json.dumps(asdict(self), indent=1) + "\n")
        PAGE.write_text(self.page())

    def page(self) -> str:
        parts = [INTRODUCTION.format(count=len(self.outcomes), transformers=self.transformers, summary=self.summary())]
        for group, kinds in GROUPS.items():
            parts.append(f"## {group}\n\n{self.table([name for name in kinds if name in self.outcomes])}")
        missing = ", ".join(f"`{name}`" for name in self.without_recipe)
        parts.append(f"## Without a recipe\n\nNot tried, of this release's causal language models: {missing}.\n")
        return "\n".join(parts)

    def summary(self) -> str:
        def count(is_so: Callable[[dict[str, str]], bool]) -> int:
            return sum(map(is_so, self.outcomes.values()))

        loaded = count(lambda found: not {"transformers", "load"} & found.keys())
        decoded = count(lambda found: not {"transformers", "load", "plain", "chains", "batches"} & found.keys())
        return f"{loaded} of them can be trained on, {decoded} also decoded in chains and batches"

    def table(self, names: list[str]) -> str:
        """Of the kinds of a group, with the lines that say why under it."""
        notes: list[str] = []
        rows = [self.row(name, self.outcomes[name], notes) for name in names]
        head = ["kind", "what sets it apart", *COLUMNS, "trains", "exports"]
        lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows]
        return "\n".join([*lines, ""] + [f"{i}. {note}" for i, note in enumerate(notes, 1)] + [""] * bool(notes))

    def row(self, name: str, found: dict[str, str], notes: list[str]) -> str:
        def no(step: str) -> str:
            """The outcome and the number of its note."""
            word, _, why = found[step].partition(": ")
            note = f"{word}: `{general(why, KINDS[name].model_type)}`"
            notes.extend([note] * (note not in notes))
            return f"no ({notes.index(note) + 1})"

        cells = [f"`{name}`", KINDS[name].why]
        if stop := next((step for step in ("transformers", "load") if step in found), ""):
            return f"| {' | '.join([*cells, no(stop), *[''] * (len(COLUMNS) + 1)])} |"
        for steps in COLUMNS.values():
            bad = [step for step in steps if step in found]
            cells.append(" ".join(dict.fromkeys(map(no, bad))) if bad else "yes")
        trained = [family for family in sorted(HEADS) if f"train {family}" not in found]
        for verb, asked in {"train": sorted(HEADS), "export": trained}.items():
            bad = [family for family in asked if f"{verb} {family}" in found]
            bad = [family for family in bad if verb == "train" or not is_general(family, found[f"export {family}"])]
            cells.append(", ".join(f"{family}: {no(f'{verb} {family}')}" for family in bad) or "yes")
        return f"| {' | '.join(cells)} |"


def is_general(family: str, line: str) -> bool:
    """Whether no kind of target would change it: the page says it once."""
    return family in NEVER and line.startswith("refused: ")


def general(line: str, model_type: str) -> str:
    """A line without the name of the kind, so that those of several kinds are one note."""
    line = re.sub(rf"\b{re.escape(model_type)}\b", "KIND", line) if len(model_type) > 3 else line
    return line.replace("`", "'").replace("|", "/")
