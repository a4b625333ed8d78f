"""Command-line options that the unattended runs share."""

from functools import partial
from typing import Annotated

import typer

RUN, MACHINE = (partial(typer.Option, rich_help_panel=panel) for panel in ("Run", "Machine"))

Seed = Annotated[int, RUN(help="Seed of the split into held-out and training rows, and of training.", min=0)]
Dtype = Annotated[
    str,
    MACHINE(help="Of the target: float32, bfloat16, float16 or auto; default: as for `headstart eval`."),
]
Device = Annotated[str, MACHINE(help="cpu, cuda, cuda:1 ...; default: cuda if available, else cpu.")]
Launcher = Annotated[
    str, MACHINE(help="Command that starts training on several devices: 'accelerate launch --config_file FILE'.")
]
