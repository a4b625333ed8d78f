"""`headstart data plan`: run the target in every epoch, or extract its states once? Measured on a sample of rows."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..overrides import Overrides

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ...data_pipelines.comparison import Comparison
    from ...data_pipelines.sources import Row
    from ...data_pipelines.storage.samples import Sample


def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A run YAML: its target, head and data count.")],
    overrides: Overrides = None,
    disk: Annotated[Path, typer.Option(help="A folder on the disk that features would lie on.")] = Path("."),
    num_sampled: Annotated[int, typer.Option(help="Rows that are measured, at most.")] = 64,
    seconds: Annotated[
        float, typer.Option(help="For all but loading the target, at most; fewer rows where need be.")
    ] = 60.0,
    num_processes: Annotated[int, typer.Option(help="Processes that would share the work.")] = 1,
    batch_tokens: Annotated[int, typer.Option(help="Of one target forward, with padding.")] = 8192,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of a table.")] = False,
) -> None:
    """Compare running the target in every epoch with extracting its states once.

    \b
    Example:
      headstart data plan runs/eagle3.yaml target.path=MODEL data.train=chats.jsonl --disk /data

    Rows are counted, a sample is measured: bytes per token in each storage dtype, the hours of extraction, the seconds
    of target forwards that each epoch saves, and the epochs from which extracting costs less time. --seconds is kept
    for any target and any number of rows; the last line says on how many rows and passes the figures stand.
    """
    import json
    import time
    from collections import Counter
    from contextlib import suppress
    from dataclasses import asdict, replace
    from itertools import islice

    from ...configs.errors import BadInput
    from ...data_pipelines.comparison import compare_storages
    from ...data_pipelines.masks.chat import encode_rows
    from ...data_pipelines.plan import SURVEY_SHARE, measure_storages, row_stride, samples_for_time, survey_samples
    from ...data_pipelines.sources import iter_rows
    from ...data_pipelines.storage.extract import ExtractConfig, disk_free
    from ...data_pipelines.storage.quantise import STORAGE
    from ...heads.decoders.cpu.products import pack_linears
    from ...heads.loading import default_device
    from ...heads.target import Target
    from ...heads.targets.dtype import with_default_dtype
    from ...train.config import load_inputs
    from ...train.target import reads_of

    for name, value in (("--num-sampled", num_sampled), ("--num-processes", num_processes), ("--seconds", seconds)):
        if value < 1:
            raise BadInput(f"{name} {value}: expected at least 1")
    run = load_inputs(config, overrides or ())
    if not disk.is_dir():
        raise BadInput(f"--disk {disk}: no such folder")
    started = time.perf_counter()
    device = device or default_device()
    target = Target.load(**vars(with_default_dtype(run.target, device)), device=device)
    pack_linears(target.base)
    loaded = time.perf_counter()
    reads = reads_of(run, target)
    data = replace(run.data, max_length=min(run.data.max_length, target.max_positions))

    def rows() -> "Iterator[Row]":
        return iter_rows(data.train, num_rows=data.num_rows)

    def encoded(rows: "Iterable[Row]") -> "Iterator[Sample]":
        return encode_rows(rows, target.tokenizer, data, counts=Counter(), vocab_size=target.vocab_size)

    def probe(rows: "Iterable[Row]") -> None:
        with suppress(BadInput):  # of a few rows, most may be refused; of all, that is raised below
            list(encoded(rows))

    stride = row_stride(rows(), probe, seconds=SURVEY_SHARE * seconds)
    counted = encoded(islice(rows(), 0, None, stride))
    survey = survey_samples(counted, reads, hidden_size=target.hidden_size, num_drawn=num_sampled).scaled(stride)
    if not survey.num_rows:
        raise BadInput(f"data.train: no row has supervised tokens within data.max_length {data.max_length}")

    def left() -> float:
        return loaded + seconds - time.perf_counter()

    survey.drawn = samples_for_time(survey.drawn, target, seconds=0.8 * left())
    configs = [ExtractConfig(storage_dtype=name, batch_tokens=batch_tokens) for name in STORAGE]
    measured = measure_storages(survey.drawn, target, reads, configs=configs, folder=disk, seconds=0.95 * left())
    rates = dict(zip(STORAGE, measured, strict=True))
    comparison = compare_storages(survey, rates, free_bytes=disk_free(disk), num_processes=num_processes)
    used = time.perf_counter() - loaded
    spent = {"seconds": seconds, "seconds_used": round(used, 2), "seconds_loading": round(loaded - started, 2)}
    if as_json:
        settings = {"target": target.name, "head": run.head.type, **asdict(reads)}
        print(json.dumps({**settings, **asdict(comparison), **spent}, indent=2))
    else:
        show(comparison, title=f"{run.head.type} on {target.name}")
        used, loading = spent["seconds_used"], spent["seconds_loading"]
        print(f"took {used:.0f} of {seconds:.0f} s, and {loading:.0f} s to load the target")


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
    if comparison.one_row_of > 1:
        console.print(f"of the rows, one in {comparison.one_row_of} was counted: all would not fit the time")
    size = f"{comparison.num_measured} rows, {comparison.num_measured_tokens:,} tokens"
    passes = "1 pass" if comparison.num_passes == 1 else f"{comparison.num_passes} passes"
    console.print(f"measured on {size}, in {passes}, which differ by {comparison.spread:.0%} at most")
