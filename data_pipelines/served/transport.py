"""The ways of states from a server to this process: files on a disk or in shared memory that both see, or TCP.

An answer names its way, `file` or `tcp`. A server writes a file per answer, whole or not at all, and the one who asked
removes it; over TCP states are fetched from the server's memory, see `in_vllm/headstart_tcp.py`.
"""

import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from ...configs.errors import BadInput, first_line
from .in_vllm.headstart_tcp import COULD_NOT, WAIT

FAILED = ".failed"  # suffix of what a server writes in place of a file that it could not
FILE_SECONDS = 60.0  # until a file is there; the server answers when it begins to write
SHORTEST, LONGEST = 0.001, 0.05  # seconds between two looks


class Lost(Exception):
    """States that did not come, such as those of a server that was ended after its answer: they may be asked again."""


class Files:
    """The files of one asker. label: hex digits, with which a server begins their names."""

    def __init__(self, label: str):
        self.label, self.patience = label, FILE_SECONDS
        self._folder: Path | None = None  # the server's

    def take(self, told: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of an answer, which the server then has no more. Args: told: has the file's path.

        Raises: BadInput if this process does not see the file, or the server could not write it; Lost if none comes.
        """
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
        """Remove what this asker left when it was killed. No answer may be under way."""
        for path in self._folder.glob(f"*{self.label}-*") if self._folder else ():
            path.unlink(missing_ok=True)


class Tcp:
    """What a server keeps for one asker. label: hex digits, with which it begins the names."""

    def __init__(self, label: str):
        self.label = label
        self._address: str | None = None  # HOST:PORT of the server, once something came from there

    def take(self, told: Mapping[str, Any]) -> dict[str, Tensor]:
        """As `Files.take`; `told` has HOST:PORT/NAME."""
        where: str = told["tcp"]
        try:
            with urllib.request.urlopen(f"http://{where}", timeout=2 * WAIT) as response:
                tensors = load(response.read())
        except urllib.error.HTTPError as error:
            problem = error.read().decode(errors="replace")
            if error.code == COULD_NOT:
                raise BadInput(f"{where}: the server could not give it: {problem}") from error
            raise Lost(f"{where}: {error.code} {problem}") from error
        except (OSError, HTTPException, SafetensorError) as error:  # no connection, or one that broke
            if self._address is None:
                raise BadInput(f"{where}: not reached from here: {first_line(error)}") from error
            raise Lost(f"{where}: {first_line(error)}") from error
        self._address = where.partition("/")[0]
        return tensors

    def clear(self) -> None:
        """As `Files.clear`."""
        if self._address is not None:
            request = urllib.request.Request(f"http://{self._address}/{self.label}", method="DELETE")
            with suppress(OSError, HTTPException), urllib.request.urlopen(request, timeout=2 * WAIT):
                pass
