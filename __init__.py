"""Headstart trains draft heads for speculative decoding on a frozen target and measures what they really save.

The names below are the public interface of Python; docs/api.md describes them. Each is imported when it is first
asked for, so that `import headstart` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base.errors import BadInput
    from .engines.check import check_export
    from .engines.export import export_head
    from .engines.heads import load_head, start_head
    from .eval.decoding.loop import generate
    from .eval.measurement.measure import measure
    from .heads.families import build_head
    from .heads.stored.folder import save_head
    from .targets.target import Target
    from .train.inputs.config import load_run
    from .train.trainer import train_head

__version__ = "0.2.0"
__all__ = [
    "BadInput",
    "Target",
    "build_head",
    "check_export",
    "export_head",
    "generate",
    "load_head",
    "load_run",
    "measure",
    "save_head",
    "start_head",
    "train_head",
]

PLACES = {
    "BadInput": "base.errors",
    "Target": "targets.target",
    "build_head": "heads.families",
    "check_export": "engines.check",
    "export_head": "engines.export",
    "generate": "eval.decoding.loop",
    "load_head": "engines.heads",
    "load_run": "train.inputs.config",
    "measure": "eval.measurement.measure",
    "save_head": "heads.stored.folder",
    "start_head": "engines.heads",
    "train_head": "train.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"headstart has no {name}; its names: {', '.join(__all__)}")
    return getattr(import_module(f".{PLACES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
