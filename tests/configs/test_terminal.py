"""What users' names and rows hold is shown, and does nothing to the terminal."""

import io

import pytest
from headstart.configs.errors import BadInput, printable
from headstart.configs.terminal import PlainConsole
from rich.table import Table

ACTING = "\x1b]0;title\x07 \x1b[2J \r \x9b31m \u202e \ud800"


def test_an_error_is_one_line_whatever_names_it_quotes():
    said = str(BadInput(f"rows\n{ACTING}.jsonl: no such file"))
    assert said == r"rows\n\x1b]0;title\x07 \x1b[2J \r \x9b31m \u202e \ud800.jsonl: no such file"


def test_texts_stay_what_they_are():
    for text in ("naïve 日本語 🙂 a\u200db", "[bold]x[/bold]", "\\n"):
        assert printable(text) == text
    assert printable("a\n\tb\r", shown="\n\t") == "a\n\tb\\r"


@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_printed_as_they_are(terminal):
    file = io.StringIO()
    console = PlainConsole(file=file, width=100, force_terminal=terminal, highlight=False, color_system=None)
    table = Table("[name]", box=None)
    table.add_row("runs/[red]x[/red]\x1b[2J")
    console.print("runs/[bold]x:smile:\x1b[2J", table)
    assert r"runs/[bold]x:smile:\x1b[2J" in file.getvalue() and r"runs/[red]x[/red]\x1b[2J" in file.getvalue()
    assert "[name]" in file.getvalue() and "\x1b[2J" not in file.getvalue()
