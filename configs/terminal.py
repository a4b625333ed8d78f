"""What commands print through: names and rows are shown as they are, and cannot act on the terminal."""

from typing import Any

from rich.console import Console
from rich.text import Text

from .errors import printable


class PlainConsole(Console):
    """rich's, where brackets in a text are no markup, and control characters are written out."""

    def __init__(self, **settings: Any):
        super().__init__(**{"markup": False, "emoji": False, **settings})

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable(text, kept="\n\t"), **settings)
