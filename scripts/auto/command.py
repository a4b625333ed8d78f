"""`headstart auto`, as a command."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ...configs.errors import BadInput
from ..unattended.options import TIME, Device, Dtype, Launcher, Seed

TRAFFIC = partial(typer.Option, rich_help_panel="Traffic")


def auto(
    *,
    target: Annotated[str, TRAFFIC(help="The target: local folder or hub id.")],
    prompts: Annotated[str, TRAFFIC(help="JSONL rows with prompt, messages or turns: what it is asked.")],
    chats: Annotated[str, TRAFFIC(help="More rows to learn from, with answers that this target wrote.")] = "",
    max_new_tokens: Annotated[int, TRAFFIC(help="Tokens per answer, at most.", min=2)] = 128,
    budget: Annotated[str, TIME(help="The time for all of it: 90s, 20m, 2h.")],
    output: Annotated[Path, TIME(help="Folder for auto.html, auto.json and all that is made.")],
    engine: Annotated[str, TIME(help="That will serve the head: headstart, vllm, sglang or llama.cpp.")] = "headstart",
    batch_size: Annotated[int, TIME(help="Rows that are served at a time.", min=1)] = 1,
    load: Annotated[
        float,
        TIME(help="Instead: requests per second. Rows that they keep busy follow from step times.", min=0),
    ] = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "",
    device: Device = "",
    launcher: Launcher = "",
) -> None:
    """Find the best head for a target, its traffic and this machine within a time, and whether it is worth deploying.

    \b
    Example:
      headstart auto --target MODEL --prompts prompts.jsonl --budget 2h --output runs/auto

    It measures what can pay here, has the target answer the prompts, trains the candidates by successive halving on
    predicted speedup, goes on with the best until the time ends, measures it on prompts that were held out, and says
    what to deploy, or that nothing pays. The same command again continues a run that was killed. Each step is an
    ordinary command, which is printed; auto.json has every decision with its figures.
    """
    from ...heads.loading import default_device
    from ..unattended.clock import parse_budget
    from ..unattended.session import check_started_once, digest, opened, target_dtype
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
        traffic=digest([path for path in (prompts, chats) if path]),
    )
    with opened("headstart auto", output, settings, Journal.read, Session) as run:
        run_all(run)
