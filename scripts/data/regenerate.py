"""`headstart data regenerate`: has the target answer the prompts itself, through servers or in this process."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..overrides import Overrides

if TYPE_CHECKING:
    from ...data_pipelines.answers.regenerate import Answerer, RegenerateConfig, RunProgress


def regenerate(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML, e.g. configs/data/regenerate_server.yaml.")],
    overrides: Overrides = None,
) -> None:
    """Have the target answer the prompts of a data set itself: what a head learns from should be what it will draft.

    \b
    Example, from a vLLM or SGLang server:
      headstart data regenerate data/regenerate_server.yaml sources=chats.jsonl output=data/mine \\
        target=Qwen/Qwen3-8B servers=[http://localhost:8000/v1] sampling.temperature=0.7
    and without one, in this process:
      headstart data regenerate data/regenerate_local.yaml sources=chats.jsonl output=data/mine target=MODEL

    OUTPUT gets answers.jsonl (rows in input order: messages, finish_reason, truncated, usage) to train on,
    manifest.json (settings, counts), and failed.jsonl where rows could not be answered. The same command again goes on
    where an interrupted run stopped, and asks failed rows again. Exit code 1 where some failed.
    """
    from ...configs.errors import writing_into
    from ...configs.loader import build, read_config
    from ...data_pipelines.answers.regenerate import RegenerateConfig
    from ...data_pipelines.answers.regenerate import regenerate as run
    from .engine_answers import by_engine

    settings = build(RegenerateConfig, read_config(config, overrides or ()))
    answers, identity = by_servers(settings) if settings.servers else by_engine(settings)
    with writing_into(settings.output), AnswerProgress() as bar:
        summary = run(settings, answers, target_identity=identity, show=bar.show)
    counts = summary.counts
    print(
        f"{counts.written} rows in {settings.output}/answers.jsonl, {counts.completion_tokens} tokens answered; "
        f"{counts.truncated} truncated, {counts.failed} failed, {summary.duplicates} duplicates left out"
    )
    if counts.failed:
        print(f"why they failed: {settings.output}/failed.jsonl; the same command asks them again")
        raise typer.Exit(1)


def by_servers(config: "RegenerateConfig") -> tuple["Answerer", dict[str, Any]]:
    """Answers of OpenAI-compatible servers; nothing is known of their weights."""
    from ...data_pipelines.answers.client import OpenAIClient
    from ...data_pipelines.answers.dispatch import by_threads

    client = OpenAIClient(config.servers, model=config.target, config=config.client)
    return partial(by_threads, answer=client, num_threads=client.num_threads), {}


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.live.is_started:
            super().__exit__(*raised)

    def show(self, run: "RunProgress") -> None:
        self.start()
        [task] = self.tasks
        self.update(
            task.id,
            total=run.num_all,
            completed=run.num_answered,
            failed=run.num_failed,
            speed=run.num_tokens / task.elapsed if task.elapsed else 0.0,
        )
