"""The command `headstart auto`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ...configs.errors import BadInput
from ..unattended.options import RUN, Device, Dtype, Launcher, Seed

TRAFFIC = partial(typer.Option, rich_help_panel="Traffic")


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
      headstart auto --target MODEL --prompts prompts.jsonl --budget 2h --output runs/auto

    The run measures which heads can pay on this machine and has the target answer the prompts. It trains the candidates
    by successive halving on predicted speedup, and the best one for the remaining time. It measures that head on
    held-out prompts, and recommends what to deploy, or nothing. Run the same command again to resume a run that was
    killed. Each step is an ordinary command, which is printed. auto.json has all decisions with their figures.
    """
    from ...heads.loading import default_device
    from ..unattended.clock import parse_budget
    from ..unattended.session import check_started_once, digest, open_session, target_dtype
    from .candidates import check_engine
    from .journal import Journal
    from .run import run_all
    from .session import Session, Settings

    check_started_once("headstart auto")
    seconds = parse_budget(budget)
    check_engine(engine)
    if load and batch_size != 1:
        raise BadInput("give --load or --batch-size, not both")
    device = device or default_device()
    settings = Settings(
        target=target,
        prompts=prompts,
        chats=chats,
        budget=seconds,
        engine=engine,
        batch_size=batch_size,
        load=load,
        max_new_tokens=max_new_tokens,
        dtype=target_dtype(target, device, dtype),
        device=device,
        launcher=launcher,
        seed=seed,
        traffic=digest([path for path in (prompts, chats, target) if path]),
    )
    with open_session("headstart auto", output, settings, Journal.read, Session) as run:
        run_all(run)
