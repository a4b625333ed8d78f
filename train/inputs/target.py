"""The target of a run: whole, sharded over its processes, without its layers, or behind a server of its states."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from ...base.errors import BadInput, first_line
from ...base.files import remove
from ...data_pipelines.rows.config import DataConfig
from ...data_pipelines.served.reading import ServedReader, fields_of_served
from ...data_pipelines.served.vllm_process import beside_training, served_states
from ...data_pipelines.storage.extract import TOKENS, ExtractConfig, Extraction, fields_of, is_finished
from ...data_pipelines.storage.features import Reads, origin_of
from ...data_pipelines.storage.shard_file import StoredSample
from ...data_pipelines.storage.shards import Shards, ShardWriter, read_manifest
from ...engines.heads import build_head
from ...heads.base import HeadConfig
from ...heads.stored.fit import build_skeleton_head
from ...targets.bare import BareTarget, NeedsLayers
from ...targets.dtype import with_default_dtype
from ...targets.frozen_model import OutputUse
from ...targets.loading import TargetConfig
from ...targets.sharded import ShardedTarget
from ...targets.skeleton import load_skeleton
from ...targets.target import Target
from .config import Inputs, RunConfig
from .data import extracted_validation
from .launch import runs_on_cpu
from .main_process import on_main

VALIDATION = "validation"  # in the run folder: the rows of data.validation with their states


def load_target(run: RunConfig, accelerator: Accelerator, console: Console) -> Target:
    """The target of a run, sharded over its processes if train.shard_target.

    Trained from extracted features, or from states of a server, it is loaded without its layers unless something else
    of the run reads them: then a line says what. Raises: BadInput as `Target.load`, and if there are no such features.
    """
    data = run.data
    if not run.engine.is_ours:
        why = f"head {run.head.type} reads them" if run.head.reads_layers else None
        key = f"engine.name {run.engine.name}"
        return without_layers(run.target, console, key=key, why=why)  # in the dtype of extracted states
    config = with_default_dtype(run.target, "cpu" if runs_on_cpu(run.train) else "cuda")
    if run.train.shard_target:
        return ShardedTarget.read(config, accelerator.device, num_processes=accelerator.num_processes)
    if data.features is None:
        return Target.load(**vars(config))
    fields = read_manifest(Path(data.features)).fields
    why = reader_of_layers(run, fields)
    use = None if why is not None else OutputUse(**fields["output"])
    return without_layers(config, console, key="data.features", why=why, use=use)


def check_target_use(run: RunConfig, accelerator: Accelerator) -> None:
    """Raises BadInput if the target can be neither sharded nor spared its layers as the run asks."""
    if run.train.shard_target:
        check_shardable(run, accelerator)
    if not run.engine.is_ours:
        if accelerator.num_processes > 1 and not run.engine.server:
            raise BadInput("engine.server: several processes ask one that runs; start it first (docs/launching.md)")
        if run.data.validation and run.train.decode_prompts:
            problem = f"train.decode_prompts {run.train.decode_prompts}: decoding takes the target's layers"
            raise BadInput(f"{problem}, which the server spares: leave it out")


def without_layers(
    config: TargetConfig, console: Console, *, key: str, why: str | None = None, use: OutputUse | None = None
) -> Target:
    """The target without its layers; with them if something reads them, or it cannot be: then a line says why.

    Args: key: that spares the layers. why: they are read all the same; None: they are not. use: as in
        `BareTarget.read`.
    """
    if why is None:
        try:
            return BareTarget.read(config, use)
        except NeedsLayers as error:
            why = f"its parts cannot be read alone ({first_line(error)})"
    console.print(f"{key}: the target is loaded with its layers: {why}")
    return Target.load(**vars(config))


def check_shardable(run: RunConfig, accelerator: Accelerator) -> None:
    """Raises BadInput if the target of the run cannot, or need not, be sharded over its processes."""
    whys = {
        "one process would hold all of it: launch several": accelerator.num_processes == 1,
        "with target.device_map one process has all GPUs: leave one of both out": run.target.device_map is not None,
        "training from data.features needs no layers: leave it out": run.data.features is not None,
        "training from a server's states needs no layers: leave it out": not run.engine.is_ours,
        f"head {run.head.type} reads the layers' weights itself": run.head.reads_layers,
        "an adapter is merged into whole layers: leave target.adapter out": run.target.adapter is not None,
        "sharded layers cannot decode: leave train.decode_prompts out": bool(run.train.decode_prompts),
    }
    if why := next((why for why, holds in whys.items() if holds), None):
        raise BadInput(f"train.shard_target: {why}")


def reader_of_layers(run: RunConfig, fields: dict[str, Any]) -> str | None:
    """What of a run from extracted features reads the target's layers; None: nothing. fields: of their manifest."""
    if run.head.reads_layers:
        return f"head {run.head.type} reads them"
    if run.data.validation and extracted_validation(run.data) is None:
        return "data.validation is text; `headstart data extract` makes features of it too"
    if run.data.validation and run.train.decode_prompts:
        return f"train.decode_prompts is {run.train.decode_prompts}"
    known = OutputUse.__dataclass_fields__.keys()
    if not isinstance(fields.get("output"), dict) or fields["output"].keys() != known:
        return "the features do not say how its output layer is used; extract them again"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# A server


