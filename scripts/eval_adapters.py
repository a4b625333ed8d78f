"""What `headstart eval --adapter` names: the adapters under which the head is measured too, and their results."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..configs.errors import BadInput
from ..eval.measurement.result import Result
from ..eval.suites.prompts import distinct_names, file_names
from ..heads.target import Target
from ..heads.targets.served_adapter import ServedAdapter


def named_adapters(folders: Sequence[str]) -> dict[str, str]:
    """The folders by names that tell them apart. Raises BadInput, before a target is loaded, if one holds no adapter or
    is given twice."""
    adapters = [ServedAdapter.read(folder) for folder in folders]
    try:
        names = distinct_names([file_names(adapter.path) for adapter in adapters])
    except BadInput as error:
        raise BadInput(f"--adapter {error}") from error
    return dict(zip(names, folders, strict=True))


def with_adapter(results: Iterable[Result], target: Target) -> list[Result]:
    """The results, which say with which adapter the target was measured."""
    adapter = None if target.adapter is None else target.adapter.info
    return [replace(result, adapter=adapter) for result in results]
