"""What the main process does alone, such as writing files, while the others wait for it."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ...base.errors import BadInput
from ...base.owned import OwnedFolder

LONGEST_WAIT_SECONDS = 24 * 3600.0
turns: Counter[int] = Counter()  # by process, the number of its `on_main` calls


def held_by_main(
    accelerator: Accelerator, path: str | Path, *, command: str, settings: Mapping[str, Any], holding: ExitStack
) -> OwnedFolder | None:
    """The folder that a command writes, held by the main process until `holding` ends; None in the others."""
    held: list[OwnedFolder] = []
    folder = partial(OwnedFolder, path, command=command, settings=settings)
    on_main(accelerator, lambda: held.append(holding.enter_context(folder())))
    return next(iter(held), None)


def on_main(accelerator: Accelerator, work: Callable[[], object]) -> None:
    """Do the work in the main process, while the others wait however long it takes; its BadInput is raised in all."""
    problem: list[str | None] = [None]
    key = f"headstart/main/{turns[accelerator.process_index]}"
    turns[accelerator.process_index] += 1
    if accelerator.is_main_process:
        try:
            work()
        except BadInput as error:
            problem = [str(error)]
        finally:
            if accelerator.num_processes > 1:
                dist.distributed_c10d._get_default_store().set(key, "done")
    else:
        wait_for(key)
    broadcast_object_list(problem)
    if problem[0] is not None:
        raise BadInput(problem[0])


def wait_for(key: str) -> None:
    """Wait until the processes' store has a key. A collective would time out after ten minutes (NCCL).

    Raises: BadInput after LONGEST_WAIT_SECONDS.
    """
    store, began = dist.distributed_c10d._get_default_store(), time.monotonic()
    while not store.check([key]):
        waited = time.monotonic() - began
        if waited > LONGEST_WAIT_SECONDS:
            raise BadInput(f"the main process has not been done with its data for {waited / 3600:.0f} hours")
        time.sleep(0.1)