def reads_of(run: Inputs, target: Target) -> Reads:
    """The target states that the run's head reads; the head is built without weights if its family allows that."""
    if is_built(run.head):
        return Reads.of(build_head(replace(run.head, draft_vocab_size=None), target))
    return Reads.of(build_skeleton_head(run.head, load_skeleton(run.target)))


def is_built(head: HeadConfig) -> bool:
    """Whether the head has to be built to know what it reads, as its config does not say it."""
    return bool(getattr(head, "path", None)) or getattr(head, "init", None) == "checkpoint"


def why_built_with_layers(head: HeadConfig) -> str | None:
    """Why `reads_of` takes the target's layers; None: it does not."""
    return f"head {head.type} reads them" if is_built(head) and head.reads_layers else None


def open_server(
    run: RunConfig, target: Target, accelerator: Accelerator, console: Console, holding: ExitStack
) -> ServedReader | None:
    """This rank's reader of the server's states, until `holding` ends; None: the run has no server.

    Raises: BadInput, naming what differs, if the server does not give what the run's head reads of this target.
    """
    if run.engine.is_ours:
        return None
    how = {"source": run.target, "max_length": min(run.data.max_length, target.num_positions), "console": console}
    how |= {"storage_dtype": "bfloat16" if target.dtype == torch.bfloat16 else "float32"}  # every bit of the states
    folder, rank, engine = Path(run.train.output_dir), accelerator.process_index, run.engine
    if not engine.servers:  # the user's flags come last, and win
        engine = replace(engine, args=" ".join([*beside_training(), engine.args]))
    return holding.enter_context(served_states(engine, target, reads_of(run, target), folder, rank=rank, **how))


def served_validation(
    rows: Sequence[StoredSample],
    config: DataConfig,
    reader: ServedReader,
    accelerator: Accelerator,
    folder: Path,
    console: Console,
) -> Shards:
    """The rows of data.validation with states: those that an earlier start left in the run folder, else asked for now,
    a part by each rank. Args: config: `data:` with the rows' largest length. folder: of the run."""
    output, target = folder / VALIDATION, reader.target
    settings = ExtractConfig(storage_dtype=reader.storage_dtype)
    origin = origin_of(replace(config, train=config.validation or [], num_rows=None), target.tokenizer)
    fields = fields_of(target, reader.reads, settings, origin) | fields_of_served(reader.served)

    def begin() -> None:
        try:
            if is_finished(output, fields, engine=reader.served.engine):
                return
        except BadInput:  # of other rows: they may change during a run
            pass
        remove(output)
        writer = ShardWriter(output / TOKENS)
        for row in rows:
            writer.add(row)
        writer.finish()

    on_main(accelerator, begin)
    if (output / TOKENS).is_dir():
        extraction = Extraction(Shards(output / TOKENS), target, reader.reads, config=settings, fields=fields)
        on_main(accelerator, lambda: extraction.check_disk(output))
        line = f"data.validation: the states of {len(rows)} rows come from {reader.server.url}"
        console.print(line, soft_wrap=True)
        extraction.run(output, rank=accelerator.process_index, num_ranks=accelerator.num_processes, start=reader.start)
        accelerator.wait_for_everyone()
        on_main(accelerator, lambda: extraction.finish(output))
    return Shards(output)
