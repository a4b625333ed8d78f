"""Files as the way of states from a server to this process: on a disk, or in shared memory, that both see.

A server writes a file per answer, whole or not at all, and the one who asked removes it.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...configs.errors import BadInput
from .transport import Lost

FAILED = ".failed"  # suffix of what a server writes in place of a file that it could not
PATIENCE = 60.0  # seconds until a file is there; the server answers when it begins to write
SHORTEST, LONGEST = 0.001, 0.05  # seconds between two looks


class Files:
    """The files of one asker. label: hex digits, with which a server begins their names."""

    def __init__(self, label: str, *, patience: float = PATIENCE):
        self.label, self.patience = label, patience
        self._folder: Path | None = None  # the server's

    def take(self, told: Mapping[str, Any]) -> dict[str, Tensor]:
        """As `Transport.take`; `told` has the file's path, which this process must see."""
        path, until, pause = Path(told["file"]), time.monotonic() + self.patience, SHORTEST
        self._folder = path.parent
        while not path.exists():
            failed = path.with_suffix(FAILED)
            if failed.exists():
                why = failed.read_text()
                failed.unlink(missing_ok=True)
                raise BadInput(f"{path}: the server could not write it: {why}")
            if not path.parent.is_dir():
                raise BadInput(f"{path.parent}: not seen here: the server's folder of states must be on a shared disk")
            if time.monotonic() > until:
                raise Lost(f"{path}: not there {self.patience:g} s after the answer")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise BadInput(f"{path}: cannot be read: {error}") from error
        finally:
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """As `Transport.clear`."""
        for path in self._folder.glob(f"*{self.label}-*") if self._folder else ():
            path.unlink(missing_ok=True)
