"""The target of a run: whole, sharded over its processes, or without its layers where their states were extracted."""

import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console

from ..configs.errors import BadInput, first_line
from ..data_pipelines.storage.shards import read_manifest
from ..heads.families import reads_layers
from ..heads.target import Target
from ..heads.targets.bare import BareTarget, NeedsLayers
from ..heads.targets.dtype import with_default_dtype
from ..heads.targets.parts import OutputUse
from ..heads.targets.sharded import ShardedTarget
from .config import RunConfig
from .data import extracted_validation
from .launch import runs_on_cpu


def load_target(run: RunConfig, accelerator: Accelerator, console: Console) -> Target:
    """The target of a run, sharded over its processes if train.shard_target.

    Trained from extracted features, it is loaded without its layers unless something else of the run reads them: then a
    line says what. Raises: BadInput as `Target.load`, if it cannot be sharded, and if there are no such features.
    """
    config = with_default_dtype(run.target, "cpu" if runs_on_cpu(run.train) else "cuda")
    if run.train.shard_target:
        check_shardable(run, accelerator)
        return ShardedTarget.read(config, accelerator.device, num_processes=accelerator.num_processes)
    if run.data.features is None:
        return Target.load(**vars(config))
    fields = read_manifest(Path(run.data.features)).fields
    why = reader_of_layers(run, fields)
    if why is None:
        try:
            return BareTarget.read(config, OutputUse(**fields["output"]))
        except NeedsLayers as error:
            why = f"its parts cannot be read alone ({first_line(error)})"
    if os.environ.get("RANK", "0") == "0":
        console.print(f"data.features: the target is loaded with its layers: {why}")
    return Target.load(**vars(config))


def check_shardable(run: RunConfig, accelerator: Accelerator) -> None:
    """Raises BadInput if the target of the run cannot, or need not, be sharded over its processes."""
    whys = {
        "one process would hold all of it: launch several": accelerator.num_processes == 1,
        "with target.device_map one process has all GPUs: leave one of both out": run.target.device_map is not None,
        "training from data.features needs no layers: leave it out": run.data.features is not None,
        f"head {run.head.type} reads the layers' weights itself": reads_layers(run.head),
        "sharded layers cannot decode: leave train.decode_prompts out": bool(run.train.decode_prompts),
    }
    if why := next((why for why, holds in whys.items() if holds), None):
        raise BadInput(f"train.shard_target: {why}")


def reader_of_layers(run: RunConfig, fields: dict[str, Any]) -> str | None:
    """What of a run from extracted features reads the target's layers; None: nothing. fields: of their manifest."""
    if reads_layers(run.head):
        return f"head {run.head.type} reads them"
    if run.data.validation and extracted_validation(run.data) is None:
        return "data.validation is text; `headstart data extract` makes features of it too"
    if run.data.validation and run.train.decode_prompts:
        return f"train.decode_prompts is {run.train.decode_prompts}"
    known = OutputUse.__dataclass_fields__.keys()
    if not isinstance(fields.get("output"), dict) or fields["output"].keys() != known:
        return "the features do not say how its output layer is used; extract them again"
    return None
