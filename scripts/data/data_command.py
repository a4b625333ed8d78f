"""`headstart data ...`: from conversations to training data, one verb per file."""

import typer

from .extract import extract
from .inspect import inspect
from .prepare import prepare
from .regenerate import regenerate
from .vocab import vocab

data = typer.Typer(
    help="Prepare training data: prepare and regenerate rows, inspect what training sees of them, cache features.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for verb in (prepare, regenerate, inspect, vocab, extract):
    data.command(context_settings={"allow_interspersed_args": True})(verb)
