"""The `headstart` command: train a head, measure what it saves."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from .. import __version__
from ..configs.errors import BadInput

app = typer.Typer(
    name="headstart",
    help=(
        "Train draft heads for speculative decoding on a frozen target, and measure what they really save.\n\n"
        "A first run, without network:  make quickstart\n\n"
        "On your own target and data:\n\n\b\n"
        "  headstart train runs/eagle3.yaml target.path=MODEL data.train=CHATS.jsonl train.output_dir=runs/mine\n"
        "  headstart eval --target MODEL --head runs/mine/final --prompts PROMPTS.jsonl --output runs/mine/eval"
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command(context_settings={"allow_interspersed_args": True})
def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A run YAML, e.g. configs/runs/eagle3.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="key=value ...", help="Dotted keys that win over the YAML."),
    ] = None,
) -> None:
    """Train a head on a frozen target.

    \b
    Example:
      headstart train runs/eagle3.yaml target.path=MODEL data.train=chats.jsonl train.output_dir=runs/a

    The run folder gets config.yaml (repeats the run), metrics.jsonl, checkpoints/ and final/, the head. The same
    command again continues an interrupted run from its last checkpoint. On several devices, the same run is
    `accelerate launch -m headstart.train CONFIG key=value ...`.
    """
    from ..train.config import load_run
    from ..train.trainer import train as run_training

    run_training(load_run(config, overrides or ()))


@app.command(name="eval")
def evaluate(
    target: Annotated[str, typer.Option(help="The target: local folder or hub id.")],
    head: Annotated[list[str], typer.Option(help="A trained head's folder, RUN/final. Repeatable.")],
    prompts: Annotated[list[str], typer.Option(help="JSONL rows with prompt, messages or turns. Repeatable: suites.")],
    output: Annotated[Path, typer.Option(help="Folder for report.json and rounds.jsonl.")],
    num_draft_tokens: Annotated[int | None, typer.Option(help="K; default: the head's own.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer, at most.", min=2)] = 128,
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.", min=1)] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above, both sides sample.", min=0.0)] = 0.0,
    batch_size: Annotated[list[int] | None, typer.Option(help="Rows at a time. Repeatable. [default: 1]")] = None,
    repeats: Annotated[int, typer.Option(help="Timed passes per side.", min=1)] = 3,
    compare: Annotated[str, typer.Option(help="`transformers`: also time its own generate on the same prompts.")] = "",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, auto; default: as stored on GPU, float32 on CPU.")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; default: cuda where there is one.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
) -> None:
    """Measure what heads save: acceptance, speed against the same engine without drafts, and losslessness.

    \b
    Example:
      headstart eval --target MODEL --head runs/a/final --prompts prompts.jsonl --output runs/a/eval

    Baseline and speculation run interleaved over the same prompts. Exit code 1 where a greedy text differs from the
    target's own beyond rounding; the report says where.
    """
    from ..eval.comparators import compare_generate
    from ..eval.measure import MeasureConfig, measure
    from ..eval.report import build_report, check_output, show, write_report
    from ..eval.suites import load_suite
    from ..heads.registry import load_head, read_head_config
    from ..heads.target import Target, default_device

    check_output(output)
    if compare not in ("", "transformers"):
        raise BadInput(f"--compare {compare}: expected transformers")
    device = device or default_device()
    names = [read_head_config(folder)["head"]["type"] for folder in head]
    names = [name if names.count(name) == 1 else f"{name}:{folder}" for name, folder in zip(names, head, strict=True)]
    loaded = Target.load(target, dtype=dtype or ("float32" if device == "cpu" else "auto"), device=device)
    suites = [load_suite(path, loaded, max_new_tokens=max_new_tokens, limit=limit) for path in prompts]
    drafters = [load_head(folder, loaded) for folder in head]

    console = Console()
    results, rounds = [], []
    combinations = [
        (n, d, s, b) for n, d in zip(names, drafters, strict=True) for s in suites for b in batch_size or [1]
    ]
    for name, drafter, suite, size in combinations:
        config = MeasureConfig(
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            batch_size=size,
            num_repeats=repeats,
            seed=seed,
        )
        num_batches = -(-len(suite.prompts) // size)
        bar = iter(track(range(num_batches), f"{name} on {suite.name}", console=Console(stderr=True)))
        entry, raw = measure(loaded, drafter, suite, config, name=name, on_batch=lambda bar=bar: next(bar, None))
        next(bar, None)
        results.append(entry)
        rounds += raw
    if compare:
        config = MeasureConfig(max_new_tokens=max_new_tokens, num_repeats=repeats)
        results += [compare_generate(loaded, suite, config) for suite in suites]
    report = build_report(loaded, results)
    path = write_report(output, report, rounds)
    show(report, console)
    console.print(f"written to {path}")
    if any(entry["lossless"]["unexplained"] for entry in results):
        raise typer.Exit(1)


def show_version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Nothing to do before a command."""


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    try:
        app()
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
