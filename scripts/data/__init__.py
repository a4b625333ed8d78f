"""The verbs of `headstart data`, one file each; `data_command` puts them together."""

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value ...", help="Dotted keys that win over the YAML.")
]
