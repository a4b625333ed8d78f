"""`headstart plan`: which K or tree to serve at which batch size, and where to leave drafting off."""

import json
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from typer import Option

from ..configs.errors import BadInput
from ..configs.loader import PACKAGE_CONFIGS
from ..configs.terminal import PlainConsole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..eval.plan.budget import Budget
    from ..eval.plan.document import Plan, PlanConfig
    from ..eval.plan.prediction import Cell, RecommendedCell
    from ..eval.plan.scheduling import ScheduledLoad
    from ..eval.suites.prompts import Suite
    from ..heads.drafter import Drafter
    from ..heads.target import Target

GENERAL_PROMPTS = str(PACKAGE_CONFIGS / "prompts" / "general.jsonl")


def plan(
    target: Annotated[str, Option(help="The target: local folder or hub id.")],
    output: Annotated[Path, Option(help="Folder for plan.json and machine.json.")],
    prompts: Annotated[
        str, Option(help="JSONL rows as for `headstart eval`: the traffic to plan for. [default: a few of ours]")
    ] = "",
    suite: Annotated[str, Option(help="Instead: a suite by name, as for `headstart eval`; also NAME=FILE.")] = "",
    suites_dir: Annotated[
        Path, Option(envvar="HEADSTART_SUITES", help="Where suites' files are; else from the hub.")
    ] = Path("suites"),
    system: Annotated[str | None, Option(help="A system prompt, put in front of chats that have none.")] = None,
    thinking: Annotated[str, Option(help="on or off: what the chat template is told as enable_thinking.")] = "",
    head: Annotated[str, Option(help="RUN/final, an exported head, or a hub id.")] = "",
    drafter: Annotated[str, Option(help="Instead of a head: as `headstart eval --drafter` takes it.")] = "",
    synthetic_acceptance: Annotated[
        str, Option(help="Instead of a head: 0.8,0.6,0.5, rates of draft positions. Drafting is free, see --head-type.")
    ] = "",
    head_type: Annotated[
        str, Option(help="With synthetic rates: an untrained head of this family drafts too, which costs time.")
    ] = "",
    num_draft_tokens: Annotated[list[int] | None, Option(help="K. Repeatable. [default: 1 to 8]", min=1)] = None,
    tree: Annotated[list[str] | None, Option(help="NAME:NODES; none. [default: static:4, :8, :16, dynamic:16]")] = None,
    batch_size: Annotated[list[int] | None, Option(help="Repeatable. [default: 1, 4, 16]", min=1)] = None,
    context: Annotated[list[int] | None, Option(help="Also plan for so much context. Repeatable.", min=1)] = None,
    machine: Annotated[str, Option(help="Predict for this machine: a shipped profile's name, or a machine.json.")] = "",
    served: Annotated[
        Path | None, Option(help="For llama-server instead: what `headstart export --to llama.cpp` wrote of this head.")
    ] = None,
    server_bin: Annotated[Path | None, Option(envvar="LLAMA_SERVER", help="Its binary, or xllamacpp.")] = None,
    server_args: Annotated[str, Option(help="More flags of its, as one types them.")] = "",
    check: Annotated[
        str, Option(help="Measure too: advice (the most promising, to choose from), all (every cell), none.")
    ] = "advice",
    max_new_tokens: Annotated[int, Option(help="Tokens per answer, at most.", min=2)] = 128,
    limit: Annotated[int, Option(help="At most N prompts, spread evenly over the file.", min=1)] = 32,
    temperature: Annotated[float, Option(help="0 is greedy.", min=0.0)] = 0.0,
    repeats: Annotated[int, Option(help="Timed passes per side of a check.", min=1)] = 2,
    seconds: Annotated[
        float, Option(help="For all but loading the target, at most: fewer prompts and passes where need be.", min=1.0)
    ] = 60.0,
    dtype: Annotated[str, Option(help="As for `headstart eval`.")] = "",
    device: Annotated[str, Option(help="cpu, cuda ...; default: cuda where there is one.")] = "",
    adapter: Annotated[str, Option(help="Folder of a LoRA adapter (peft) with which the target is served.")] = "",
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a finished plan of other settings.")] = False,
) -> None:
    """Plan a deployment: expected speedup of each K and tree by batch size and context, and what to serve.

    \b
    Examples:
      headstart plan --target MODEL --head runs/a/final --prompts prompts.jsonl --output runs/a/plan
      headstart plan --target MODEL --synthetic-acceptance 0.8,0.7,0.6 --prompts prompts.jsonl --output runs/what-if
      headstart plan --target MODEL --head runs/a/final --machine h100-llama-3.1-8b-vllm ...
      headstart plan --target MODEL --head runs/a/final --served served/a --server-bin llama-server ...

    Each setting decodes the prompts once, for what is accepted; a few rounds are timed per setting, batch size and
    context. The most promising are then measured, chosen from, and the prediction's error shown. With --served rounds
    are timed in llama-server. With --machine nothing is timed: the profile says what steps take there. machine.json is
    this machine's profile, for use elsewhere. What is decoded and timed is chosen to fit --seconds; plan.json has the
    rounds behind each prediction, and its interval.
    """
    settings = {key: value for key, value in locals().items() if key not in ("output", "overwrite")}

    from ..configs.owned import OwnedFolder
    from ..eval.decoding.replay import default_steps
    from ..eval.measurement.config import MeasureConfig
    from ..eval.plan.accepting import evenly
    from ..eval.plan.budget import Budget, compiled_within
    from ..eval.plan.machine_profile import load_profile
    from ..eval.plan.planner import PlanConfig, Planner
    from ..eval.plan.served import ServedPlanner, exported_files
    from ..heads.loading import default_device
    from ..heads.target import Target
    from ..heads.targets.dtype import default_dtype
    from .eval_run import WantedSuites, progress
    from .evaluate import torch_device

    rates = check_choices(head, drafter, synthetic_acceptance, head_type)
    if adapter and served:
        raise BadInput(f"--adapter {adapter}: llama-server computes without it: leave one out")
    if served and (not head or machine):
        raise BadInput(f"--served {served}: goes with --head, and without --machine")
    files_served = exported_files(served, server_bin, server_args) if served else None
    if prompts and suite:
        raise BadInput("give --prompts or --suite, not both: a plan is for one kind of traffic")
    files, named = ([], [suite]) if suite else ([prompts or GENERAL_PROMPTS], [])
    wanted = WantedSuites.of(files, named, suites_dir, system=system, thinking=thinking, told="")
    config = PlanConfig(
        measure=MeasureConfig(max_new_tokens=max_new_tokens, temperature=temperature, num_repeats=repeats),
        lengths=num_draft_tokens or range(1, 9),
        trees=None if tree is None else [name for name in tree if name != "none"],
        batch_sizes=sorted(set(batch_size or ((1,) if served else (1, 4, 16)))),
        contexts=context or (),
        check=check,
        machine=load_profile(machine) if machine else None,
    )
    device = device or default_device()
    config.measure.steps = default_steps(torch_device(device))
    if not (prompts or suite):
        print("headstart: planned on a few general prompts; give --prompts with some of your traffic", file=sys.stderr)
    with OwnedFolder(output, command="headstart plan", settings=settings) as folder:
        folder.check_settings(settings, finished="plan.json", overwrite=overwrite)
        started = time.perf_counter()
        computed = dtype or default_dtype(target, device)
        loaded = Target.load(target, dtype=computed, device=device, adapter=adapter or None)
        budget = Budget(seconds, loading=time.perf_counter() - started)
        traffic = wanted.load(loaded, max_new_tokens=max_new_tokens, limit=None)[0]
        traffic = traffic.subset(evenly(len(traffic.prompts), limit))
        spec = f"head:{head}" if head else drafter
        with compiled_within(budget, loaded, num_shapes=config.num_shapes):
            if rates:
                traffic, config = answerable(loaded, traffic, config, budget)
            new = config.measure.max_new_tokens
            name, chosen = planned_drafter(loaded, spec, traffic, rates, head_type, max_new_tokens=new)
            kind = partial(ServedPlanner, files=files_served) if files_served else Planner
            planned = kind(loaded, chosen, traffic, config, name, bar=progress, budget=budget).plan()
        folder.record(settings)
        write_plan(loaded, planned, folder.path)
    show(planned, PlainConsole())
    print(f"written to {output / 'plan.json'}")


