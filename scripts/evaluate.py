"""`headstart eval`: what drafters save, as a command."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..configs.errors import BadInput, first_line
from .eval_run import WantedSuites, check_measured, compare_all, measure_all, report_all, say_resumed

if TYPE_CHECKING:
    import torch

    from ..heads.drafter import Drafter


def evaluate(
    target: Annotated[str, typer.Option(help="The target: local folder or hub id.")],
    output: Annotated[Path, typer.Option(help="Folder for report.html, report.json and rounds.jsonl.")],
    prompts: Annotated[
        list[str] | None, typer.Option(help="JSONL rows with prompt, messages or turns. Repeatable.")
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(help="spec-bench, mt-bench, humaneval, gsm8k, mbpp, speed-bench[:SUBSET]; NAME=FILE. Repeatable."),
    ] = None,
    suites_dir: Annotated[
        Path, typer.Option(envvar="HEADSTART_SUITES", help="Where suites' files are; else from the hub.")
    ] = Path("suites"),
    system: Annotated[str | None, typer.Option(help="A system prompt, put in front of chats that have none.")] = None,
    thinking: Annotated[str, typer.Option(help="on or off: what the chat template is told as enable_thinking.")] = "",
    head: Annotated[
        list[str] | None, typer.Option(help="RUN/final, an exported head, or a hub id. Repeatable.")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="ngram[:MAX], suffix, sparse-self[:BUDGET], draft-model:PATH, or head:PATH, as --head. Repeatable."
        ),
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="K; default: the head's own.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer, at most.", min=2)] = 128,
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.", min=1)] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above, both sides sample.", min=0.0)] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the K most probable tokens; 0: all.", min=0)] = 0,
    top_p: Annotated[float, typer.Option(help="Sample within this share of probability; 1: all.")] = 1.0,
    tree: Annotated[
        list[str] | None,
        typer.Option(help="chain, static, dynamic, optimal, sampled or sampled-chain. Repeatable. [default: chain]"),
    ] = None,
    tree_nodes: Annotated[int, typer.Option(help="Nodes of a tree, at most.", min=1)] = 24,
    batch_size: Annotated[list[int] | None, typer.Option(help="Rows at a time. Repeatable. [default: 1]")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends an answer. Repeatable.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed passes per side.", min=1)] = 3,
    steps: Annotated[
        str, typer.Option(help="eager, graph (CUDA graphs) or compile; default: graph on a GPU, eager on a CPU.")
    ] = "",
    accept: Annotated[str, typer.Option(help="exact; or typical, which needs --allow-lossy.")] = "exact",
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Permit a rule that changes the text's distribution.")
    ] = False,
    compare: Annotated[
        str, typer.Option(help="`transformers`: also time its own generate, and its own use of these drafters.")
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, auto; default: as stored on GPU, float32 on CPU.")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; default: cuda where there is one.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
) -> None:
    """Measure what drafters save: acceptance, speed against the same engine without drafts, and losslessness.

    \b
    Examples:
      headstart eval --target MODEL --head runs/a/final --prompts prompts.jsonl --output runs/a/eval
      headstart eval --target MODEL --drafter ngram --drafter draft-model:SMALLER --compare transformers ...

    Baseline and speculation run interleaved over the same prompts. The same command again continues a measurement that
    was killed. Exit code 1 where a greedy text differs from the target's own beyond rounding, or sampled ones are not
    distributed as the target's; the report says where.
    """
    from ..eval.drafters.lookup import build_drafters, trained
    from ..eval.measurement.config import MeasureConfig
    from ..eval.measurement.resume import Measured
    from ..eval.replay import check_steps
    from ..eval.report.document import check_output, training_warnings
    from ..eval.report.recommendation import is_lossless
    from ..heads.loading import default_device
    from ..heads.target import Target

    check_output(output)
    check_choices(compare=compare, accept=accept, allow_lossy=allow_lossy)
    wanted = WantedSuites.of(prompts or [], suite or [], suites_dir, system=system, thinking=thinking)
    specs = drafter_specs(head or [], drafter or [])
    device = device or default_device()
    steps = check_steps(steps or ("eager" if device == "cpu" else "graph"), torch_device(device))
    loaded = Target.load(target, dtype=dtype or ("float32" if device == "cpu" else "auto"), device=device)
    suites = wanted.load(loaded, max_new_tokens=max_new_tokens, limit=limit)
    drafters = build_drafters(specs, loaded)
    config = MeasureConfig(
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        accept=accept,
        steps=steps,
        stop_strings=tuple(stop or ()),
        num_repeats=repeats,
        seed=seed,
    )
    configs = [replace(config, batch_size=size) for size in batch_size or [1]]
    trees = tree or ["chain"]
    check_trees(trees, drafters, temperature=temperature)
    training = {name: trained(spec) for spec, (name, _) in zip(specs, drafters, strict=True)}
    with Measured(output) as store:
        say_resumed(store)
        results, rounds = measure_all(loaded, drafters, suites, configs, trees, tree_nodes, store, training)
        if compare:
            results += compare_all(loaded, drafters, suites, configs[0], store)
        check_measured(results)
        for line in training_warnings(results):
            print(f"headstart: {line}", file=sys.stderr)
        report_all(loaded, results, rounds, output)
        store.finish()
    if any(not is_lossless(entry) for entry in results if entry["accept"] == "exact"):
        raise typer.Exit(1)


def check_choices(*, compare: str, accept: str, allow_lossy: bool) -> None:
    """Raises BadInput on a comparator or an accept rule that there is not, or that changes the text unasked."""
    from ..eval.verify import ACCEPT_RULES

    if compare not in ("", "transformers"):
        raise BadInput(f"--compare {compare}: expected transformers")
    if accept not in ACCEPT_RULES:
        raise BadInput(f"--accept {accept}: expected one of {', '.join(ACCEPT_RULES)}")
    if not ACCEPT_RULES[accept].is_lossless and not allow_lossy:
        raise BadInput(f"--accept {accept}: is not lossless, the text would not be the target's; add --allow-lossy")


def torch_device(name: str) -> "torch.device":
    """Raises BadInput on a device that torch does not know."""
    import torch

    try:
        return torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"--device {name}: {first_line(error)}") from error


def drafter_specs(heads: list[str], drafters: list[str]) -> list[str]:
    """What to measure, `--head X` as `head:X`. Raises BadInput before anything is loaded."""
    from ..eval.drafters.lookup import parse_drafter

    specs = [*(f"head:{folder}" for folder in heads), *drafters]
    if not specs:
        raise BadInput("nothing to measure: give at least one --head or --drafter")
    for spec in specs:
        parse_drafter(spec)
    return specs


def check_trees(trees: list[str], drafters: "list[tuple[str, Drafter]]", *, temperature: float) -> None:
    """Raises BadInput, before anything is measured, on trees that cannot be drafted."""
    from ..eval.measurement.tree_search import TREE_NAMES

    for name in trees:
        if name not in TREE_NAMES:
            raise BadInput(f"--tree {name}: expected one of {', '.join(TREE_NAMES)}")
        if name in ("sampled", "sampled-chain") and temperature == 0:
            raise BadInput(f"--tree {name}: needs --temperature above 0")
    if trees != ["chain"] and not any(drafter.drafts_trees for _, drafter in drafters):
        raise BadInput(f"--tree {' '.join(trees)}: {', '.join(name for name, _ in drafters)} draft chains only")
