"""The commands `headstart auto` and `headstart refit`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.errors import BadInput
from .evaluating.engine_options import (
    LARGEST_SEED,
    MOST_NEW,
    MOST_ROWS,
    WINDOW_HELP,
    EngineArgs,
    EngineName,
    EnginePython,
    engine_of,
)

if TYPE_CHECKING:
    from ..engines.servers.setting import EngineSetting

RUN, TRAFFIC, HEAD, MACHINE = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Run", "Traffic", "Head and traffic", "Machine")
)

Seed = Annotated[
    int, RUN(help="Seed of the split into held-out and training rows, and of training.", min=0, max=LARGEST_SEED)
]
Dtype = Annotated[
    str,
    MACHINE(help="Of the target: float32, bfloat16, float16 or auto; default: as for `headstart eval`."),
]
Device = Annotated[str, MACHINE(help="cpu or cuda; default: cuda if available, else cpu.")]
Verbose = Annotated[bool, RUN("--verbose", help="Print each command that is run.")]
Launcher = Annotated[
    str, MACHINE(help="Command that starts training on several devices: 'accelerate launch --config_file FILE'.")
]
Concurrency = Annotated[
    list[int] | None,
    RUN(help="Questions in flight in the server. Repeatable. [default: --batch-size, else 1]", min=1, max=MOST_ROWS),
]


def auto(
    *,
    target: Annotated[str, TRAFFIC(help="The target: local folder or hub id.")],
    prompts: Annotated[str, TRAFFIC(help="Prompts of the traffic: JSONL rows with prompt, messages or turns.")],
    adapter: Annotated[str, TRAFFIC(help="Folder of a LoRA adapter (peft) of the target; with --engine vllm.")] = "",
    max_new_tokens: Annotated[int, TRAFFIC(help="Maximum number of tokens per answer.", min=2, max=MOST_NEW)] = 128,
    draft_window: Annotated[str, RUN(help=WINDOW_HELP)] = "",
    budget: Annotated[str, RUN(help="Time for the whole run: 90s, 20m, 2h.")],
    output: Annotated[Path, RUN(help="Folder for auto.html, auto.json and everything else that the run writes.")],
    engine: EngineName = "headstart",
    engine_python: EnginePython = "",
    engine_args: EngineArgs = "",
    concurrency: Concurrency = None,
    batch_size: Annotated[int, RUN(help="Number of rows that are served at a time.", min=1, max=MOST_ROWS)] = 1,
    seed: Seed = 0,
    dtype: Dtype = "",
    device: Device = "",
    launcher: Launcher = "",
    verbose: Verbose = False,
) -> None:
    """Find the best head for a target, its traffic and this machine within a time budget, and whether to deploy it.

    \b
    Example:
      headstart auto --target MODEL --prompts prompts.jsonl --budget 30m --output runs/auto

    The run measures which heads can pay on this machine and has the target answer the prompts. It trains the candidates
    by successive halving on predicted speedup, and the best one for the remaining time. It measures that head on
    held-out prompts, and recommends what to deploy, or nothing. Run the same command again to resume a run that was
    killed. Each step is an ordinary command, which the page has. auto.json has all decisions with their figures.
    """
    from ..engines.export import ENGINES
    from ..eval.drafters.registry import check_window
    from ..targets.loading import default_device
    from .unattended.auto import stages
    from .unattended.candidates import heads_read
    from .unattended.page import write_auto_page
    from .unattended.running.clock import parse_budget
    from .unattended.running.session import AutoRun, AutoSettings, files_digest, run_stages, target_dtype
    from .unattended.target_server import TargetServer

    known = ("headstart", *sorted(ENGINES))
    by = asked_engine(engine, engine_python, engine_args, known, concurrency=concurrency, dtype=dtype, device=device)
    check_window(draft_window, "head")
    if ":" in str(output):
        raise BadInput(f"--output {output}: a colon cannot be in the path of a head")
    if adapter and engine != "vllm":
        raise BadInput(f"--adapter {adapter}: goes with --engine vllm, which serves it; else merge it")
    device = device or default_device()
    settings = AutoSettings(
        target=target,
        adapter=adapter,
        prompts=prompts,
        budget=parse_budget(budget),
        engine=by,
        concurrency=concurrency or [batch_size],
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        draft_window=draft_window,
        dtype=target_dtype(target, device, dtype),
        device=device,
        launcher=launcher,
        seed=seed,
        traffic=files_digest([path for path in (prompts, target, adapter) if path]),
    )
    heads = partial(heads_read, engine, target)
    with AutoRun.open(output, settings, is_verbose=verbose) as run:
        with TargetServer(run, heads) as server:
            run_stages(run, stages(server), write_auto_page)


def refit(
    *,
    target: Annotated[str, HEAD(help="The target of the head: local folder or hub id.")],
    head: Annotated[str, HEAD(help="The head that is deployed now: folder or hub id.")],
    adapter: Annotated[
        str, HEAD(help="Folder of a LoRA adapter (peft) with which the target served the traffic.")
    ] = "",
    traffic: Annotated[str, HEAD(help="What was served: JSONL of requests with their responses, or of chats.")],
    replay: Annotated[str, HEAD(help="JSONL of rows that the head was trained on, so that it does not forget.")] = "",
    max_length: Annotated[
        int, HEAD(help="Maximum number of tokens per conversation; longer ones are cut.", min=16)
    ] = 2048,
    engine: EngineName = "headstart",
    engine_python: EnginePython = "",
    engine_args: EngineArgs = "",
    concurrency: Concurrency = None,
    budget: Annotated[str, RUN(help="Time for the whole run: 90s, 30m, 2h.")],
    output: Annotated[Path, RUN(help="Folder for refit.html, refit.json and everything else that the run writes.")],
    seed: Seed = 0,
    dtype: Dtype = "",
    device: Device = "",
    launcher: Launcher = "",
    verbose: Verbose = False,
) -> None:
    """Train a deployed head further on the traffic that it serves, or report that this would gain nothing.

    \b
    Example:
      headstart refit --target MODEL --head HEAD --traffic logs.jsonl --replay old.jsonl --budget 30m --output DIR

    The run trains the head further on the logged conversations, with old rows among the new ones. It recommends the new
    head if that drafts better on held-out conversations and not worse on old ones. Run the same command again to resume
    a run that was killed. refit.json has all decisions with their figures.
    """
    from ..targets.loading import default_device
    from .unattended.page import write_refit_page
    from .unattended.refit import RefitRun, stages
    from .unattended.running.clock import parse_budget
    from .unattended.running.session import RefitSettings, files_digest, run_stages, target_dtype
    from .unattended.target_server import TargetServer

    known = ("headstart", "vllm", "sglang")
    by = asked_engine(engine, engine_python, engine_args, known, concurrency=concurrency, dtype=dtype, device=device)
    device = device or default_device()
    weights = [str(Path(head, name)) for name in ("config.json", "model.safetensors")]
    settings = RefitSettings(
        target=target,
        head=head,
        adapter=adapter,
        traffic=traffic,
        replay=replay,
        max_length=max_length,
        budget=parse_budget(budget),
        dtype=target_dtype(target, device, dtype),
        device=device,
        launcher=launcher,
        seed=seed,
        engine=by,
        concurrency=concurrency or [1],
        rows=files_digest([path for path in (traffic, replay, *weights, target, adapter) if path]),
    )
    with RefitRun.open(output, settings, is_verbose=verbose) as run, TargetServer(run, run.heads) as server:
        run_stages(run, stages(server), write_refit_page)


def asked_engine(
    name: str, python: str, args: str, known: tuple[str, ...], *, concurrency: list[int] | None, dtype: str, device: str
) -> "EngineSetting":
    """What serves, whose servers are told --dtype too, before the user's flags.

    Raises: BadInput on options that do not go together; on one GPU of several, since servers and trainings in processes
    of their own would take another.
    """
    if name in ("vllm", "sglang") and dtype not in ("", "auto"):
        args = f"--dtype {dtype} {args}".strip()
    engine = engine_of(name, python, args, known=known)
    if engine.is_ours and concurrency:
        raise BadInput("--concurrency: goes with another --engine than headstart")
    if ":" in device:
        number = device.rpartition(":")[2]
        raise BadInput(f"--device {device}: say --device cuda, and CUDA_VISIBLE_DEVICES={number} in the environment")
    return engine