def check_choices(head: str, drafter: str, synthetic_acceptance: str, head_type: str) -> list[float]:
    """Synthetic rates, empty where a drafter is given. Raises BadInput unless exactly one of the first three is."""
    from ..heads.registry import HEADS

    if sum(map(bool, (head, drafter, synthetic_acceptance))) != 1:
        raise BadInput("give one of --head, --drafter and --synthetic-acceptance")
    if head_type and not synthetic_acceptance:
        raise BadInput(f"--head-type {head_type}: goes with --synthetic-acceptance")
    if head_type and head_type not in HEADS:
        raise BadInput(f"--head-type {head_type}: expected one of {', '.join(HEADS)}")
    try:
        return [float(rate) for rate in synthetic_acceptance.split(",")] if synthetic_acceptance else []
    except ValueError as error:
        raise BadInput(f"--synthetic-acceptance {synthetic_acceptance}: expected numbers, 0.8,0.6,0.5") from error


def answerable(target: "Target", suite: "Suite", config: "PlanConfig", budget: "Budget") -> "tuple[Suite, PlanConfig]":
    """As many prompts and tokens as fit: synthetic drafts are made from answers that the target writes beforehand."""
    from ..eval.plan.accepting import evenly
    from ..eval.plan.budget import fit_texts, probe

    costs = probe(target, None, None, max(suite.prompts, key=len), budget, config.measure, many=1)
    number, room, tokens = len(suite.prompts), budget.room("texts"), config.measure.max_new_tokens
    num_prompts, tokens = fit_texts(number, costs, seconds=room, tokens=tokens)
    measure = replace(config.measure, max_new_tokens=tokens)
    return suite.subset(evenly(number, num_prompts)), replace(config, measure=measure)


