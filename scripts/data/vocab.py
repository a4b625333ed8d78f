"""`headstart data vocab`: which tokens a cut draft vocabulary would hold, and how much of the answers that covers."""

from typing import Annotated

import typer

from .overrides import Overrides

SIZES = (4096, 8192, 16384, 32768)


def vocab(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A run YAML: its target and data sections count.")],
    overrides: Overrides = None,
) -> None:
    """Count the supervised tokens and show what a draft vocabulary of each size covers.

    \b
    Example:
      headstart data vocab runs/eagle3.yaml target.path=MODEL data.train=chats.jsonl

    Training with head.draft_vocab_size cuts it by the same counts. The tokenizer's special tokens and those that its
    chat template writes are always kept.
    """
    from rich.table import Table

    from ...base.terminal import PlainConsole
    from ...data_pipelines.vocab import always_kept, coverage, most_frequent
    from ...targets.skeleton import load_skeleton
    from ...train.inputs.config import load_inputs
    from ...train.inputs.data import count_rows

    run = load_inputs(config, overrides or ())
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
