"""Preparing a run: target, rows, head and optimizer, from its config or its last checkpoint."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from ..base.errors import BadInput, naming
from ..base.files import remove_unfinished
from ..base.owned import OwnedFolder, check_owner
from ..configs.loader import dump_config
from ..data_pipelines.storage.shards import Shards
from ..engines.heads import build_head, check_family, head_record, start_head
from ..heads.base import DraftBatch, DraftHead
from ..heads.loss.fusing import fuse
from ..heads.start.closed_form import too_few
from ..heads.stored.fit import check_fit
from ..targets.adapters import add_adapters
from ..targets.cpu.packing import pack_linears
from ..targets.target import Target
from .backend import Backend
from .checkpoint import Best, Progress, checkpoints, load_checkpoint, read_progress
from .inputs.config import RunConfig, TrainConfig, differing_key
from .inputs.data import (
    TrainingData,
    check_sources,
    check_stored_states,
    load_data,
    with_draft_size,
    with_draft_vocabulary,
)
from .inputs.launch import RankPlace, actual_launch, check_environment, product_dtype, start_accelerator
from .inputs.main_process import held_by_main
from .inputs.provenance import read_starts, record_start, states_record
from .inputs.target import check_target_use, load_target, open_server, served_validation
from .optim import build_optimizer, without_whole_matrices
from .training_record import TrainingRecord
from .watching.tracking import check_trackers
from .watching.trend import Trend

ROWS_AT_ONCE, TOKENS_AT_ONCE = 4, 8192  # most, that a head's start is made of; one row in any case
COMPILED_FROM = 500  # steps; in fewer, the seconds of compiling are estimated not to pay


@dataclass
class Start:
    """Everything that a run starts from. owned: its folder, in the main process."""

    run: RunConfig  # the head's part resolved for the target
    target: Target
    accelerator: Accelerator
    place: RankPlace
    data: TrainingData
    head: DraftHead
    optimizer: torch.optim.Optimizer
    checkpoint: Path | None  # the last; None: the run starts anew
    progress: Progress  # of the checkpoint
    record: TrainingRecord
    owned: OwnedFolder | None


def find_inputs(run: RunConfig, folder: Path, console: Console, holding: ExitStack) -> Start:
    """Load and check everything that a run needs, what is cheap first. Raises BadInput on anything that would make it
    fail later.

    Args: holding: the stack that keeps the run folder locked.
    """
    skeleton = check_before_loading(run, folder)

    # the processes
    accelerator = start_accelerator(run.train)
    console.quiet = console.quiet or not accelerator.is_main_process
    if line := check_environment(os.environ):
        console.print(line)
    place = RankPlace.of(accelerator, run.train)
    check_target_use(run, accelerator)
    check_sources(run.data, encoded=folder / "tokens")
    if run.train.precision == "bf16" and product_dtype(run.train) == torch.float32:
        console.print("train.precision bf16: this CPU has no instructions for it, so products are in fp32")
    if (warm_up := run.train.warm_up) < (asked := run.train.warmup_steps):
        console.print(
            f"train.warmup_steps {asked}: not below train.max_steps {run.train.max_steps}; {warm_up} are taken"
        )
    launched = for_backend(run, accelerator, console)

    # the run folder, whether it holds the beginning of this very run, and the rows: mostly no weights are needed
    with naming("train.output_dir "):
        command, settings = "headstart train", asdict(launched)
        owned = held_by_main(accelerator, folder, command=command, settings=settings, holding=holding)
    checkpoint = next(reversed(checkpoints(folder / "checkpoints")), None)
    progress = read_progress(checkpoint) if checkpoint else Progress(0, accelerator.num_processes, Best(), Trend())
    is_fresh = checkpoint is None and run.train.start_from is None
    begun = (folder / "config.yaml").is_file()
    known = load_target(run, accelerator, console) if skeleton is None else skeleton
    asked = as_begun(folder, launched, known, progress, accelerator) if begun else launched
    data = load_data(asked, known, accelerator, console)
    is_fitted, num_tokens = is_fresh and run.head.is_fitted, data.samples.manifest.num_supervised_tokens
    if lack := too_few(num_tokens, known.hidden_size) if is_fitted else None:
        console.print(lack)

    # the target
    target = load_target(run, accelerator, console) if known is skeleton else known
    if target.is_spread and accelerator.num_processes > 1:
        raise BadInput("target.device_map: one process has all GPUs of the target: launch one, as headstart train does")
    fuse_where_asked(run.train, accelerator.device, console)
    data.reader = reader = open_server(asked, target, accelerator, console, holding)
    sized, draft_token_ids = with_draft_vocabulary(asked, data, target, console)
    whole = replace(sized, head=sized.head.resolved(target))
    if begun:
        check_same_inputs(folder, target, data)

    # the head and its optimizer
    target.to(accelerator.device)
    pack_linears(target.base, without=target.layers if target.is_sharded else ())
    head = first_head(sized, target, draft_token_ids, console)
    if reader is not None and data.validation and not isinstance(data.validation, Shards):
        data.validation = served_validation(data.validation, data.config, reader, accelerator, folder, console)
    check_stored_states(data, head, target)
    if checkpoint is None:
        rows = first_batches(whole.train, data, head)
        if not is_fresh and whole.train.optimizer == "muon" and not whole.train.lora_rank:
            head.measure(rows)
        elif is_fresh and (line := head.begin_training(rows, fits=lack is None)):
            console.print(line)
    optimizer, record = build_optimizer(head, whole.train), TrainingRecord.of(whole, target, data)
    return Start(whole, target, accelerator, place, data, head, optimizer, checkpoint, progress, record, owned)


def check_before_loading(run: RunConfig, folder: Path) -> Target | None:
    """Raises BadInput on what is wrong and known without weights: the head's sizes, trackers, the run folder, the
    head to start from. Returns the target without weights; None if it cannot be built so."""
    check_trackers(run.train)
    if run.train.patience and not run.data.validation:
        raise BadInput(f"train.patience {run.train.patience}: counts validations, so data.validation must be given")
    with naming("train.output_dir "):
        check_owner(folder, command="headstart train")
    if run.train.start_from is not None:
        with naming("train.start_from: "):
            check_family(run.head, run.train.start_from)
    return check_fit(run.head, run.target)


def for_backend(run: RunConfig, accelerator: Accelerator, console: Console) -> RunConfig:
    """The run as the launched backend can train it: without Muon where processes hold parts of matrices."""
    backend = actual_launch(accelerator).backend
    if run.train.optimizer != "muon" or backend not in ("deepspeed", "fsdp2"):
        return run
    train = without_whole_matrices(run.train, backend)
    console.print(f"AdamW at {train.learning_rate}: {backend} has parts of matrices, not Muon's whole ones")
    return replace(run, train=train)


def as_begun(folder: Path, run: RunConfig, target: Target, progress: Progress, accelerator: Accelerator) -> RunConfig:
    """The run with the size of the draft vocabulary that its folder was begun with. Raises BadInput if that holds a run
    of another config, or one that cannot go on with so many processes."""
    written = written_config(folder)
    if run.train.draft_coverage and run.head.draft_vocab_size is None:
        run = with_draft_size(run, written["head"]["draft_vocab_size"])
    resolved = replace(run, head=run.head.resolved(target))
    check_same_run(folder, written, resolved, before=progress.num_processes, now=accelerator.num_processes)
    return run


def fuse_where_asked(train: TrainConfig, device: torch.device, console: Console) -> None:
    """`fuse` as train.compile says; if that is None, in long runs on a GPU, and a failure only prints a line."""
    pays = device.type == "cuda" and train.max_steps >= COMPILED_FROM
    try:
        fuse(pays if train.compile is None else train.compile, device)
    except BadInput as error:
        if train.compile:
            raise
        console.print(f"{error}: steps run as they are, slower")


def set_up(start: Start, folder: Path) -> Backend:
    """Head and optimizer as the last checkpoint left them, on the run's devices; writes config.yaml and run.json."""
    accelerator = start.accelerator
    state = load_checkpoint(start.checkpoint, start.head) if start.checkpoint else {}
    backend = Backend(accelerator, start.head, start.optimizer, start.run.train)
    backend.load_optimizer_state(state)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        remove_unfinished(folder / "checkpoints")
        dump_config(start.run, folder / "config.yaml")
        record_start(folder / "run.json", start.target, start.data, num_processes=accelerator.num_processes)
        if start.owned is not None:
            start.owned.keep()
    return backend


