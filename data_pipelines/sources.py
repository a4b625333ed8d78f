"""Where rows come from: local JSON Lines, JSON, Parquet and Arrow files, or data sets on the Hugging Face hub."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ..configs.errors import BadInput
from ..configs.loader import build
from .formats import LOCAL_FORMATS, is_known, one_line, read_file
from .mixture import UNTIL, interleave

BESIDE_DATA = ("dataset_info.json", "dataset_dict.json", "state.json")  # by datasets' save_to_disk
HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/[\w.-]+)(@(?P<config>[^:]+))?(:(?P<split>.+))?")


@dataclass(frozen=True)
class Row:
    """One row as its source gave it.

    origin: where it stood ("train.jsonl:17"), for error messages. source: the name of its source. epoch: how often the
    source had been read through before.
    """

    data: dict[str, Any]
    origin: str
    source: str = ""
    epoch: int = 0


@dataclass(kw_only=True, frozen=True)
class Source:
    """One source of rows, as a mapping in a config; a plain text there is its `source` alone.

    source: a file, a folder (its data files, by name, subfolders too), a pattern with `*`, or, where there is no such
    path and it reads like one, a hub name: `owner/name`, `owner/name:split`, `owner/name@config:split`. Formats:
    .jsonl, .jsonl.gz, .json (a list of objects, read whole), .parquet, .arrow (stream or file).
    name: what counts and rows call it; None: `source`. num_rows: only its first rows.
    weight: its share of a mixture; None: as many rows as it has, or 1 where another source has a weight.
    epochs: how often it is read; rows repeat only when this is above 1.
    columns: keys to rename, {its name: ours}, e.g. {question: prompt, answer: response}.
    config, split, streaming: of a hub data set; split is `train` where none is said. streaming: read over the network
    row by row, not downloaded first.
    """

    source: str
    name: str | None = None
    weight: float | None = None
    num_rows: int | None = None
    epochs: int = 1
    columns: dict[str, str] = field(default_factory=dict)
    config: str | None = None
    split: str | None = None
    streaming: bool = False

    def __post_init__(self) -> None:
        if not self.source:
            raise BadInput("no data source is given")
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise BadInput(f"weight {self.weight}: expected above 0")
        for key in ("num_rows", "epochs"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise BadInput(f"{key} should be at least 1, got {value}")

    @property
    def called(self) -> str:
        return self.name or self.source

    def files(self) -> list[Path]:
        """The local files that are read, in order; none for a hub data set. BadInput: there is no such file."""
        path = Path(self.source)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if _is_data(file.relative_to(path)) and file.is_file())
            if not files:
                raise BadInput(f"{path}: no data file in this folder; known formats are {LOCAL_FORMATS}")
            return files
        if path.exists():
            return [path]
        if "*" in self.source:
            found = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
            files = sorted(file for file in found if file.is_file())
            if not files:
                raise BadInput(f"{self.source}: no file matches")
            return files
        if not self._is_hub():
            raise BadInput(f"{self.source}: no such file")
        return []

    def rows(self, *, epoch: int = 0) -> Iterator[Row]:
        """Its rows, one in memory at a time. BadInput as `iter_rows`."""
        places = self._places()
        for data, origin in islice(places, self.num_rows):
            for theirs, ours in self.columns.items():
                if theirs not in data:
                    raise BadInput(f"{origin}: columns: no key {theirs!r}; there are {', '.join(data)}")
                data[ours] = data.pop(theirs)
            yield Row(data, origin, self.called, epoch)

    def all_rows(self) -> Iterator[Row]:
        """Its rows of every epoch."""
        for epoch in range(self.epochs):
            yield from self.rows(epoch=epoch)

    def _places(self) -> Iterator[tuple[dict[str, Any], str]]:
        files = self.files()
        for key in ("config", "split", "streaming") if files else ():
            if getattr(self, key):
                raise BadInput(f"{self.source}: {key} is for hub data sets; this is a local file")
        return (found for file in files for found in read_file(file)) if files else self._hub_rows()

    def _is_hub(self) -> bool:
        """Whether it reads as a hub name; a version such as `-2.5` in it is no file suffix."""
        found = HUB_NAME.fullmatch(self.source)
        return found is not None and re.search(r"\.[A-Za-z]\w*$", found["name"]) is None

    def _hub_rows(self) -> Iterator[tuple[dict[str, Any], str]]:
        found = HUB_NAME.fullmatch(self.source)
        assert found is not None
        for key in ("config", "split"):
            if found[key] and getattr(self, key):
                raise BadInput(f"{self.source}: {key} is given twice, {found[key]!r} and {getattr(self, key)!r}")
        config, split = found["config"] or self.config, found["split"] or self.split or "train"
        try:
            import datasets
        except ImportError as error:
            problem = "no such file, and a hub data set needs datasets: pip install datasets"
            raise BadInput(f"{self.source}: {problem}") from error
        index = 0
        try:
            for data in datasets.load_dataset(found["name"], config, split=split, streaming=self.streaming):
                yield dict(data), f"{self.source}[{index}]"
                index += 1
        except Exception as error:  # the hub, the network and the data set's own format each raise their own kind
            problem = f"the hub data set stops at row {index}" if index else "the hub data set does not load"
            raise BadInput(f"{self.source}: no such file, and {problem}: {one_line(error)}") from error
        if index == 0:
            raise BadInput(f"{self.source}: no row in split {split}")


def read_sources(spec: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]) -> list[Source]:
    """One source or several, as a config has them. BadInput: none at all, an unknown key (named from `sources`)."""
    specs = [spec] if isinstance(spec, (str, Mapping)) else spec
    if not specs:
        raise BadInput("no data source is given")
    sources = []
    for index, one in enumerate(specs):
        sources.append(Source(source=one) if isinstance(one, str) else build(Source, one, where=f"sources.{index}"))
    return sources


def iter_rows(
    spec: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    *,
    num_rows: int | None = None,
    seed: int = 0,
    until: str = "first",
) -> Iterator[Row]:
    """The rows of one source or of several, one in memory at a time; only the first `num_rows` when that is set.

    `spec` is what `Source` says, or a list of such. Without weights, sources follow each other; where a source has one,
    they are interleaved by `seed` in the proportions of their weights, up to the end of the first or of `all`.

    BadInput: no such file, another format, a line or item that is no object (with its place), a hub data set that
    cannot be loaded, no source at all. Raised when the reader gets there, and for the files' names at once.
    """
    sources = read_sources(spec)
    if until not in UNTIL:
        raise BadInput(f"until {until!r}: expected {' or '.join(UNTIL)}")
    for source in sources:
        source.files()
    if all(source.weight is None for source in sources):
        rows = (row for source in sources for row in source.all_rows())
    else:
        weights = [1.0 if source.weight is None else source.weight for source in sources]
        rows = interleave([source.all_rows() for source in sources], weights=weights, seed=seed, until=until)
    return islice(rows, num_rows)


def _is_data(path: Path) -> bool:
    """Whether a file of a folder holds rows; what is hidden, or lies beside data by other tools, does not."""
    beside = path.name in BESIDE_DATA or path.name.startswith("cache-") or any(part[0] in "._" for part in path.parts)
    return not beside and is_known(path)
