"""The console of all commands: texts are shown literally and cannot control the terminal."""

from typing import Any

from rich.console import Console
from rich.text import Text

from .errors import printable


class PlainConsole(Console):
    """rich's Console without markup, and with control characters escaped."""

    def __init__(self, **settings: Any):
        super().__init__(**{"markup": False, "emoji": False, **settings})

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable(text, shown="\n\t"), **settings)