def planned_drafter(
    target: "Target", spec: str, suite: "Suite", rates: list[float], head_type: str, *, max_new_tokens: int
) -> "tuple[str, Drafter]":
    """What to plan for, and its name: as `headstart eval` takes it, or drafts that are right at the given rates."""
    from ..eval.drafters.registry import build_drafter
    from ..eval.drafters.synthetic import SyntheticDrafter
    from ..heads.registry import HEADS, build_head

    if not rates:
        return build_drafter(spec, target)
    inner = None
    if head_type:
        inner = build_head(HEADS[head_type].config_class(type=head_type), target).to(target.dtype).eval()
    name = f"synthetic {','.join(f'{rate:g}' for rate in rates)}" + f" like {head_type}" * bool(head_type)
    return name, SyntheticDrafter(target, suite.prompts, rates, max_new_tokens=max_new_tokens, inner=inner)


def write_plan(target: "Target", planned: "Plan", output: Path) -> None:
    """plan.json, and machine.json where step times were measured, each whole or not at all."""
    from ..configs.files import write_json
    from ..eval.measurement.environment import Environment, TargetInfo
    from ..eval.plan.machine_profile import fit_profile

    here = Environment.of(target)
    if planned.step_times and planned.engine == "headstart":
        source = f"headstart plan, headstart {here.headstart}, torch {here.torch}, {here.num_threads} threads"
        name, device = output.resolve().name, here.device
        profile = fit_profile(target, planned.step_times, name=name, device=device, source=source)
        planned.step_time_model = profile
        write_json(output / "machine.json", asdict(planned.step_time_model))
    document = {**planned.to_json(), "environment": asdict(here), "target": asdict(TargetInfo.of(target))}
    write_json(output / "plan.json", document)


