"""`headstart data inspect`: shows rows token by token as training sees them, and how many tokens each segment has."""

from collections import Counter
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...base.errors import BadInput, printable
from .overrides import Overrides

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ...data_pipelines.masks.retokenised import Place
    from ...data_pipelines.rows.samples import Sample

NUM_COUNTED = 1000  # rows that the statistics are of
NUM_PLACES = 5  # that are shown of a row whose text gives other ids
STYLES = {"prompt": "cyan", "think": "yellow", "answer": "green"}  # of supervised tokens
UNSUPERVISED = "bright_black"
BRACKETS = {"prompt": "‹›", "think": "⟦⟧", "answer": "«»"}


def inspect(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A run YAML: its target and data sections count.")],
    overrides: Overrides = None,
    row: Annotated[int | None, typer.Option(min=0, help="Show this row alone, counted from 0.")] = None,
    num_rows: Annotated[int, typer.Option(min=0, help="Show so many rows from the beginning.")] = 2,
    color: Annotated[
        bool | None, typer.Option("--color/--no-color", help="Colours, or brackets; default: as the terminal can.")
    ] = None,
) -> None:
    """Print rows as training sees them: supervised tokens in colour by segment, all else grey; then statistics.

    \b
    Example:
      headstart data inspect runs/eagle3.yaml target.path=MODEL data.train=chats.jsonl data.max_length=4096 --row 17

    The target's weights are not read. If a row has the ids that the target wrote, these are shown, and where tokenising
    the text would give others. Without colours, supervised runs stand in brackets: «answer», ⟦think⟧. The
    statistics are of the first 1000 rows.
    """
    from rich.text import Text

    from ...base.terminal import PlainConsole
    from ...data_pipelines.masks.chat import Refused, encode_or_refuse, encode_rows
    from ...data_pipelines.masks.retokenised import first_retokenised, share_retokenised
    from ...data_pipelines.rows.sources import iter_rows
    from ...targets.skeleton import load_skeleton
    from ...train.inputs.config import load_inputs

    inputs = load_inputs(config, overrides or ())
    skeleton = load_skeleton(inputs.target)
    data = replace(inputs.data, max_length=min(inputs.data.max_length, skeleton.num_positions))
    console = PlainConsole(force_terminal=color, no_color=color is False, soft_wrap=True, highlight=False)
    is_coloured = color is not False and console.is_terminal
    last = num_rows if row is None else row + 1
    rows = iter_rows(data.train, num_rows=min(last, data.num_rows or last))
    shown = [item for number, item in enumerate(rows) if row in (None, number)]
    if row is not None and not shown:
        raise BadInput(f"--row {row}: data.train has fewer rows")
    for item in shown:
        samples = encode_or_refuse(item, skeleton.tokenizer, data, skeleton.vocab_size)
        if isinstance(samples, Refused) or not samples:
            why = f"{samples.problem}; dropped" if isinstance(samples, Refused) else f"{item.origin}: dropped"
            console.print(Text(f"{printable(why)}\n", style="bold"))
            continue
        for number, sample in enumerate(samples, start=1):
            piece = f", piece {number} of {len(samples)}" if len(samples) > 1 else ""
            console.print(Text(f"{printable(item.origin)}{piece}: {describe_sample(sample)}", style="bold"))
            console.print(marked_text(sample, skeleton.tokenizer, is_coloured=is_coloured), end="\n\n")
        places = first_retokenised(item, skeleton.tokenizer, data, vocab_size=skeleton.vocab_size)
        if places is not None:
            console.print(Text(f"{said_of(places, skeleton.tokenizer)}\n"))
    counts: Counter[str] = Counter()
    counted = list(iter_rows(data.train, num_rows=min(NUM_COUNTED, data.num_rows or NUM_COUNTED)))
    samples = list(encode_rows(counted, skeleton.tokenizer, data, counts=counts, vocab_size=skeleton.vocab_size))
    print_statistics(samples, counts, console)
    sources = Counter(sample.source for sample in samples)
    console.print(f"ids are from: {', '.join(f'{source} ({number} samples)' for source, number in sources.items())}")
    console.print(share_retokenised(counted, skeleton.tokenizer, data, vocab_size=skeleton.vocab_size))


def said_of(places: "list[Place]", tokenizer: Any) -> str:
    """Where tokenising a row's text gives other ids than the target wrote: the tokens of the first such places."""

    def tokens(ids: list[int]) -> str:
        return "+".join(repr(printable(str(tokenizer.decode([token])))) for token in ids) or "nothing"

    if not places:
        return "these are the ids that the target wrote; tokenising the text again gives the same"
    shown = "; ".join(f"{tokens(wrote)}, not {tokens(text)}" for wrote, text in places[:NUM_PLACES])
    more = f"; {len(places) - NUM_PLACES} more" if len(places) > NUM_PLACES else ""
    return f"these are the ids that the target wrote; tokenising the text again gives others: {shown}{more}"


def describe_sample(sample: "Sample") -> str:
    """How many tokens a sample has, and how many of each segment are supervised."""
    from ...data_pipelines.rows.samples import SEGMENTS

    supervised = sample.segments[sample.loss_mask]
    parts = [f"{name} {(supervised == i).sum()}" for i, name in enumerate(SEGMENTS) if (supervised == i).any()]
    cut = f", {sample.num_cut} tokens of the row left out" if sample.num_cut else ""
    return f"{len(sample)} tokens{cut}, {len(supervised)} supervised ({', '.join(parts)})"


def marked_text(sample: "Sample", tokenizer: Any, *, is_coloured: bool) -> "Text":
    """The sample's text, its supervised runs in the colour, or the brackets, of their segment."""
    from rich.text import Text

    from ...data_pipelines.rows.samples import SEGMENTS

    text = Text()
    tokens = zip(sample.input_ids.tolist(), sample.segments.tolist(), sample.loss_mask.tolist(), strict=True)
    for (segment, is_supervised), run in groupby(tokens, key=lambda token: token[1:]):
        part, name = str(tokenizer.decode([token for token, *_ in run])), SEGMENTS[segment]
        part = printable(part, shown="\n\t")
        if is_coloured:
            text.append(part, style=STYLES[name] if is_supervised else UNSUPERVISED)
        else:
            opens, closes = BRACKETS[name] if is_supervised else ("", "")
            text.append(f"{opens}{part}{closes}")
    return text


def print_statistics(samples: "list[Sample]", counts: dict[str, int], console: "Console") -> None:
    """A table of tokens by segment, and what became of the rows."""
    import numpy as np
    from rich.table import Table

    from ...data_pipelines.masks.traces import segment_lengths

    table = Table(title="tokens a sample, by segment")
    for column in ("segment", "samples", "tokens", "p50", "p90", "max"):
        table.add_column(column, justify="left" if column == "segment" else "right")
    for name, counted in segment_lengths(samples).items():
        figures = (len(counted), sum(counted), *np.percentile(counted, (50, 90)), max(counted))
        table.add_row(name, *(f"{figure:,.0f}" for figure in figures))
    console.print(table)
    console.print(
        f"of {counts['kept'] + counts['dropped']} rows: {', '.join(f'{n} {c}' for n, c in counts.items() if c)}"
    )
