"""`headstart data vocab`: which tokens a cut draft vocabulary would hold, and how much of the answers that covers."""

from math import ceil, log
from pathlib import Path
from typing import Annotated

import typer

from ..overrides import Overrides

SIZES = (4096, 8192, 16384, 32768)


def vocab(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A run YAML: its target and data sections count.")],
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="A new folder for vocab.json and coverage.svg.")] = None,
) -> None:
    """Count the supervised tokens and show what a draft vocabulary of each size covers.

    \b
    Example:
      headstart data vocab runs/eagle3.yaml target.path=MODEL data.train=chats.jsonl --output runs/vocab

    Training with head.draft_vocab_size cuts it by the same counts. The tokenizer's special tokens and those that its
    chat template writes are always kept. vocab.json holds the curve and, for head.draft_vocab_size, the ids and the
    offsets `d2t` (target id minus draft id) that engines read.
    """
    from rich.table import Table

    from ...configs.errors import BadInput
    from ...configs.files import new_folder, write_json, write_text
    from ...configs.terminal import PlainConsole
    from ...data_pipelines.vocab import always_kept, coverage, coverage_curve, most_frequent
    from ...heads.targets.skeleton import load_skeleton
    from ...train.config import load_inputs
    from ...train.data import count_rows

    run = load_inputs(config, overrides or ())
    if output is not None and output.exists():
        raise BadInput(f"--output {output}: exists already")
    skeleton = load_skeleton(run.target)
    vocab_size, wanted = skeleton.vocab_size, run.head.draft_vocab_size
    counts, num_rows = count_rows(run, skeleton)
    always = always_kept(skeleton.tokenizer, eos_token_ids=skeleton.eos_token_ids, vocab_size=vocab_size)
    sizes = sorted({size for size in (*SIZES, wanted or vocab_size, vocab_size) if len(always) <= size <= vocab_size})
    covered = {size: coverage(counts, most_frequent(counts, size=size, always=always)) for size in sizes}
    table = Table(title=f"{skeleton.name}: {counts.sum():,} supervised tokens in {num_rows:,} rows")
    table.add_column("draft vocabulary", justify="right")
    table.add_column("covers", justify="right")
    for size, share in covered.items():
        table.add_row(f"{size:,}{' (all)' if size == vocab_size else ''}", f"{share:.2%}")
    PlainConsole().print(
        table, f"{(counts > 0).sum():,} of {vocab_size:,} tokens are used; {len(always)} are always kept"
    )
    if output is None:
        return
    curve = coverage_curve(counts, always=always)
    figures = {"num_supervised_tokens": int(counts.sum()), "vocab_size": vocab_size, "always": always, "curve": curve}
    if wanted is not None:
        ids = most_frequent(counts, size=wanted, always=always).tolist()
        figures |= {"draft_vocab_size": wanted, "ids": ids, "d2t": [i - draft for draft, i in enumerate(ids)]}
    with new_folder(output) as folder:
        write_json(folder / "vocab.json", figures, indent=None)
        write_text(folder / "coverage.svg", coverage_svg(curve))


def coverage_svg(curve: list[tuple[int, float]]) -> str:
    """An SVG file: what draft vocabularies of each size cover, the size in powers of 4."""
    from ...eval.report.charts import WIDTH, Series, line_chart
    from ...eval.report.page import page_template

    first, last = int(log(curve[0][0], 4)), ceil(log(curve[-1][0], 4))
    ticks = [f"{4**power // 1024}k" if power >= 5 else str(4**power) for power in range(first, last + 1)]
    line = Series("share of supervised tokens", [(log(size, 4) - first, share) for size, share in curve])
    axis = "tokens in the draft vocabulary"
    chart = line_chart("Coverage", [line], axis=axis, ticks=ticks, most=1.0, with_dots=False)
    return page_template("compare.svg.j2").render(charts=[chart], width=WIDTH + 20, height=246)
