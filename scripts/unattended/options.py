"""Options that the commands of unattended runs share."""

from functools import partial
from typing import Annotated

import typer

TIME, MACHINE = (partial(typer.Option, rich_help_panel=panel) for panel in ("Run", "Machine"))

Seed = Annotated[int, TIME(help="Of the split and of training.", min=0)]
Dtype = Annotated[str, MACHINE(help="As for `headstart eval`.")]
Device = Annotated[str, MACHINE(help="cpu, cuda ...; default: cuda where there is one.")]
Launcher = Annotated[
    str, MACHINE(help="What starts training on several devices: 'accelerate launch --config_file FILE'.")
]
