"""TCP as the way of states from a server to this process: fetched from the server's memory, see `headstart_tcp`."""

import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ...configs.errors import BadInput, first_line
from .in_vllm.headstart_tcp import COULD_NOT, WAIT
from .transport import Lost


class Tcp:
    """What is kept for one asker. label: hex digits, with which a server begins its names."""

    def __init__(self, label: str, *, patience: float = 2 * WAIT):
        self.label, self.patience = label, patience
        self._address: str | None = None  # HOST:PORT of the server, once something came from there

    def take(self, told: Mapping[str, Any]) -> dict[str, Tensor]:
        """As `Transport.take`; `told` has HOST:PORT/NAME."""
        where: str = told["tcp"]
        try:
            with urllib.request.urlopen(f"http://{where}", timeout=self.patience) as response:
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
        """As `Transport.clear`."""
        if self._address is not None:
            request = urllib.request.Request(f"http://{self._address}/{self.label}", method="DELETE")
            with suppress(OSError, HTTPException), urllib.request.urlopen(request, timeout=self.patience):
                pass
