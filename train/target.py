"""The target of a run: whole, or without its layers where all their states were extracted before."""

import os
from pathlib import Path
from typing import Any

from rich.console import Console

from ..configs.errors import first_line
from ..data_pipelines.storage.shards import read_manifest
from ..heads.families import reads_layers
from ..heads.target import Target
from ..heads.targets.bare import BareTarget, NeedsLayers
from ..heads.targets.dtype import with_default_dtype
from ..heads.targets.parts import OutputUse
from .config import RunConfig
from .data import extracted_validation
from .launch import runs_on_cpu


def load_target(run: RunConfig, console: Console) -> Target:
    """The target of a run. Trained from extracted features, it is loaded without its layers unless something else of
    the run reads them: then a line says what. Raises BadInput as `Target.load`, and if there are no such features."""
    config = with_default_dtype(run.target, "cpu" if runs_on_cpu(run.train) else "cuda")
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
