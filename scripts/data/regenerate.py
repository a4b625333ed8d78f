"""`headstart data regenerate`: has the target answer the prompts itself, in this process or by servers."""

import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...base.doing import SILENCE
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

    settings = build(RegenerateConfig, read_config(config, overrides or ()))
    with ExitStack() as running:
        if settings.engine.is_ours:
            answers, identity = by_engine(settings)
        elif settings.engine.name == BY_MESSAGES:
            answers, identity = by_messages(settings)
        else:
            answers, identity = by_ids(settings, running)
        with writing_into(settings.output), AnswerProgress() as bar:
            summary = run(settings, answers, target_identity=identity, show=bar.show)
    counts = summary.counts
    print(
        f"{counts.answered} rows in {settings.output}/answers.jsonl, {counts.completion_tokens} tokens answered; "
        f"{counts.truncated} truncated, {counts.failed} failed, {summary.duplicates} duplicates left out"
    )
    if counts.failed:
        failed = read_jsonl(Path(settings.output, "failed.jsonl"))
        print(f"why they failed: {settings.output}/failed.jsonl; the same command asks them again")
        problem, count = Counter(row["problem"] for row in failed).most_common(1)[0]
        print(f"headstart: {count} of {len(failed)} that failed: {problem}", file=sys.stderr)
        raise typer.Exit(1)


class AnswerProgress(Progress):
    """A progress bar on stderr: answered, failed, tokens per second. It begins with the first figures, so that what is
    refused before is one line."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("target answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed  {task.fields[speed]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.add_task("", total=None, failed=0, speed=0.0)
        self.told = time.monotonic()  # of the last line where there is no bar

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.live.is_started:
            super().__exit__(*raised)

    def show(self, run: "RunProgress") -> None:
        self.start()
        if not self.console.is_terminal and time.monotonic() - self.told >= SILENCE:
            self.told = time.monotonic()
            print(f"the target answers: {run.num_answered:,} of {run.num_all:,}", file=sys.stderr, flush=True)
        [task] = self.tasks
        self.update(
            task.id,
            total=run.num_all,
            completed=run.num_answered,
            failed=run.num_failed,
            speed=run.num_tokens / task.elapsed if task.elapsed else 0.0,
        )
