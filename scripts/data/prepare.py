"""`headstart data prepare`: conversations from several sources as one clean data set, as a command."""

from typing import TYPE_CHECKING, Annotated

import typer

from .overrides import Overrides

if TYPE_CHECKING:
    from rich.console import Console

    from ...data_pipelines.dataset_card import Card


def prepare(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="E.g. configs/data/prepare.yaml.")],
    overrides: Overrides = None,
) -> None:
    """Mix, filter, deduplicate and split rows; prints what was kept and dropped, and why.

    \b
    Example:
      headstart data prepare data/prepare.yaml 'sources=[chats.jsonl,owner/name:train]' output=data/mine \\
          exclude=prompts.jsonl filters.max_characters=20000 validation_share=0.02

    The new folder data/mine gets train.jsonl, validation.jsonl and card.json. The same command again does nothing.
    Rows may be chats (OpenAI or ShareGPT), instructions, prompts with responses, prompts alone, or text, in .jsonl,
    .jsonl.gz, .json, .parquet, .arrow, folders of those, or on the hub.
    """
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from ...base.terminal import PlainConsole
    from ...configs.loader import build, read_config
    from ...data_pipelines.prepare import PrepareConfig, prepared_before
    from ...data_pipelines.prepare import prepare as prepare_rows

    settings = build(PrepareConfig, read_config(config, overrides or ()))
    console = PlainConsole()
    card = prepared_before(settings)
    if card is not None:
        console.print(f"nothing to do: {settings.output} was prepared by this config")
    else:
        columns = TextColumn("{task.completed:,.0f} rows"), TimeElapsedColumn()
        stderr = PlainConsole(stderr=True)
        with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
            task = progress.add_task("prepare", total=None)
            card = prepare_rows(settings, on_rows=lambda count: progress.update(task, completed=count))
    show(card, console)
    console.print(f"written to {settings.output}")


def show(card: "Card", console: "Console") -> None:
    """What became of the rows of each source, and what the splits hold."""
    from rich.table import Table

    table = Table("source", "read", "kept", "dropped")
    for name, rows in [*card.sources.items(), *([("all", card)] if len(card.sources) > 1 else [])]:
        reasons = sorted(rows.dropped.items(), key=lambda item: -item[1])
        dropped = "\n".join(f"{count:,} {reason}" for reason, count in reasons)
        table.add_row(name, f"{rows.read:,}", f"{rows.kept:,}", dropped, end_section=True)
    console.print(table)
    for split, counts in card.splits.items():
        console.print(f"{split}: {counts['rows']:,} rows", highlight=False)
