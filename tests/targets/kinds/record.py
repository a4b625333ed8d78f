"""The record of what came of every kind, and docs/reference/targets.md, which is rendered from it."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from headstart.engines.families.assistant import KINDS as ASSISTED
from headstart.engines.heads import HEADS
from headstart.targets.weights.mtp_checkpoint import LAYOUTS
from kind import Kind
from kinds import GROUPS, without_recipe

RECORD = Path(__file__).with_name("record.json")
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "targets.md"
COLUMNS = {
    "states": ["load", "states"],
    "sizes": ["heads"],
    "plain": ["plain"],
    "chains": ["look ups", "chains", "eagle3 chains"],
    "trees": ["trees", "eagle3 trees"],
    "batches": ["batches", "batched trees"],
    "drafts for itself": ["draft model"],
}
STARTED = ("transformers", "load")  # the steps before any head is trained

INTRODUCTION = """# Which models work?

Which models Headstart trains on and decodes, tried on {count} kinds: tiny random models of the architectures in
transformers {transformers}, in fp32 on a CPU. {summary}.
`make targets` tries them all and writes this page and its record, `tests/targets/kinds/record.json`; `make test-slow`
fails where a kind does not do what the record says.

- *states*: features of all layers, post-norm states and logits are those of transformers' own forward; *sizes*:
  `headstart heads` says what each family costs on it.
- *plain*, *chains*, *trees*, *batches*: decoded without drafts, with look-ups, with drafts that are right up to planted
  faults, and with a fresh EAGLE-3 head, in single rows and in batches of rows of 2 to 48 tokens, 48 being three
  windows: token for token the text of transformers' `generate`.
- *drafts for itself*: the target as its own draft model.
- *trains*: two steps of every family; *exports*: what trained and vLLM loads passes `headstart check`. MTP modules and
  assistants are exported where engines load them with such a target, which is not said again.

`no` is followed by the numbers of the lines below the table that say why: *refused*, with the line that a user sees, or
a fault, *wrong* or *crashed*. MODEL, HEAD and KIND stand for the names of folders and of the model's type. Where it is
said of the first column alone, there is nothing more to try.
"""
WITHOUT_RECIPE = """A kind is one line in a table of `tests/targets/kinds/`; `make targets KINDS=NAME` tries it alone.
Not tried, of the causal language models and the models of images and text in this release: """


@dataclass(frozen=True)
class Record:
    """Of one release of transformers."""

    transformers: str
    outcomes: dict[str, dict[str, str]]  # by kind and step, all of `walk.walked` that is not `usual`

    @classmethod
    def read(cls) -> "Record":
        return cls(**json.loads(RECORD.read_text()))

    def write(self) -> None:
        """The record, and the page of it with what the installed transformers has beside."""
        RECORD.write_text(json.dumps(asdict(self), indent=1) + "\n")
        PAGE.write_text(f"{self.page()}{', '.join(f'`{name}`' for name in without_recipe())}.\n")

    def page(self) -> str:
        """All but the names of types without a recipe."""
        parts = [INTRODUCTION.format(count=len(self.outcomes), transformers=self.transformers, summary=self.summary())]
        for group, kinds in GROUPS.items():
            parts.append(f"## {group}\n\n{self.table(kinds)}")
        parts.append(f"## Without a recipe\n\n{WITHOUT_RECIPE}")
        return "\n".join(parts)

    def summary(self) -> str:
        def count(is_so: Callable[[dict[str, str]], bool]) -> int:
            return sum(map(is_so, self.outcomes.values()))

        loaded = count(lambda found: not {"transformers", "load"} & found.keys())
        decoded = count(lambda found: not {"transformers", "load", "plain", "chains", "batches"} & found.keys())
        return f"{loaded} of them can be trained on, {decoded} also decoded in chains and batches"

    def table(self, kinds: dict[str, Kind]) -> str:
        """Of the kinds of a group, with the lines that say why under it."""
        notes: list[str] = []
        rows = [self.row(name, kind, notes) for name, kind in kinds.items() if name in self.outcomes]
        head = ["kind", "what sets it apart", *COLUMNS, "trains", "exports"]
        lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows]
        return "\n".join([*lines, ""] + [f"{i}. {note}" for i, note in enumerate(notes, 1)] + [""] * bool(notes))

    def row(self, name: str, kind: Kind, notes: list[str]) -> str:
        """A kind's line; what says why is added to the notes."""
        found = self.outcomes[name]

        def no(step: str) -> str:
            word, _, why = found[step].replace("`", "'").partition(": ")
            names = [one.model_type or name for one in (kind, kind.text) if one is not None]
            why = re.sub(rf"\b({'|'.join(names)})\b", "KIND", why.replace(f"{step.split()[-1]}/final", "HEAD"))
            note = f"{word}: `{why}`"
            notes.extend([note] * (note not in notes))
            return f"no ({notes.index(note) + 1})"

        cells = [f"`{name}`", kind.why]
        if stop := next((step for step in ("transformers", "load") if step in found), ""):
            return f"| {' | '.join([*cells, no(stop), *[''] * (len(COLUMNS) + 1)])} |"
        for steps in COLUMNS.values():
            bad = {step: no(step) for step in steps if step in found}
            is_one = len(bad) == len(steps) and len({*bad.values()}) == 1
            told = [*{*bad.values()}] if is_one else [f"{step}: {why}" for step, why in bad.items()]
            cells.append(", ".join(told) or "yes")
        for verb in ("train", "export"):
            bad = [step for step in found if step.startswith(verb)]
            cells.append(", ".join(f"{step.split()[1]}: {no(step)}" for step in bad) or "yes")
        if all(f"train {family}" in found for family in HEADS):
            cells[-1] = ""  # there was nothing to export
        return f"| {' | '.join(cells)} |"


def usual(kind: Kind, found: dict[str, str]) -> dict[str, str]:
    """What the introduction says, as it is so for nearly all kinds: no engine loads MTP modules or an assistant with
    such a target.

    Args: found: of a kind that cannot be trained so there is nothing to export."""
    model_type, said = (kind.text or kind).model_type, dict[str, str]()
    if not (any(model_type in layout.kinds for layout in LAYOUTS.values()) or {*STARTED, "train mtp"} & found.keys()):
        loaded = ", ".join(LAYOUTS["deepseek_v3"].kinds)
        what = f"no engine loads MTP modules of layout deepseek_v3 with a {model_type} target, only with {loaded}"
        said["export mtp"] = f"refused: target MODEL: {what}; train eagle3 for this one"
    if model_type not in ASSISTED and not {*STARTED, "train assistant"} & found.keys():
        what = f"engines have assistants of Gemma 4 alone, and the target is a {model_type}"
        said["export assistant"] = f"refused: head assistant/final: {what}"
    return said
