"""The `headstart` command: prepare data, train a head, measure what it saves, export it."""

import os
import re
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..base.ending import ending_in_time
from ..base.errors import BadInput, writing_into
from .compare import compare
from .data.data_command import data
from .data.overrides import Overrides
from .doctor import doctor
from .evaluating.evaluate import PanelledCommand, evaluate
from .export_command import check, export
from .heads_command import heads
from .plan_command import plan
from .push_command import push
from .unattended_commands import auto, refit

# in the order of the help
COMMANDS = "auto refit heads data train eval compare plan export check push doctor".split()


class InOrder(TyperGroup):
    """Lists the commands in the order in which a project uses them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if name in self.commands]


app = typer.Typer(
    cls=InOrder,
    name="headstart",
    help=(
        "Train draft heads for speculative decoding on a frozen target, measure what they save, and export them.\n\n"
        "A first run, on a real model:  make quickstart\n\n"
        "All of it in one run, within a time:\n\n\b\n"
        "  headstart auto --target MODEL --prompts PROMPTS.jsonl --budget 30m --output runs/auto\n\n"
        "On your own target and data (headstart doctor checks the machine):\n\n\b\n"
        "  headstart train runs/eagle3.yaml target.path=MODEL data.train=CHATS.jsonl train.output_dir=runs/mine\n"
        "  headstart eval --target MODEL --head runs/mine/final --prompts PROMPTS.jsonl --output runs/mine/eval"
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command(context_settings={"allow_interspersed_args": True})
def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A run YAML, e.g. configs/runs/eagle3.yaml.")],
    overrides: Overrides = None,
) -> None:
    """Train a head on a frozen target.

    \b
    Example:
      headstart train runs/eagle3.yaml target.path=MODEL data.train=chats.jsonl train.output_dir=runs/a

    The run folder gets config.yaml (repeats the run), metrics.jsonl, checkpoints/ and final/, the head. The same
    command continues an interrupted run from its last checkpoint. On several devices, the same run is
    `accelerate launch -m headstart.train CONFIG key=value ...`.
    """
    from ..train.inputs.config import load_run
    from ..train.trainer import train_head

    train_head(load_run(config, overrides or ()))


app.command(cls=PanelledCommand)(auto)
app.command(cls=PanelledCommand)(refit)
app.command(name="eval", cls=PanelledCommand)(evaluate)
for command in (plan, heads, compare, export, check, push, doctor):
    app.command()(command)
app.add_typer(data, name="data")


def show_version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Nothing to do before a command."""


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    home = os.path.expanduser("~")  # as a shell would; "~" of a user without one
    sys.argv[1:] = [re.sub(r"^([\w.:-]+[=:])?~/", rf"\g<1>{home}/", word) for word in sys.argv[1:]]
    try:
        with ending_in_time(), writing_into("output"):
            app()
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
