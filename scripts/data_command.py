"""`headstart data ...`: from conversations to what training reads, one verb per file."""

import typer

from .data_extract import extract
from .data_inspect import inspect
from .data_plan import plan
from .data_prepare import prepare
from .data_regenerate import regenerate
from .data_vocab import vocab

data = typer.Typer(
    help="Prepare training data: prepare and regenerate rows, inspect what training sees of them, cache features.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for verb in (prepare, regenerate, inspect, vocab, plan, extract):
    data.command(context_settings={"allow_interspersed_args": True})(verb)
