"""`headstart plan`: which K or tree to serve at which batch size, and where to leave drafting off."""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from ..base.doing import doing
from ..base.errors import BadInput
from ..base.files import write_json
from ..base.terminal import PlainConsole
from ..configs.loader import PACKAGE_CONFIGS
from .evaluating.engine_options import (
    MOST_NEW,
    MOST_ROWS,
    DraftWindowText,
    EngineArgs,
    EngineName,
    EnginePython,
    check_numbers,
    engine_of,
)

GENERAL_PROMPTS = str(PACKAGE_CONFIGS / "prompts" / "general.jsonl")
SECONDS, LONGEST = 60.0, 86_400.0  # for all but loading the target; at most a day


def plan(
    target: Annotated[str, Option(help="The target: local folder or hub id.")],
    output: Annotated[Path, Option(help="Folder for plan.html and plan.json.")],
    prompts: Annotated[
        str, Option(help="JSONL rows as for `headstart eval`: the traffic to plan for. [default: a few of ours]")
    ] = "",
    system: Annotated[str | None, Option(help="A system prompt, put in front of chats that have none.")] = None,
    thinking: Annotated[str, Option(help="on or off: what the chat template is told as enable_thinking.")] = "",
    head: Annotated[str, Option(help="RUN/final, an exported head, or a hub id.")] = "",
    drafter: Annotated[str, Option(help="Instead of a head: as `headstart eval --drafter` takes it.")] = "",
    num_draft_tokens: Annotated[list[int] | None, Option(help="K. Repeatable. [default: 1 to 8]", min=1)] = None,
    draft_window: DraftWindowText = "",
    tree: Annotated[list[str] | None, Option(help="dynamic:NODES; none. [default: dynamic:8, dynamic:16]")] = None,
    batch_size: Annotated[
        list[int] | None, Option(help="Repeatable. [default: 1, 4, 16]", min=1, max=MOST_ROWS)
    ] = None,
    max_new_tokens: Annotated[int, Option(help="Tokens per answer, at most.", min=2, max=MOST_NEW)] = 128,
    limit: Annotated[int, Option(help="At most N prompts, spread evenly over the file.", min=1)] = 32,
    temperature: Annotated[float, Option(help="0 is greedy.", min=0.0)] = 0.0,
    seconds: Annotated[
        float | None,
        Option(
            help="For all but loading the target, at most: fewer prompts and settings where need be. Our own engine's "
            "alone; a server takes --limit and fewer K. [default: 60]",
            min=1.0,
            max=LONGEST,
        ),
    ] = None,
    dtype: Annotated[str, Option(help="As for `headstart eval`.")] = "",
    device: Annotated[str, Option(help="cpu, cuda ...; default: cuda where there is one.")] = "",
    engine: EngineName = "headstart",
    engine_python: EnginePython = "",
    engine_args: EngineArgs = "",
    adapter: Annotated[str, Option(help="Folder of a LoRA adapter (peft) with which the target is served.")] = "",
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a finished plan of other settings.")] = False,
    verbose: Annotated[bool, Option("--verbose", help="Print what the plan rests on, too.")] = False,
) -> None:
    """Plan a deployment: expected speedup of each K and tree by batch size, and what to serve.

    \b
    Examples:
      headstart plan --target MODEL --head runs/a/final --prompts prompts.jsonl --output runs/a/plan
      headstart plan --target MODEL --drafter suffix --prompts prompts.jsonl --seconds 300 --output runs/lookups
      headstart plan --engine vllm --engine-python VLLM/bin/python --target MODEL --head runs/a/final --prompts ...

    Each setting decodes the prompts once, for what is accepted; a few rounds are timed per setting and batch size. The
    most promising are then measured, chosen from, and the prediction's error shown. What is decoded and timed is chosen
    to fit --seconds; plan.json has the rounds behind each prediction, and its interval.
    """
    settings = {key: value for key, value in locals().items() if key not in ("output", "overwrite", "verbose")}

    from ..base.owned import OwnedFolder
    from ..eval.decoding.replay import default_steps
    from ..eval.drafters.registry import build_drafter, check_window, parse_drafter
    from ..eval.figures.environment import Environment, TargetInfo
    from ..eval.measurement.breakdown import learnt_share
    from ..eval.plan.accepting import evenly, parse_tree
    from ..eval.plan.budget import Budget, compile_within
    from ..eval.plan.planner import PlanConfig, Planner
    from ..eval.proof.config import MeasureConfig
    from ..eval.report.results.one_result import learnt_text
    from ..targets.dtype import default_dtype
    from ..targets.loading import default_device, torch_device
    from ..targets.target import Target
    from ..targets.weights.served_adapter import ServedAdapter
    from .evaluating.eval_drafts import recorded_training
    from .evaluating.eval_run import WantedSuites, warn
    from .evaluating.eval_served import WantedMeasurement, WantedServers
    from .plan_screen import show_plan, write_plan_page
    from .plan_served import plan_in_server

    check_numbers(seconds=seconds)
    if bool(head) == bool(drafter):
        raise BadInput("give one of --head and --drafter")
    spec = f"head:{head}" if head else drafter
    sizes, lengths = sorted(set(batch_size or (1, 4, 16))), num_draft_tokens or range(1, 9)
    by = engine_of(engine, engine_python, engine_args, known=("headstart", "vllm", "sglang"))
    trees = None if tree is None else [name for name in tree if name != "none"]
    measure = MeasureConfig(max_new_tokens=max_new_tokens, temperature=temperature, num_repeats=2)
    config = PlanConfig(measure=measure, lengths=lengths, trees=trees, batch_sizes=sizes)
    files = [prompts or GENERAL_PROMPTS]
    wanted = WantedSuites(files, [], Path("suites"), system=system, thinking=thinking)
    if not by.is_ours:
        if tree or seconds or not prompts:
            raise BadInput(f"--engine {engine}: needs --prompts, and takes no --tree and no --seconds")
        servers = WantedServers(by, concurrency=sizes)
        asked = WantedMeasurement(
            target=target,
            dtype=dtype,
            device=device,
            drafters=[spec],
            prompts=files,
            chat=wanted.chat,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            repeats=2,
            window=draft_window,
            adapter=ServedAdapter.read(adapter) if adapter else None,
        )
        return plan_in_server(servers, asked, lengths, output, settings, limit=limit, overwrite=overwrite)
    check_window(draft_window, parse_drafter(spec)[0])
    for name in trees or []:
        parse_tree(name)
        if parse_drafter(spec)[0] in ("ngram", "suffix"):
            raise BadInput(f"--tree {name}: look-ups draft chains")
    wanted.check(limit=None)
    device = device or default_device()
    config.measure.steps = default_steps(torch_device(device))
    if not prompts:
        print("headstart: planned on a few general prompts; give --prompts with some of your traffic", file=sys.stderr)
    with OwnedFolder(output, command="headstart plan", settings=settings) as folder:
        folder.check_settings(settings, finished="plan.json", overwrite=overwrite)
        started = time.perf_counter()
        computed = dtype or default_dtype(target, device)
        with doing(f"loading {target}"):
            loaded = Target.load(target, dtype=computed, device=device, adapter=adapter or None)
        budget = Budget(seconds or SECONDS, loading=time.perf_counter() - started)
        traffic = wanted.load(loaded, max_new_tokens=max_new_tokens, limit=None)[0]
        traffic = traffic.subset(evenly(len(traffic.prompts), limit))
        name, chosen = build_drafter(spec, loaded, window=draft_window)
        if words := learnt_text(learnt_share(recorded_training(spec, name), traffic, loaded)):
            warn(f"{name} on {traffic.name}: {words}: the plan says little of other prompts")
        compile_within(budget, loaded, num_shapes=config.num_shapes)
        planned = Planner(loaded, chosen, traffic, config, name, budget).plan()
        folder.record(settings)
        environment = Environment.of(loaded)
        document = {**planned.to_json(), "environment": asdict(environment)}
        write_json(folder.path / "plan.json", {**document, "target": asdict(TargetInfo.of(loaded))})
        page = write_plan_page(folder.path, planned, target, environment.device)
    show_plan(planned, page, PlainConsole(), verbose=verbose)
