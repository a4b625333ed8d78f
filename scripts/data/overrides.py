"""The argument of all commands that read a YAML: dotted keys that override its values."""

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value ...", help="Dotted keys that win over the YAML.")
]
