"""The one training loop: a frozen target reads each batch, a head learns to draft what follows."""

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from ..configs.errors import BadInput
from ..configs.loader import dump_config
from ..data_pipelines.chat import Sample, encode_rows
from ..data_pipelines.loader import BatchPlan, collate
from ..data_pipelines.sources import load_rows
from ..data_pipelines.vocab import coverage, draft_vocabulary
from ..eval.metrics import Acceptance, expected_acceptance
from ..heads.adapters import add_adapters
from ..heads.base import DraftBatch, DraftHead
from ..heads.chains import chain_starts, mean_of
from ..heads.fit import check_fit
from ..heads.registry import build_head, read_head_config, save_head, start_head
from ..heads.target import Target
from .checkpoint import checkpoints, load_checkpoint, save_checkpoint
from .config import RunConfig, TrainConfig, differing_key
from .optim import build_optimizer, schedule
from .tracking import Tracker


def train(run: RunConfig, *, console: Console | None = None) -> Path:
    """Train a head as the config says, from its last checkpoint if the run folder has one; returns the head's folder.

    Raises: BadInput on anything the user can mend, before the run folder is touched.
    """
    console = console or Console(stderr=True)

    # ---- inputs: everything that can be wrong is found here ----
    check_fit(run.head, run.target)
    # the target is loaded before the Accelerator exists: DeepSpeed's would partition it under ZeRO-3
    target = Target.load(run.target.path, **{k: v for k, v in asdict(run.target).items() if k != "path"})
    samples, validation = load_samples(run, target, console)
    ids = draft_token_ids(run, samples, target, console)
    accelerator = start_accelerator(run.train)
    target.to(accelerator.device)
    head = first_head(run, target, ids, console)
    folder = Path(run.train.output_dir)
    if (folder / "final").is_dir() or (folder / "config.yaml").is_file():
        check_same_run(folder, run)
    if (folder / "final").is_dir():
        console.print(f"{folder} holds this run, finished; nothing to do (another train.output_dir starts anew)")
        return folder / "final"

    # ---- state ----
    optimizer = build_optimizer(head, run.train)
    done = checkpoints(folder / "checkpoints")
    first_step = load_checkpoint(done[-1], head, optimizer) if done else 0
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        try:
            dump_config(run, folder / "config.yaml")
        except OSError as error:
            raise BadInput(f"train.output_dir {folder}: {error.strerror}") from error
    wrapped, optimizer = accelerator.prepare(head, optimizer)
    plan = BatchPlan(
        num_rows=len(samples),
        batch_size=run.train.batch_size,
        seed=run.train.seed,
        num_ranks=accelerator.num_processes,
        rank=accelerator.process_index,
    )
    loop = Loop(run.train, accelerator, target, head, wrapped, optimizer)
    say = console.print if accelerator.is_main_process else lambda *_: None
    num_parameters = sum(p.numel() for p in head.parameters() if p.requires_grad)
    say(
        f"{run.head.type}: {num_parameters:,} parameters on {target.name}; {len(samples)} rows; steps from {first_step}"
    )

    # ---- the loop ----
    last_step = min(run.train.max_steps, run.train.stop_at_step or run.train.max_steps)
    is_main = accelerator.is_main_process
    with Tracker(
        folder, num_steps=run.train.max_steps, first_step=first_step, is_main=is_main, console=console
    ) as tracker:
        if run.train.wandb_project:
            tracker.start_wandb(project=run.train.wandb_project, folder=folder, config=asdict(run))
        for step in range(first_step, last_step):
            numbers = range(step * run.train.accumulation, (step + 1) * run.train.accumulation)
            batches = [collate([samples[i] for i in plan.rows(n)], device=accelerator.device) for n in numbers]
            row = loop.step(step, batches)
            count = step + 1
            if count % run.train.log_every == 0 or count == last_step:
                row["epoch"] = round(plan.epoch(numbers[-1] + 1), 4)
                tracker.log(row, figures=f"loss {row['loss']:.4f}")
            if validation and (is_due(count, run.train.validate_every) or count == run.train.max_steps):
                measured = loop.validate(validation)
                tracker.log({"step": count, "validation": measured})
                length = measured["acceptance_length"]
                say(f"step {count}: loss {row['loss']:.4f}, expected acceptance length {length} on the validation rows")
            if is_due(count, run.train.checkpoint_every) or count == last_step < run.train.max_steps:
                loop.save(folder / "checkpoints", step=count)
    if last_step < run.train.max_steps:
        say(f"stopped at step {last_step} of {run.train.max_steps}; the same command goes on from there")
        return folder
    if accelerator.is_main_process:
        save_head(head, folder / "final")
    accelerator.wait_for_everyone()
    say(f"head written to {folder / 'final'}")
    return folder / "final"


