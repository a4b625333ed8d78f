"""What a way of states from a server to this process does; an answer names its way: `file` or `tcp`."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class Lost(Exception):
    """States that did not come, such as those of a server that was ended after its answer: they may be asked again."""


class Transport(Protocol):
    """A way of states to one asker."""

    def take(self, told: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of an answer, which the server then has no more. Args: told: what the answer says of them.

        Raises: BadInput if this way does not lead here, or the server could not give them; Lost if they do not come.
        """
        ...

    def clear(self) -> None:
        """Remove what this asker left when it was killed. No answer may be under way."""
        ...
