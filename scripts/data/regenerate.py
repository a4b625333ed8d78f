"""`headstart data regenerate`: has the target answer the prompts itself, in this process or by servers."""

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...base.doing import Doing, doing
from .overrides import Overrides

if TYPE_CHECKING:
    from ...data_pipelines.answers.regenerate import RunProgress


def regenerate(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML, e.g. configs/data/regenerate_server.yaml.")],
    overrides: Overrides = None,
) -> None:
    """Have the target answer the prompts of a data set itself: what a head learns from should be what it will draft.

    \b
    Example, from a vLLM or SGLang server:
      headstart data regenerate data/regenerate_server.yaml sources=chats.jsonl output=data/mine \\
        target=Qwen/Qwen3-8B engine.server=http://localhost:8000 sampling.temperature=0.7
    in this process, or by a server that is started for it:
      headstart data regenerate data/regenerate_local.yaml sources=chats.jsonl output=data/mine target=MODEL
      headstart data regenerate data/regenerate_local.yaml sources=chats.jsonl output=data/mine target=MODEL \\
        engine.name=vllm engine.python=VLLM/bin/python

    OUTPUT gets answers.jsonl (rows in input order: messages, finish_reason, truncated, usage) to train on,
    manifest.json (settings, counts), and failed.jsonl where rows could not be answered. The same command again goes on
    where an interrupted run stopped, and asks failed rows again. Exit code 1 where some failed.
    """
    from ...base.errors import writing_into
    from ...base.jsonl import read_jsonl
    from ...configs.loader import build, read_config
    from ...data_pipelines.answers.regenerate import BY_MESSAGES, RegenerateConfig
    from ...data_pipelines.answers.regenerate import regenerate as run
    from .engine_answers import by_engine
    from .served_answers import by_ids, by_messages

    settings, told = build(RegenerateConfig, read_config(config, overrides or ())), list[Doing]()
    with ExitStack() as running:

        def show(progress: "RunProgress") -> None:
            """A bar, or lines, from the first answer on, so that what is refused before is one line."""
            if not told:
                told.append(running.enter_context(doing("the target answers", progress.num_all)))
            told[0](progress.num_answered + progress.num_failed - told[0].done)

        if settings.engine.is_ours:
            answers, identity = by_engine(settings)
        elif settings.engine.name == BY_MESSAGES:
            answers, identity = by_messages(settings)
        else:
            answers, identity = by_ids(settings, running)
        with writing_into(settings.output):
            summary = run(settings, answers, target_identity=identity, show=show)
    counts = summary.counts
    print(
        f"{counts.answered} rows in {settings.output}/answers.jsonl, {counts.completion_tokens} tokens answered; "
        f"{counts.truncated} cut at sampling.max_tokens (heads learn no end from these), {counts.failed} failed, "
        f"{summary.duplicates} duplicates left out"
    )
    if counts.failed:
        failed = read_jsonl(Path(settings.output, "failed.jsonl"))
        print(f"why they failed: {settings.output}/failed.jsonl; the same command asks them again")
        problem, count = Counter(row["problem"] for row in failed).most_common(1)[0]
        print(f"headstart: {count} of {len(failed)} that failed: {problem}", file=sys.stderr)
        raise typer.Exit(1)