class Loop:
    """One optimizer step and one validation, over whatever Accelerate runs on."""

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        target: Target,
        head: DraftHead,
        wrapped: Any,
        optimizer: Any,
    ):
        self.config, self.accelerator, self.target = config, accelerator, target
        self.head, self.wrapped, self.optimizer = head, wrapped, optimizer

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""
        return cast(Tensor, self.accelerator.reduce(values, "sum"))

    def step(self, step: int, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """One optimizer step over accumulated batches (input_ids, loss_mask), [B, T] each; returns its metrics row.

        Denominators are the supervised chains of all ranks and all batches of the step: how rows are spread over ranks
        and batches does not change the gradient.
        """
        started = time.perf_counter()
        share, scales = schedule(step, self.config), self.head.learning_rate_scales(step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share * scales.get(group["part"], 1.0)
        counts = torch.stack([chain_starts(mask, self.head.num_depths).counts() for _, mask in batches]).sum(0)
        denominators = self.total(counts)  # [K]
        sums, hits = torch.zeros_like(denominators), torch.zeros_like(denominators)
        loss = torch.zeros((), device=self.accelerator.device)
        for i, (input_ids, loss_mask) in enumerate(batches):
            output = self.target.forward(input_ids, feature_layers=self.head.feature_layers)
            is_last = i == len(batches) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self.wrapped):
                out = self.wrapped(DraftBatch(input_ids, loss_mask, output), denominators)
                # data parallelism averages gradients over ranks; the denominators are already global
                self.accelerator.backward(out.loss * self.accelerator.num_processes)
            loss += out.loss.detach()
            sums += out.depth_loss
            hits += out.hits.sum((0, 1))
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        totals = self.total(torch.cat([loss[None], sums, hits]))
        loss, sums, hits = totals[0], *totals[1:].chunk(2)
        if not torch.isfinite(loss):
            raise BadInput(f"step {step + 1}: the loss is {loss.item()}; lower train.learning_rate or check the data")
        num_tokens = sum(mask.numel() for _, mask in batches) * self.accelerator.num_processes
        return {
            "step": step + 1,
            "loss": loss.item(),
            "depth_loss": mean_of(sums, denominators).tolist(),
            "depth_accuracy": mean_of(hits, denominators).tolist(),
            "learning_rate": self.config.learning_rate * share,
            "grad_norm": float(norm) if norm is not None else None,
            "num_supervised": int(denominators[0]),
            "tokens_per_second": round(num_tokens / (time.perf_counter() - started), 1),
        }

    @torch.no_grad()
    def validate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Expected acceptance_length, from teacher-forced drafts at every depth, over all ranks' shares of the rows."""
        accelerator, size = self.accelerator, self.config.batch_size
        self.head.eval()
        num_draft = min(self.head.num_depths, self.head.default_draft_tokens)
        counted = Acceptance(0, 0, [0] * num_draft, [0] * num_draft)
        share = samples[accelerator.process_index :: accelerator.num_processes]
        for start in range(0, len(share), size):
            input_ids, loss_mask = collate(share[start : start + size], device=accelerator.device)
            output = self.target.forward(input_ids, feature_layers=self.head.feature_layers)
            with accelerator.autocast():
                out = self.head.loss(DraftBatch(input_ids, loss_mask, output))
            one = expected_acceptance(out.starts, out.hits, num_draft_tokens=num_draft)
            counted.num_rounds += one.num_rounds
            counted.num_committed += one.num_committed
            counted.tried = [a + b for a, b in zip(counted.tried, one.tried, strict=True)]
            counted.taken = [a + b for a, b in zip(counted.taken, one.taken, strict=True)]
        self.head.train()
        figures = [counted.num_rounds, counted.num_committed, *counted.tried, *counted.taken]
        total = self.total(torch.tensor(figures, device=accelerator.device)).tolist()
        counted = Acceptance(total[0], total[1], total[2 : 2 + num_draft], total[2 + num_draft :])
        return {
            "num_draft_tokens": num_draft,
            "num_rounds": counted.num_rounds,
            "acceptance_length": round(counted.length, 4) if counted.length else None,
            "acceptance_rate": [None if rate is None else round(rate, 4) for rate in counted.rate],
        }

    def save(self, folder: Path, *, step: int) -> None:
        """A checkpoint, by the main process."""
        if self.accelerator.is_main_process:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            save_checkpoint(folder, self.head, optimizer, step=step, keep=self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()


def load_samples(run: RunConfig, target: Target, console: Console) -> tuple[list[Sample], list[Sample]]:
    """Tokenised training and validation rows. Raises BadInput where there is nothing to train on."""
    tokenizer, length = target.tokenizer, min(run.data.max_length, target.max_positions)
    rows = load_rows(run.data.train, num_rows=run.data.num_rows)
    samples, counts = encode_rows(rows, tokenizer, max_length=length)
    if not samples:
        raise BadInput(f"data.train: no row has supervised tokens within data.max_length {length}: {counts}")
    if not any(a and b for sample in samples for a, b in pairwise(sample.loss_mask[1:])):
        raise BadInput(f"data.train: no row has a token to draft (two supervised tokens in a row): {counts}")
    if counts.get("dropped"):
        console.print(f"data.train: {counts}")
    validation = (
        encode_rows(load_rows(run.data.validation), tokenizer, max_length=length)[0] if run.data.validation else []
    )
    return samples, validation


def draft_token_ids(run: RunConfig, samples: list[Sample], target: Target, console: Console) -> Tensor | None:
    """The tokens that a fresh head is to draft, [Vd], where its config cuts the vocabulary; says what they cover."""
    size = run.head.draft_vocab_size
    if size is None or run.train.start_from is not None:
        return None
    ids = draft_vocabulary(samples, size=size, vocab_size=target.vocab_size, always=sorted(target.eos_token_ids))
    console.print(
        f"draft vocabulary: {size} of {target.vocab_size} tokens, {coverage(samples, ids):.1%} of the answers"
    )
    return ids


def first_head(run: RunConfig, target: Target, ids: Tensor | None, console: Console) -> DraftHead:
    """The head before the first step: fresh, or as an earlier run left it, and then perhaps with adapters to train."""
    config, folder = run.train, run.train.start_from
    if folder is None:
        return build_head(run.head, target, draft_token_ids=ids, seed=config.seed)
    try:
        head = start_head(run.head, target, folder, seed=config.seed)
    except BadInput as error:
        raise BadInput(f"train.start_from: {error}") from error
    before, now = read_head_config(folder), head.config.as_dict()
    if before["target"]["fingerprint"] != target.fingerprint:
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


def start_accelerator(config: TrainConfig) -> Accelerator:
    """Accelerate as launched, or a clear stop where it silently came up as something else."""
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        cpu=config.device == "cpu",
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise BadInput(
            f"launched with {launched} processes, but Accelerate runs {accelerator.num_processes}: each would train "
            "alone. On CPU, launch with ACCELERATE_USE_CPU=true"
        )
    return accelerator


def check_same_run(folder: Path, run: RunConfig) -> None:
    """Raises BadInput where a run folder holds a run of another config."""
    path = folder / "config.yaml"
    try:
        written = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise BadInput(f"{path}: cannot be read, so the run in {folder} cannot be continued") from error
    key = differing_key(run, written)
    if key is not None:
        raise BadInput(f"{folder} holds a run with another {key}; choose another train.output_dir")


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
