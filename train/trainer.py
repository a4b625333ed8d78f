"""The one training loop: a frozen target reads each batch, a head learns to draft what follows."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from torch import Tensor

from ..configs.errors import BadInput
from ..configs.loader import dump_config
from ..data_pipelines.loader import Batch
from ..heads.adapters import add_adapters
from ..heads.base import DraftHead
from ..heads.chains import chain_starts, mean_of
from ..heads.documents import Documents
from ..heads.fit import check_fit
from ..heads.fusing import fuse
from ..heads.registry import build_head, head_record, save_head, start_head
from ..heads.target import Target, TargetOutput
from .backend import Backend
from .checkpoint import checkpoints, load_checkpoint, read_progress, remove_partial, save_checkpoint
from .config import RunConfig, TrainConfig, differing_key
from .data import check_stored_states, draft_token_ids, load_data, removed_on_failure
from .launch import start_accelerator
from .optim import build_optimizer, schedule
from .provenance import origin, write_provenance
from .speed import Speed
from .steering import Best, Validation
from .stopping import Stopping
from .tracking import Tracker, check_trackers
from .training_record import training_record


def train(run: RunConfig, *, console: Console | None = None) -> Path:
    """Train a head as the config says, from its last checkpoint if the run folder has one; returns the head's folder.

    Raises: BadInput on anything the user can mend, before the run folder is touched; SystemExit with a signal's exit
    code after SIGTERM or SIGINT, with a checkpoint of the step that was under way.
    """
    console = console or Console(stderr=True)

    # ---- inputs: everything that can be wrong is found here ----
    check_fit(run.head, run.target)
    check_trackers(run.train)
    if run.train.patience and not run.data.validation:
        raise BadInput(f"train.patience {run.train.patience}: counts validations, so data.validation must be given")
    # the target is loaded before the Accelerator exists: DeepSpeed's would partition it under ZeRO-3
    target = Target.load(run.target.path, **{k: v for k, v in asdict(run.target).items() if k != "path"})
    folder = Path(run.train.output_dir)
    accelerator = start_accelerator(run.train)
    if target.is_spread and accelerator.num_processes > 1:
        raise BadInput("target.device_map: one process has all GPUs of the target: launch one, as headstart train does")
    fuse(run.train.compile, accelerator.device)
    with removed_on_failure(folder / "tokens"):
        data = load_data(run, target, accelerator, console)
        target.to(accelerator.device)
        head = first_head(run, target, draft_token_ids(run, data, target, console), console)
        check_stored_states(data, head, target)
        optimizer = build_optimizer(head, run.train)
        done = checkpoints(folder / "checkpoints")
        progress = read_progress(done[-1]) if done else {"step": 0, "num_processes": accelerator.num_processes}
        if (folder / "final").is_dir() or (folder / "config.yaml").is_file():
            check_same_run(folder, run, before=progress["num_processes"], now=accelerator.num_processes)
    if (folder / "final").is_dir():
        console.print(f"{folder} holds this run, finished; nothing to do (another train.output_dir starts anew)")
        return folder / "final"

    # ---- state ----
    first_step, best = progress["step"], Best(**progress.get("best", {}))
    state = load_checkpoint(done[-1], head) if done else {}
    num_parameters = sum(p.numel() for p in head.parameters() if p.requires_grad)
    backend = Backend(accelerator, head, optimizer, run.train)
    backend.load_optimizer_state(state)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        remove_partial(folder / "checkpoints")
        try:
            dump_config(run, folder / "config.yaml")
            write_provenance(folder, origin(target, data, num_processes=accelerator.num_processes))
        except OSError as error:
            raise BadInput(f"train.output_dir {folder}: {error.strerror}") from error
    ranks = {"num_ranks": accelerator.num_processes, "rank": accelerator.process_index}
    plan = data.plan(batch_size=run.train.batch_size, seed=run.train.seed, **ranks)
    say = console.print if accelerator.is_main_process else lambda *_: None
    say(
        f"{run.head.type}: {num_parameters:,} parameters on {target.name}; {len(data.samples)} rows, "
        f"{run.data.layout}, {plan.padding():.0%} padding; steps from {first_step}"
    )

    # ---- the loop ----
    last_step = min(run.train.max_steps, run.train.stop_at_step or run.train.max_steps)
    validation = Validation(run.train, backend, target, data.validation) if data.validation else None
    record, measured = training_record(run, target, data), None
    how: dict[str, Any] = {"is_main": accelerator.is_main_process, "console": console}
    with (
        Stopping() as stopping,
        Tracker(folder, num_steps=run.train.max_steps, first_step=first_step, **how) as tracker,
    ):
        tracker.start(run)
        loop = Loop(run.train, backend, target, stopping)
        per_step = run.train.accumulation
        batches = data.batches(plan, range(first_step * per_step, last_step * per_step))
        count, is_over = first_step, False
        for step in range(first_step, last_step):
            row = loop.step(step, batches)
            count = step + 1
            is_last = count == last_step or loop.should_stop
            if count % run.train.log_every == 0 or is_last:
                row["epoch"] = round(plan.epoch(count * per_step), 4)
                tracker.log(row, figures=f"loss {row['loss']:.4f}")
            if validation and (is_due(count, run.train.validate_every) or count == run.train.max_steps):
                measured = validation.measure()
                tracker.log({"step": count, "validation": measured})
                say(f"step {count}: loss {row['loss']:.4f}, {in_words(measured)}")
                if best.take(count, measured["acceptance_length"]):
                    loop.write_head(folder / "best", {**record, "steps": count, "validation": measured})
                is_over = count == run.train.max_steps or 0 < run.train.patience <= best.waited
            is_over = is_over or count == run.train.max_steps
            if is_due(count, run.train.checkpoint_every) or (is_last and not is_over):
                loop.save(folder / "checkpoints", step=count, best=best)
            if is_last or is_over:
                break
    if not is_over:
        why = f"{stopping.received.name}: " if stopping.received else ""
        say(f"{why}stopped at step {count} of {run.train.max_steps}; the same command goes on from there")
        if loop.should_stop:
            raise SystemExit(stopping.exit_code)
        return folder
    loop.write_head(folder / "final", {**record, "steps": count, "validation": measured})
    if best.step:
        early = f"no better validation in {best.waited}: ended at step {count}; " if count < run.train.max_steps else ""
        say(f"{early}best acceptance length {best.acceptance_length} at step {best.step}, in {folder / 'best'}")
    say(f"head written to {folder / 'final'}")
    return folder / "final"


class Loop:
    """One optimizer step, and what is kept of it, over whatever Accelerate runs on."""

    def __init__(self, config: TrainConfig, backend: Backend, target: Target, stopping: Stopping):
        self.config, self.backend, self.target, self.stopping = config, backend, target, stopping
        self.accelerator, self.head, self.optimizer = backend.accelerator, backend.head, backend.optimizer
        self.speed = Speed(self.accelerator.device, torch.bfloat16 if config.precision == "bf16" else torch.float32)
        self.should_stop = False  # some rank was told to; all of them know it after the same step

    def step(self, step: int, batches: Iterator[Batch]) -> dict[str, Any]:
        """One optimizer step over the next `accumulation` batches; returns its metrics row.

        Denominators are the supervised chains, by their labels' weights, of all ranks and all batches of the step: how
        rows are spread over ranks and batches does not change the gradient.
        """
        started = time.perf_counter()
        taken = list(islice(batches, self.config.accumulation))
        waited = time.perf_counter() - started
        torch.manual_seed(seed_of(self.config.seed, step, self.accelerator.process_index))
        share, scales = schedule(step, self.config), self.head.learning_rate_scales(step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share * scales.get(group["part"], 1.0)
        num_positions = sum(batch.input_ids.numel() for batch in taken)
        with self.speed.counted(num_positions):
            row = self._learn([batch.to(self.accelerator.device) for batch in taken])
        if not math.isfinite(row["loss"]):
            raise BadInput(f"step {step + 1}: the loss is {row['loss']}; lower train.learning_rate or check the data")
        seconds, num_ranks = time.perf_counter() - started, self.accelerator.num_processes
        return {
            "step": step + 1,
            **row,
            "learning_rate": self.config.learning_rate * share,
            "padding": round(1 - sum(batch.num_tokens for batch in taken) / num_positions, 4),
            **self.speed.row(num_positions=num_positions, seconds=seconds, waited=waited, num_devices=num_ranks),
        }

    def _learn(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Forward, backward and update; returns the figures of all ranks."""
        starts = [chain_starts(batch.loss_mask, self.head.num_depths) for batch in batches]
        weighted = [one.counts(batch.weights) for one, batch in zip(starts, batches, strict=True)]
        num_chains = torch.stack([one.counts() for one in starts]).sum(0)
        denominators, num_chains = self.backend.total(
            torch.stack([torch.stack(weighted).sum(0), num_chains])
        )  # [K] each
        sums, hits = torch.zeros_like(denominators), torch.zeros_like(denominators)
        loss = torch.zeros((), device=self.accelerator.device)
        for i, batch in enumerate(batches):
            with self.backend.accumulating(is_last=i == len(batches) - 1):
                out = self.backend.loss(batch.filled(self._read), denominators)
                self.backend.backward(out.loss)  # the denominators are those of all ranks already
            loss += out.loss.detach()
            sums += out.depth_loss
            hits += out.hits.sum((0, 1))
        grad_norm = self.backend.update()
        told = loss.new_full((1,), float(self.stopping.received is not None))
        totals = self.backend.total(torch.cat([told, loss[None], sums, hits]))
        self.should_stop, loss, sums, hits = bool(totals[0] > 0), totals[1], *totals[2:].chunk(2)
        return {
            "loss": loss.item(),
            "depth_loss": mean_of(sums, denominators).tolist(),
            "depth_accuracy": mean_of(hits, num_chains).tolist(),
            "grad_norm": grad_norm,
            "num_supervised": int(num_chains[0]),
        }

    def _read(self, input_ids: Tensor, *, documents: Documents | None = None) -> TargetOutput:
        """What the head reads of the live target."""
        return self.target.forward(input_ids, feature_layers=self.head.feature_layers, documents=documents)

    def save(self, folder: Path, *, step: int, best: Best) -> None:
        """A checkpoint, by the main process, of what all hold."""
        weights, state = self.backend.weights(), self.backend.optimizer_state()
        if self.accelerator.is_main_process:
            progress = {"step": step, "num_processes": self.accelerator.num_processes, "best": asdict(best)}
            save_checkpoint(folder, weights, state, progress=progress, keep=self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def write_head(self, folder: Path, training: dict[str, Any]) -> None:
        """The head as it is, to be loaded, with what is known of its training, by the main process."""
        with self.backend.whole() as whole:
            if self.accelerator.is_main_process:
                save_head(whole, folder, training=training)
        self.accelerator.wait_for_everyone()


def first_head(run: RunConfig, target: Target, ids: Tensor | None, console: Console) -> DraftHead:
    """The head before the first step: fresh, or as an earlier run left it, and then perhaps with adapters to train."""
    config, folder = run.train, run.train.start_from
    if folder is None:
        return build_head(run.head, target, draft_token_ids=ids, seed=config.seed)
    try:
        head = start_head(run.head, target, folder, seed=config.seed)
    except BadInput as error:
        raise BadInput(f"train.start_from: {error}") from error
    before, now = head_record(folder), head.config.as_dict()
    if before["target"]["fingerprint"] not in (None, target.fingerprint):
        name = before["target"]["name"]
        console.print(f"train.start_from: a head of another target, {name}; it goes on for {target.name}")
    changed = [key for key, value in before["head"].items() if now.get(key) != value]
    if changed:
        console.print(f"train.start_from: that head was trained with another {', '.join(changed)}")
    if config.lora_rank:
        size = target.vocab_size if head.vocabulary is None else len(head.vocabulary.to_target)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            add_adapters(head, rank=config.lora_rank, alpha=config.lora_alpha, vocab_size=size, key="train.lora_rank")
    return head


def check_same_run(folder: Path, run: RunConfig, *, before: int, now: int) -> None:
    """Raises BadInput where a run folder holds a run of another config.

    With another number of processes, batch_size and accumulation may differ too: a step must read the same rows.

    Args: before, now: processes that trained it, and that are to go on.
    """
    path = folder / "config.yaml"
    try:
        written = yaml.safe_load(path.read_text())
        shape = {key: written["train"][key] for key in ("batch_size", "accumulation")}
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: cannot be read, so the run in {folder} cannot be continued") from error
    if before != now:
        size, times, config = shape["batch_size"], shape["accumulation"], run.train
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


def in_words(measured: Mapping[str, Any]) -> str:
    """A validation in a line."""
    said = f"acceptance length {measured['acceptance_length']} taught"
    return f"{said}, {measured['decoded']['acceptance_length']} decoded" if "decoded" in measured else said


def seed_of(seed: int, step: int, rank: int) -> int:
    """The seed of whatever a rank draws in a step: a resumed run draws the same."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
