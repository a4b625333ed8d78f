"""`headstart refit`, as a command."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..unattended.options import TIME, Device, Dtype, Launcher, Seed

HEAD = partial(typer.Option, rich_help_panel="Head and traffic")


def refit(
    *,
    target: Annotated[str, HEAD(help="The target that serves: local folder or hub id.")],
    head: Annotated[str, HEAD(help="The head that drafts for it now: folder or hub id.")],
    traffic: Annotated[str, HEAD(help="JSONL of what was served: requests with their responses, or chats.")],
    replay: Annotated[str, HEAD(help="JSONL of what the head was trained on, so that it is not forgotten.")] = "",
    replay_share: Annotated[float, HEAD(help="Share of those rows in what is learnt.", min=0.0, max=0.9)] = 0.5,
    temperature: Annotated[
        float | None, HEAD(help="At which it was served; default: as rows say, else found out.", min=0.0)
    ] = None,
    max_length: Annotated[int, HEAD(help="Tokens of a conversation; longer ones are cut.", min=16)] = 2048,
    budget: Annotated[str, TIME(help="The time for all of it: 90s, 30m, 2h.")],
    output: Annotated[Path, TIME(help="Folder for refit.html, refit.json and all that is made.")],
    seed: Seed = 0,
    dtype: Dtype = "",
    device: Device = "",
    launcher: Launcher = "",
) -> None:
    """Retrain a head on the traffic that it serves, or report that this would gain nothing.

    \b
    Example:
      headstart refit --target MODEL --head HEAD --traffic logs.jsonl --replay old.jsonl --budget 30m --output DIR

    Answers that the target did not write are found and left out; what the head drafts of the rest is reported by domain
    and week; it learns on from there, with old rows among the new; and the result is offered where it is shown to be
    better on conversations that were held out, and no worse on old ones. The same command again continues a run that
    was killed. refit.json has every decision with its figures.
    """
    from ...heads.loading import default_device
    from ..unattended.clock import parse_budget
    from ..unattended.session import check_started_once, digest, opened, target_dtype
    from .journal import Journal
    from .run import run_all
    from .session import Session, Settings

    check_started_once("headstart refit")
    device = device or default_device()
    weights = [str(Path(head, name)) for name in ("config.json", "model.safetensors")]
    settings = Settings(
        target=target,
        head=head,
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
        rows=digest([path for path in (traffic, replay, *weights) if path]),
    )
    with opened("headstart refit", output, settings, Journal.read, Session) as run:
        run_all(run)