def show(planned: "Plan", console: Console) -> None:
    """A table of settings by batch size, what is recommended, and the flags of serving engines."""
    cells = {(cell.setting, cell.batch_size): cell for cell in planned.cells if cell.load == "prompts"}
    sizes = sorted({size for _, size in cells})
    titles = ("length", *(f"batch {size}" for size in sizes))
    table = Table("setting", *(Column(title, justify="right") for title in titles), box=SIMPLE_HEAD, pad_edge=False)
    for accepted in planned.acceptance:
        speedups = [speedup_text(cells[accepted.setting, size]) for size in sizes]
        table.add_row(accepted.setting.name, f"{accepted.length:.2f}", *speedups)
    console.print(f"{planned.drafter} on {planned.suite}: predicted speedup, measured in brackets")
    console.print(table)
    for advice in planned.recommendation:
        cell = advice.cell
        busy = ", all rows busy" if cell.load == "steady" else ""
        what = f"{cell.setting.name}, {speedup_text(cell)} times the speed{proof_text(advice)}"
        if advice.is_off:
            what = f"leave drafting off: the best is {what}"
        console.print(f"batch {cell.batch_size}, {cell.context} tokens of context{busy}: {what}", highlight=False)
    show_budget(planned, console)
    check = planned.check
    if check.num_cells:
        apart = f"median {check.median_error:.1%}, at most {check.max_error:.1%}"
        console.print(f"prediction against measurement in {check.num_cells} cells: {apart} apart", highlight=False)
    most = max((part.num_draft_tokens for part in planned.vllm_schedule), default=0)
    if most:
        keys = {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": planned.vllm_schedule}
        console.print(f"vLLM, in --speculative-config: {json.dumps(keys)[1:-1]}", highlight=False, soft_wrap=True)
    show_schedules(planned.schedules, console)
    if planned.sglang_flags:
        console.print(f"SGLang: {planned.sglang_flags}", highlight=False, soft_wrap=True)
    if planned.llamacpp_flags:
        console.print(f"llama-server: {planned.llamacpp_flags}", highlight=False, soft_wrap=True)


def show_schedules(loads: "Sequence[ScheduledLoad]", console: Console) -> None:
    """What verifying by confidence is predicted to be worth at each load, and whether vLLM should do so."""
    from ..eval.plan.scheduling import never_slower

    for load in loads:
        how = "enable_adaptive_verification" if load.engine == "vllm" else "--verify-cost measured"
        fixed = f"K {load.fixed_num_draft_tokens}" if load.fixed_num_draft_tokens else "no drafts"
        pays = "" if load.pays else f": keep to {fixed}"
        console.print(
            f"batch {load.batch_size}, all rows busy: {load.engine}'s {how} {load.gain:.2f} times the speed of "
            f"{fixed}, {load.drafts_verified:.1f} drafts verified, on {load.num_texts} texts{pays}",
            highlight=False,
            soft_wrap=True,
        )
    if never_slower(loads, "vllm"):
        keys = '"enable_adaptive_verification": true, without num_speculative_tokens_per_batch_size'
        console.print(f"vLLM, at all of these loads instead: {keys}", highlight=False, soft_wrap=True)


def show_budget(planned: "Plan", console: Console) -> None:
    """What the figures are based on, and what was left out for lack of time."""
    spent, passes = planned.budget, {time.num_timed for time in planned.step_times if time.setting}
    timed = f", {min(passes)} to {max(passes)} rounds timed of each setting" if passes else ""
    new = f"{planned.num_prompts} of {spent.num_prompts_given} prompts, {planned.max_new_tokens} new tokens each"
    console.print(f"predicted from {new}{timed}", highlight=False)
    limit = "" if spent.seconds is None else f" of {spent.seconds:.0f}"
    used, loading = spent.seconds_used, spent.seconds_loading
    console.print(f"took {used:.0f}{limit} s, and {loading:.0f} s to load the target", highlight=False)
    if spent.left_out:
        missed = f"no time for: {', '.join(spent.left_out)}; --seconds gives more"
        console.print(missed, highlight=False, soft_wrap=True)


def proof_text(advice: "RecommendedCell") -> str:
    """The evidence for a recommendation: a confidence interval, or something weaker."""
    from ..eval.measurement.metrics import LEAST_TIMED
    from ..eval.report.one_result import counted_words

    cell, unit = advice.cell, "prompt" if advice.cell.batch_size == 1 else "batch"
    low, high = cell.measured_ci95
    if advice.is_proved:
        proof = f", 95 % interval [{low:.2f}, {high:.2f}] over {counted_words(cell.num_timed or 0, unit)}"
        by_chance = advice.is_off and (low or 0) > 1
        return proof + (f", and from {cell.measured_low:.2f} as the best of several" if by_chance else "")
    if cell.measured_speedup is None:
        low, high = cell.predicted_ci95
        sure = "" if low is None or high is None else f", over these prompts [{low:.2f}, {high:.2f}]"
        return f"; predicted from {counted_words(cell.num_rounds, 'round')}{sure}, not measured"
    return f"; not proved: {counted_words(cell.num_timed or 0, unit)} timed, {LEAST_TIMED} are needed"


def speedup_text(cell: "Cell") -> str:
    """`1.92 (1.88)`."""
    measured = "" if cell.measured_speedup is None else f" ({cell.measured_speedup:.2f})"
    return f"{cell.predicted_speedup:.2f}{measured}"
