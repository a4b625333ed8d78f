"""Options of several commands: what runs the target, `EngineSetting`, as the section `engine` of configs; a window; and
how large numbers may be."""

from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ...base.errors import BadInput

if TYPE_CHECKING:
    from ...engines.servers.setting import EngineSetting

ENGINE = partial(Option, rich_help_panel="Engine")  # in this panel of the help

EngineName = Annotated[str, ENGINE(help="What runs the target: headstart, this process; else a server, such as vllm.")]
EnginePython = Annotated[str, ENGINE(help="A Python with that engine; default: this one.")]
WINDOW_HELP = "N or N:SINK: heads trained without a window read the last N positions, and the first SINK."
DraftWindowText = Annotated[str, Option(help=WINDOW_HELP)]
MOST_ROWS = 4096  # at a time, in our engine or in flight in a server
MOST_NEW = 2**20  # tokens of an answer, more than any context has
LARGEST_SEED = 2**63 - 1  # that torch takes
EngineArgs = Annotated[str, ENGINE(help="More flags for the server, e.g. '--max-model-len 4096'.")]


def check_numbers(**options: float | None) -> None:
    """Raises BadInput on an option that is no number, which no bound of typer's keeps out."""
    for name, value in options.items():
        if value is not None and isnan(value):
            raise BadInput(f"--{name.replace('_', '-')} {value}: expected a number")


def engine_of(name: str, python: str, args: str, server: str = "", *, known: tuple[str, ...]) -> "EngineSetting":
    """The options as one setting. Args: known: names that the command takes. Raises: BadInput."""
    from ...engines.servers.setting import EngineSetting

    try:
        return EngineSetting(name=name, python=python, args=args, server=server).check_name(*known)
    except BadInput as error:
        raise BadInput(f"--engine: {error}") from error
