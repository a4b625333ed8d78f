"""`headstart auto`, as a command."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ...configs.errors import BadInput

TRAFFIC, TIME, MACHINE = (partial(typer.Option, rich_help_panel=panel) for panel in ("Traffic", "Run", "Machine"))


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
    seed: Annotated[int, TIME(help="Of the split and of training.", min=0)] = 0,
    dtype: Annotated[str, MACHINE(help="As for `headstart eval`.")] = "",
    device: Annotated[str, MACHINE(help="cpu, cuda ...; default: cuda where there is one.")] = "",
    launcher: Annotated[
        str, MACHINE(help="What starts training on several devices: 'accelerate launch --config_file FILE'.")
    ] = "",
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
    from ...configs.owned import OwnedFolder
    from ...configs.terminal import PlainConsole
    from ...data_pipelines.answers.store import check_settings
    from ...heads.loading import default_device
    from ...train.stopping import Stopping
    from ..unattended.clock import Clock, parse_budget
    from ..unattended.session import digest, target_dtype
    from .candidates import check_engine
    from .journal import Journal
    from .run import run_all
    from .session import Session, Settings

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BadInput("headstart auto is started once; --launcher says how training is started on several devices")
    seconds = parse_budget(budget)
    check_engine(engine)
    device = device or default_device()
    settings = Settings(
        target=target,
        prompts=prompts,
        chats=chats,
        budget=seconds,
        engine=engine,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        dtype=target_dtype(target, device, dtype),
        device=device,
        launcher=launcher,
        seed=seed,
        traffic=digest([path for path in (prompts, chats) if path]),
    )
    with OwnedFolder(output, command="headstart auto", settings=vars(settings)) as folder:
        check_settings(folder.settings, vars(settings), folder=folder.path)
        with Stopping() as stopping:
            clock = Clock(folder.path / "clock.json", seconds)
            journal = Journal.read(folder.path, vars(settings))
            run_all(Session(settings, journal, folder.path, clock, stopping, PlainConsole(stderr=True), folder.keep))
