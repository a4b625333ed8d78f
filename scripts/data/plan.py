"""`headstart data plan`: run the target in every epoch, or extract its states once? Measured on a sample of rows."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..overrides import Overrides

if TYPE_CHECKING:
    from ...data_pipelines.plan import Comparison


def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A run YAML: its target, head and data count.")],
    overrides: Overrides = None,
    disk: Annotated[Path, typer.Option(help="A folder on the disk that features would lie on.")] = Path("."),
    num_sampled: Annotated[int, typer.Option(help="Rows that are measured, at most.")] = 64,
    seconds: Annotated[float, typer.Option(help="For measuring, about; fewer rows where need be.")] = 60.0,
    num_processes: Annotated[int, typer.Option(help="Processes that would share the work.")] = 1,
    batch_tokens: Annotated[int, typer.Option(help="Of one target forward, with padding.")] = 8192,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of a table.")] = False,
) -> None:
    """Compare running the target in every epoch with extracting its states once.

    \b
    Example:
      headstart data plan runs/eagle3.yaml target.path=MODEL data.train=chats.jsonl --disk /data

    All rows are counted, a sample is measured: bytes per token in each storage dtype, the hours of extraction, the
    seconds of target forwards that each epoch saves, and the epochs from which extracting costs less time.
    """
    import json
    from collections import Counter
    from dataclasses import asdict, replace

    from ...configs.errors import BadInput
    from ...data_pipelines.masks.chat import encode_rows
    from ...data_pipelines.plan import compare, measure_rates, survey_samples, within
    from ...data_pipelines.sources import iter_rows
    from ...data_pipelines.storage.extract import ExtractConfig, disk_free
    from ...data_pipelines.storage.quantise import STORAGE
    from ...heads.loading import default_device
    from ...heads.target import Target
    from ...train.config import load_inputs
    from .extract import reads_of

    for name, value in (("--num-sampled", num_sampled), ("--num-processes", num_processes), ("--seconds", seconds)):
        if value < 1:
            raise BadInput(f"{name} {value}: expected at least 1")
    run = load_inputs(config, overrides or ())
    if not disk.is_dir():
        raise BadInput(f"--disk {disk}: no such folder")
    target = Target.load(**vars(run.target), device=device or default_device())
    reads = reads_of(run, target)
    data = replace(run.data, max_length=min(run.data.max_length, target.max_positions))
    counts: Counter[str] = Counter()
    rows = encode_rows(iter_rows(data.train, num_rows=data.num_rows), target.tokenizer, data, counts=counts)
    survey = survey_samples(rows, reads, hidden_size=target.hidden_size, num_drawn=num_sampled)
    if not survey.num_rows:
        raise BadInput(f"data.train: no row has supervised tokens within data.max_length {data.max_length}")
    survey.drawn = within(survey.drawn, target, seconds=seconds / len(STORAGE))
    rates = {}
    for name in STORAGE:
        settings = ExtractConfig(storage_dtype=name, batch_tokens=batch_tokens)
        rates[name] = measure_rates(survey.drawn, target, reads, config=settings, folder=disk)
    comparison = compare(survey, rates, free_bytes=disk_free(disk), num_processes=num_processes)
    if as_json:
        settings = {"target": target.name, "head": run.head.type, **asdict(reads)}
        print(json.dumps({**settings, **asdict(comparison)}, indent=2))
    else:
        show(comparison, title=f"{run.head.type} on {target.name}")


def show(comparison: "Comparison", *, title: str) -> None:
    """The comparison as a table."""
    from rich.console import Console
    from rich.table import Table

    from ...data_pipelines.plan import in_hours
    from ...data_pipelines.storage.extract import in_bytes

    table = Table(title=f"{title}: {comparison.num_tokens:,} tokens in {comparison.num_rows:,} rows")
    table.add_column("stored as")
    for name in ("bytes per token", "size", "extraction", "saved per epoch", "pays off after"):
        table.add_column(name, justify="right")
    for row in comparison.extracted:
        table.add_row(
            row.storage_dtype,
            f"{row.bytes_per_token:.1f}",
            in_bytes(row.bytes) + ("" if row.fits else " (too large)"),
            in_hours(row.extraction_hours),
            f"{row.seconds_saved_per_epoch:.1f} s",
            "never" if row.pays_off_after_epochs is None else f"{row.pays_off_after_epochs} epochs",
        )
    console, online = Console(), comparison.online
    console.print(table)
    per_epoch = in_hours(online.seconds_per_epoch / 3600)
    console.print(f"online: {per_epoch} of target forwards in each epoch ({online.tokens_per_second:,.0f} tokens/s)")
    console.print(f"{in_bytes(comparison.free_bytes)} of the disk are free")
    console.print(f"measured on {comparison.num_measured} rows; passes differ by {comparison.spread:.0%} at most")
