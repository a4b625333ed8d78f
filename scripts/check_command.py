"""`headstart check`: holds a folder against the contract of the engines that are to load it."""

import json
from pathlib import Path
from typing import Annotated

import typer


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An exported head.")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of lines.")] = False,
) -> None:
    """Find what is wrong with an exported head before an engine serves it without a word.

    \b
    Examples:
      headstart check served/mine
      headstart check served/mine --json

    Engines load heads with missing tensors and wrong layer numbers: the text stays right and drafts are no longer
    accepted. Looked at: files, names, shapes and dtypes of tensors, NaN, the draft vocabulary's maps, config keys that
    engines read or misread, and words in the path that switch vLLM's method.

    Exit code 0: fine; 1: problems, listed; 2: no head's folder.
    """
    from ..heads.export.check import check_folder

    found = check_folder(folder)
    if as_json:
        report = {"folder": str(folder), "layout": found.layout, "ok": not found.problems, "problems": found.problems}
        print(json.dumps(report, indent=2))
    else:
        for problem in found.problems:
            print(problem)
        state = f"{len(found.problems)} problems" if found.problems else "fine"
        print(f"{folder}: {found.layout or 'unknown layout'}: {state}")
    if found.problems:
        raise typer.Exit(1)
