"""The command `headstart refit`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..unattended.options import RUN, Device, Dtype, Launcher, Seed

HEAD = partial(typer.Option, rich_help_panel="Head and traffic")


def refit(
    *,
    target: Annotated[str, HEAD(help="The target of the head: local folder or hub id.")],
    head: Annotated[str, HEAD(help="The head that is deployed now: folder or hub id.")],
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
    from ..unattended.clock import parse_budget
    from ..unattended.session import check_started_once, digest, open_session, target_dtype
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
        rows=digest([path for path in (traffic, replay, *weights, target) if path]),
    )
    with open_session("headstart refit", output, settings, Journal.read, Session) as run:
        run_all(run)
