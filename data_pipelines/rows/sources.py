"""Sources of rows: local JSON Lines, JSON, Parquet and Arrow files, and data sets on the Hugging Face hub."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from os.path import expanduser
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.files import LocalPath
from ...configs.loader import build
from .config import check_at_least_one
from .formats import LOCAL_FORMATS, is_known_format, one_line, read_file, without_absent
from .mixture import interleave

Spec = str | Mapping[str, Any]  # a source in a config
BESIDE_DATA = ("dataset_info.json", "dataset_dict.json", "state.json")  # metadata files of datasets' save_to_disk
HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/[\w.-]+)(@(?P<config>[^:]+))?(:(?P<split>.+))?")


@dataclass(frozen=True)
class Row:
    """A row of a source."""

    data: dict[str, Any]
    origin: str  # where it was read, such as `train.jsonl:17`, for error messages
    source: str = ""  # `Source.called`


@dataclass(kw_only=True, frozen=True)
class Source:
    """A source of rows: a mapping in a config, or a plain text, which is its `source`.

    source: a file, a folder (all data files in it and its subfolders, sorted by name), a pattern with `*`, or, if there
    is no such path, a hub name: `owner/name`, `owner/name:split` (else `train`), `owner/name@config:split`. Formats:
    .jsonl, .jsonl.gz, .json (a list of objects, read as a whole), .parquet, .arrow (stream or file).
    """

    source: LocalPath
    name: str | None = None  # name in counts and in prepared rows; None: `source`
    # relative share in a mixture; None: 1 if another source has a weight; if none has one, sources are not mixed
    weight: float | None = None
    num_rows: int | None = None  # only its first rows; None: all
    columns: dict[str, str] = field(default_factory=dict)  # keys to rename, e.g. {question: prompt, answer: response}
    streaming: bool = False  # read a hub data set row by row over the network, instead of downloading it first

    def __post_init__(self) -> None:
        if not self.source:
            raise BadInput("no data source is given")
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise BadInput(f"weight {self.weight}: expected above 0")
        check_at_least_one(num_rows=self.num_rows)
        for ours in self.columns.values():
            if list(self.columns.values()).count(ours) > 1:
                raise BadInput(f"columns: two keys are renamed to {ours!r}")

    @property
    def called(self) -> str:
        return self.name or self.source

    def files(self) -> list[Path]:
        """The local files to read, in order; none for a hub data set. Raises BadInput if there is no such file."""
        path = Path(self.source)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if _is_data(file.relative_to(path)) and file.is_file())
            problem = f"{path}: no data file in this folder; known formats are {LOCAL_FORMATS}"
        elif path.exists():
            return [path]
        elif "*" in self.source:
            matches = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
            files = sorted(file for file in matches if file.is_file())
            problem = f"{self.source}: no file matches"
        else:
            files, problem = [], "" if self._is_hub() else f"{self.source}: no such file"
        if problem and not files:
            raise BadInput(problem)
        return files

    def rows(self) -> Iterator[Row]:
        """Yield its rows, one in memory at a time. Raises BadInput as `iter_rows`."""
        for data, origin in islice(self._located_rows(), self.num_rows):
            for theirs in self.columns:
                if theirs not in data:
                    raise BadInput(f"{origin}: columns: no key {theirs!r}; its keys are {', '.join(data)}")
            others = {key: value for key, value in data.items() if key not in self.columns}
            data = others | {ours: data[theirs] for theirs, ours in self.columns.items()}  # two keys may be swapped
            yield Row(data, origin, self.called)

    def _located_rows(self) -> Iterator[tuple[dict[str, Any], str]]:
        files = self.files()
        if files and self.streaming:
            raise BadInput(f"{self.source}: streaming is for hub data sets; this is a local file")
        return (located for file in files for located in read_file(file)) if files else self._hub_rows()

    def _is_hub(self) -> bool:
        """Whether the source has the form of a hub name; a version such as `-2.5` is not taken for a file suffix."""
        match = HUB_NAME.fullmatch(self.source)
        return match is not None and re.search(r"\.[A-Za-z]\w*$", match["name"]) is None

    def _hub_rows(self) -> Iterator[tuple[dict[str, Any], str]]:
        match = HUB_NAME.fullmatch(self.source)
        assert match is not None
        split = match["split"] or "train"
        try:
            import datasets
        except ImportError as error:
            problem = "no such file, and a hub data set needs datasets: pip install datasets"
            raise BadInput(f"{self.source}: {problem}") from error
        index = 0
        try:
            for data in datasets.load_dataset(match["name"], match["config"], split=split, streaming=self.streaming):
                yield without_absent(dict(data)), f"{self.source}[{index}]"
                index += 1
        except Exception as error:  # the hub, the network and data formats raise exceptions of many kinds
            problem = f"the hub data set fails at row {index}" if index else "the hub data set cannot be loaded"
            raise BadInput(f"{self.source}: no such file, and {problem}: {one_line(error)}") from error
        if index == 0:
            raise BadInput(f"{self.source}: no row in split {split}")


def read_sources(spec: Spec | Sequence[Spec]) -> list[Source]:
    """The sources of a config, which has one or a list. Raises BadInput if there is none, or a key is unknown."""
    specs = [spec] if isinstance(spec, (str, Mapping)) else spec
    if not specs:
        raise BadInput("no data source is given")
    return [
        Source(source=expanduser(item)) if isinstance(item, str) else build(Source, item, where=f"sources.{index}")
        for index, item in enumerate(specs)
    ]


def iter_rows(spec: Spec | Sequence[Spec], *, num_rows: int | None = None, seed: int = 0) -> Iterator[Row]:
    """The rows of one or several sources, one in memory at a time.

    Without weights, sources are read one after another. If a source has a weight, they are mixed by `interleave`.

    Args:
        spec: one source or a list of sources, as in a config.
        num_rows: only the first rows; None: all.
        seed: of the mixture.
    Raises: BadInput at once if there is no source or no such file, and while reading if the format is unknown, a row is
        not an object (naming its origin), or a hub data set cannot be loaded.
    """
    sources = read_sources(spec)
    for source in sources:
        source.files()
    if all(source.weight is None for source in sources):
        rows = (row for source in sources for row in source.rows())
    else:
        weights = [1.0 if source.weight is None else source.weight for source in sources]
        rows = interleave([source.rows() for source in sources], weights=weights, seed=seed)
    return islice(rows, num_rows)


def _is_data(path: Path) -> bool:
    """Whether a file in a folder has rows: not hidden files, nor metadata and caches of the `datasets` library."""
    beside = path.name in BESIDE_DATA or path.name.startswith("cache-") or any(part[0] in "._" for part in path.parts)
    return not beside and is_known_format(path)