def first_head(run: RunConfig, target: Target, draft_token_ids: Tensor | None, console: Console) -> DraftHead:
    """The head before the first step: fresh, or as an earlier run left it, and then perhaps with adapters to train.

    Args: draft_token_ids: [Vd] of `with_draft_vocabulary`.
    """
    config, folder = run.train, run.train.start_from
    if folder is None:
        return build_head(run.head, target, draft_token_ids=draft_token_ids, seed=config.seed)
    with naming("train.start_from: "):
        head = start_head(run.head, target, folder, draft_token_ids=draft_token_ids, seed=config.seed)
    before, now = head_record(folder), head.config.as_dict()
    if before.fingerprint not in (None, target.stored_fingerprint):
        name = before.target_name
        console.print(f"train.start_from: a head of another target, {name}; it goes on for {target.name}")
    changed = [key for key, value in before.head.items() if now.get(key) != value]
    if changed:
        console.print(f"train.start_from: that head was trained with another {', '.join(changed)}")
    if config.lora_rank:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            add_adapters(
                head,
                rank=config.lora_rank,
                alpha=config.lora_alpha,
                outputs=head.vocabulary_matrices(),
                key="train.lora_rank",
            )
    return head


def first_batches(config: TrainConfig, data: TrainingData, head: DraftHead) -> Iterator[DraftBatch]:
    """The rows in the order of training, once; the same in every process, and however a step's rows are spread."""
    longest = int(data.samples.lengths.max())
    num_rows = min(ROWS_AT_ONCE, max(1, TOKENS_AT_ONCE // longest), len(data.samples))
    plan = data.plan(batch_size=num_rows, seed=config.seed)
    for number in range(max(1, len(data.samples) // num_rows)):
        yield data.batch(plan.rows(number)).to(head.target.device).filled(head.read_target)


def written_config(folder: Path) -> dict[str, Any]:
    """config.yaml of a run that goes on. Raises BadInput if it is damaged."""
    path = folder / "config.yaml"
    try:
        written = yaml.safe_load(path.read_text())
        _ = written["head"]["draft_vocab_size"], written["train"]["batch_size"], written["train"]["accumulation"]
        return written
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: cannot be read, so the run in {folder} cannot be continued") from error


def check_same_run(folder: Path, written: dict[str, Any], run: RunConfig, *, before: int, now: int) -> None:
    """Raises BadInput if a run folder holds a run of another config.

    With another number of processes, batch_size and accumulation may differ too: a step must read the same rows.

    Args: written: its config. before, now: processes that trained it, and that are to go on.
    """
    if before != now:
        size, times, config = written["train"]["batch_size"], written["train"]["accumulation"], run.train
        was, would = f"{before} x {size} x {times}", f"{now} x {config.batch_size} x {config.accumulation}"
        counted = "(processes x batch_size x accumulation) rows a step"
        if before * size * times != now * config.batch_size * config.accumulation:
            raise BadInput(f"{folder} was trained with {was} {counted}, this would be {would}: the products must agree")
        if run.data.layout == "bucketed" and before * size != now * config.batch_size:
            raise BadInput(f"{folder} was trained with {was} {counted}: bucketed, processes x batch_size must stay")
        written["train"] |= {"batch_size": config.batch_size, "accumulation": config.accumulation}
    key = differing_key(run, written)
    if key is not None:
        raise BadInput(f"{folder} holds a run with another {key}; choose another train.output_dir")


def check_same_inputs(folder: Path, target: Target, data: TrainingData) -> None:
    """Raises BadInput if the target's weights, or the rows, are not those that the run was started with."""
    for start in read_starts(folder / "run.json")[-1:]:
        if start["target"]["fingerprint"] != target.fingerprint:
            name = start["target"]["name"]
            raise BadInput(f"{folder} holds a run on another target, {name}; choose another train.output_dir")
        if start["data"]["sha256"] != [shard.sha256 for shard in data.samples.manifest.shards]:
            raise BadInput(f"{folder} holds a run on other rows; choose another train.output_dir")
        if (before := start["data"].get("states")) != (now := states_record(data)):
            raise BadInput(f"{folder} holds a run on states of {before}, not {now}; choose another train.output_dir")
