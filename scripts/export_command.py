"""`headstart export`: a trained head in the layout that a serving engine loads."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a head's own, RUN/final.")],
    output: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    to: Annotated[str, typer.Option(help="vllm, sglang, speculators or hf.")],
    target: Annotated[str, typer.Option(help="The target's folder or hub id; default: where it was in training.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; default: the target's.")] = "",
) -> None:
    """Write a trained head as a serving engine loads it, and check it against that engine's contract.

    \b
    Examples:
      headstart export runs/mine served/mine --to vllm
      headstart export runs/mine served/mine --to speculators     then: vllm serve served/mine

    \b
    eagle, eagle3   vllm, sglang (one folder for both); eagle3 also speculators, which names its target
    medusa          vllm (0.32 at most), hf: FasterDecoding's layout, which TGI reads
    mtp             vllm, sglang, hf: a copy of the target with the modules in it
    draft_lm        vllm, sglang, hf: a plain model with the target's tokenizer
    hydra           none: no engine loads it

    The folder is written whole or not at all. The command that serves it is printed.
    """
    from ..heads.export.check import check_folder
    from ..heads.export.write import export_head, notes, serve_commands

    head = export_head(source, output, to=to, target=target or None, dtype=dtype or None)
    for line in notes(head):
        print(f"headstart: {line}", file=sys.stderr)
    found = check_folder(output)
    for problem in found.problems:
        print(f"headstart: {output}: {problem}", file=sys.stderr)
    print(f"written to {output}: {head.family} for {to} ({found.layout})")
    for command in serve_commands(head, str(output), to=to).values():
        print(command)
    if found.problems:
        raise typer.Exit(1)
