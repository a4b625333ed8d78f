"""The commands `headstart auto` and `headstart refit`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ...configs.errors import BadInput

RUN, TRAFFIC, HEAD, MACHINE = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Run", "Traffic", "Head and traffic", "Machine")
)

Seed = Annotated[int, RUN(help="Seed of the split into held-out and training rows, and of training.", min=0)]
Dtype = Annotated[
    str,
    MACHINE(help="Of the target: float32, bfloat16, float16 or auto; default: as for `headstart eval`."),
]
Device = Annotated[str, MACHINE(help="cpu, cuda, cuda:1 ...; default: cuda if available, else cpu.")]
Launcher = Annotated[
    str, MACHINE(help="Command that starts training on several devices: 'accelerate launch --config_file FILE'.")
]


def auto(
    *,
    target: Annotated[str, TRAFFIC(help="The target: local folder or hub id.")],
    prompts: Annotated[str, TRAFFIC(help="Prompts of the traffic: JSONL rows with prompt, messages or turns.")],
    chats: Annotated[str, TRAFFIC(help="More training rows, JSONL, with answers that this target wrote.")] = "",
    max_new_tokens: Annotated[int, TRAFFIC(help="Maximum number of tokens per answer.", min=2)] = 128,
    budget: Annotated[str, RUN(help="Time for the whole run: 90s, 20m, 2h.")],
    output: Annotated[Path, RUN(help="Folder for auto.html, auto.json and everything else that the run writes.")],
    engine: Annotated[
        str, RUN(help="Engine that will serve the head: headstart, vllm, sglang or llama.cpp.")
    ] = "headstart",
    batch_size: Annotated[int, RUN(help="Number of rows that are served at a time.", min=1)] = 1,
    load: Annotated[
        float,
        RUN(help="Instead of --batch-size: requests per second, from which the batch size is derived.", min=0),
    ] = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "",
    device: Device = "",
    launcher: Launcher = "",
) -> None:
    """Find the best head for a target, its traffic and this machine within a time budget, and whether to deploy it.

    \b
    Example:
      headstart auto --target MODEL --prompts prompts.jsonl --budget 30m --output runs/auto

    The run measures which heads can pay on this machine and has the target answer the prompts. It trains the candidates
    by successive halving on predicted speedup, and the best one for the remaining time. It measures that head on
    held-out prompts, and recommends what to deploy, or nothing. Run the same command again to resume a run that was
    killed. Each step is an ordinary command, which is printed. auto.json has all decisions with their figures.
    """
    from ...heads.loading import default_device
    from .auto import AUTO
    from .candidates import check_engine
    from .clock import parse_budget
    from .page import write_auto_page
    from .session import AutoRun, AutoSettings, files_digest, run_stages, target_dtype

    check_engine(engine)
    if load and batch_size != 1:
        raise BadInput("give --load or --batch-size, not both")
    device = device or default_device()
    settings = AutoSettings(
        target=target,
        prompts=prompts,
        chats=chats,
        budget=parse_budget(budget),
        engine=engine,
        batch_size=batch_size,
        load=load,
        max_new_tokens=max_new_tokens,
        dtype=target_dtype(target, device, dtype),
        device=device,
        launcher=launcher,
        seed=seed,
        traffic=files_digest([path for path in (prompts, chats, target) if path]),
    )
    with AutoRun.open(output, settings) as run:
        run_stages(run, AUTO, write_auto_page)


def refit(
    *,
    target: Annotated[str, HEAD(help="The target of the head: local folder or hub id.")],
    head: Annotated[str, HEAD(help="The head that is deployed now: folder or hub id.")],
    adapter: Annotated[
        str, HEAD(help="Folder of a LoRA adapter (peft) with which the target served the traffic.")
    ] = "",
    traffic: Annotated[str, HEAD(help="What was served: JSONL of requests with their responses, or of chats.")],
    replay: Annotated[str, HEAD(help="JSONL of rows that the head was trained on, so that it does not forget.")] = "",
    replay_share: Annotated[
        float, HEAD(help="Share of the --replay rows among the training rows.", min=0.0, max=0.9)
    ] = 0.5,
    temperature: Annotated[
        float | None,
        HEAD(help="Temperature of the served answers; default: as the rows say, else estimated.", min=0.0),
    ] = None,
    max_length: Annotated[
        int, HEAD(help="Maximum number of tokens per conversation; longer ones are cut.", min=16)
    ] = 2048,
    budget: Annotated[str, RUN(help="Time for the whole run: 90s, 30m, 2h.")],
    output: Annotated[Path, RUN(help="Folder for refit.html, refit.json and everything else that the run writes.")],
    seed: Seed = 0,
    dtype: Dtype = "",
    device: Device = "",
    launcher: Launcher = "",
) -> None:
    """Train a deployed head further on the traffic that it serves, or report that this would gain nothing.

    \b
    Example:
      headstart refit --target MODEL --head HEAD --traffic logs.jsonl --replay old.jsonl --budget 30m --output DIR

    The run finds answers that the target did not write, and leaves them out. It reports by domain and week how well the
    head drafts the rest. It trains the head further, with old rows among the new ones, and goes only as far from the
    old weights as old rows allow. It recommends the new head if that drafts better on held-out conversations and not
    worse on old ones. Run the same command again to resume a run that was killed. refit.json has all decisions with
    their figures.
    """
    from ...heads.loading import default_device
    from .clock import parse_budget
    from .page import write_refit_page
    from .reading import RefitRun
    from .refit import REFIT
    from .session import RefitSettings, files_digest, run_stages, target_dtype

    device = device or default_device()
    weights = [str(Path(head, name)) for name in ("config.json", "model.safetensors")]
    settings = RefitSettings(
        target=target,
        head=head,
        adapter=adapter,
        traffic=traffic,
        replay=replay,
        replay_share=replay_share,
        temperature=temperature,
        max_length=max_length,
        budget=parse_budget(budget),
        dtype=target_dtype(target, device, dtype),
        device=device,
        launcher=launcher,
        seed=seed,
        rows=files_digest([path for path in (traffic, replay, *weights, target, adapter) if path]),
    )
    with RefitRun.open(output, settings) as run:
        run_stages(run, REFIT, write_refit_page)
