"""What a terminal shows at the end of a command: the first paragraph of its page, one table, and where all else is."""

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any
from unicodedata import combining, east_asian_width

from .charts import shortened
from .conclusion import Conclusion, Table

WIDTH, MOST_LINES = 80, 25  # of a small terminal
LEAST_ROWS = 6  # of the table, before a caution is left out for them
NARROWEST = 12  # columns that a shortened name keeps


def show_conclusion(conclusion: Conclusion, table: Table | None, written: str, console: Any) -> None:
    """Print `screen_lines` on a rich console, the headline in bold."""
    for line in screen_lines(conclusion, table, written):
        style = "bold" if line and line in conclusion.headline.replace("\xa0", " ") else None
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def screen_lines(conclusion: Conclusion, table: Table | None, written: str) -> list[str]:
    """At most MOST_LINES of at most WIDTH columns, unless headline, reasons and commands alone are more: cautions and
    rows for which there is no room are counted. Args: written: what says where the page is."""
    first = [*wrapped(conclusion.headline), *wrapped(" ".join(conclusion.reasons))]
    last = [line for command in conclusion.commands for line in shell_lines(command)]
    last = ["", *([] if not last else ["How to serve it:", *last]), *wrapped(written)]
    head, rows = ([], []) if table is None else table_lines(table)
    room = MOST_LINES - len(first) - len(last)
    cautions = fitting(conclusion.cautions, room - len(head) - min(len(rows), LEAST_ROWS))
    room -= len(cautions) + len(head)
    if len(rows) > max(room, 1):
        shown = max(room - 1, 1)
        rows = [*rows[:shown], f"and {len(rows) - shown} more rows in the report"]
    return [*first, *cautions, *head, *rows, *last]


def fitting(cautions: Sequence[str], room: int) -> list[str]:
    """The cautions as a list of at most so many lines; those left out are counted."""
    lines: list[str] = []
    for number, caution in enumerate(cautions):
        item = wrapped(caution, first="- ", further="  ")
        is_last = number == len(cautions) - 1
        if len(lines) + len(item) + (not is_last) > room:
            return [*lines, f"- and {len(cautions) - number} more in the report"] if room > len(lines) else lines
        lines += item
    return lines


def wrapped(text: str, *, first: str = "", further: str = "", width: int = WIDTH) -> list[str]:
    """The text in lines; a word longer than a line, such as a path, stays whole."""
    return [
        line.replace("\xa0", " ")
        for line in textwrap.wrap(
            text, width, initial_indent=first, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
        )
    ]


def shell_lines(command: str) -> list[str]:
    """A command line over several, which a shell reads as one; a comment as it is."""
    if command.startswith("#"):
        return wrapped(command, first="  ", further="  # ")
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if lines[-1] and len(lines[-1]) + len(word) + 5 > WIDTH:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return [f" {line}" for line in lines]


def table_lines(table: Table) -> tuple[list[str], list[str]]:
    """Caption and columns' titles, and the rows; columns of words that are too wide lose their middle."""
    titles, columns = list(table.columns), list(zip(*table.rows, strict=True)) or [()] * len(table.columns)
    for most, gap in ((2, 2), (2, 1), (3, 1)):  # lines of a title, columns between two cells
        widths = [
            max([width_of(title, most), *map(cell_len, cells)]) for title, cells in zip(titles, columns, strict=True)
        ]
        over = sum(widths) + gap * (len(widths) - 1) - WIDTH
        if over <= 0:
            break
    for column in range(table.num_labels):
        cut = max(0, min(over, widths[column] - max(NARROWEST, width_of(titles[column], most))))
        widths[column], over = widths[column] - cut, over - cut
    rows = [
        [shortened(cell, most=widths[i] - 1) if cell_len(cell) > widths[i] else cell for i, cell in enumerate(row)]
        for row in table.rows
    ]
    stacked = [textwrap.wrap(title, width) or [""] for title, width in zip(titles, widths, strict=True)]
    height = max(map(len, stacked))
    heads = [[lines[i - height] if i >= height - len(lines) else "" for lines in stacked] for i in range(height)]
    joined = [joined_cells(cells, widths, gap=gap, num_labels=table.num_labels) for cells in (*heads, *rows)]
    caption = ["", *wrapped(table.caption)] if table.caption else [""]
    return [*caption, *joined[:height]], joined[height:]


def cell_len(text: str) -> int:
    """The columns that a text takes in a terminal."""
    return sum(2 if east_asian_width(letter) in "WF" else not combining(letter) for letter in text)


def width_of(title: str, most: int) -> int:
    """The least width in which a column's title takes at most so many lines."""
    return next(width for width in range(1, len(title) + 1) if len(wrapped(title, width=width)) <= most
                and max(map(cell_len, title.split())) <= width)  # fmt: skip


def joined_cells(cells: Iterable[str], widths: Sequence[int], *, gap: int, num_labels: int) -> str:
    """Words to the left, figures to the right."""
    padded = []
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        space = " " * (width - cell_len(cell))
        padded.append(cell + space if number < num_labels else space + cell)
    return (" " * gap).join(padded).rstrip()
