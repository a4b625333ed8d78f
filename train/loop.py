"""One optimizer step: the frozen target reads each batch, the head learns to draft what follows."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..base.errors import BadInput
from ..data_pipelines.loader import TrainingBatch
from ..engines.heads import save_head
from ..heads.loss.chains import mean_of
from .backend import Backend
from .checkpoint import Best, Progress, save_checkpoint
from .inputs.launch import RankPlace
from .optim import set_learning_rates
from .training_record import TrainingRecord
from .watching.speed import StepSpeed
from .watching.stopping import Stopping, Watchdog
from .watching.trend import ADVICE


class NoBatch(BadInput):
    """A step could not begin, as its batches did not come; the state is that of the step before, in all processes."""


class Loop:
    """Optimizer steps, and what is saved after them, over whatever Accelerate runs on."""

    def __init__(
        self,
        backend: Backend,
        *,
        place: RankPlace,
        progress: Progress,
        stopping: Stopping,
        watchdog: Watchdog,
        deadline: float,
        may_lack_batches: bool,
    ):
        """Args: progress: where the steps begin.
        deadline: time.monotonic() at which the run's time is over, see `TrainConfig.stop_after`.
        may_lack_batches: whether batches may not come to one process alone, as those of a server."""
        self.backend, self.place, self.trend = backend, place, progress.trend
        self.num_empty = progress.num_empty
        self.stopping, self.watchdog = stopping, watchdog
        self.config, self.accelerator, self.head = backend.config, backend.accelerator, backend.head
        self.deadline, self.may_lack_batches = deadline, may_lack_batches
        # some rank received a signal, or its time is over; all of them know it after the same step
        self.should_stop = self.is_late = False
        self.waited = self.seconds = 0.0  # for batches, and in all

    def step(self, step: int, batches: Iterator[TrainingBatch]) -> dict[str, Any] | None:
        """One optimizer step over the next `accumulation` batches; returns its row of metrics.jsonl, or None if these
        have no position to learn in any process: then it was none, and `num_empty` counts it.

        Denominators count the supervised chains, weighted by their labels, of all ranks and batches of the step, so
        that the gradient does not depend on how rows are split over ranks and batches. Raises: BadInput if the loss is
        not finite; NoBatch, in all processes, if one of them gets no batch.
        """
        self.watchdog.at(f"step {step + 1}: its batches")
        started = time.perf_counter()
        taken = self._taken(batches)
        waited = time.perf_counter() - started
        torch.manual_seed(step_seed(self.config.seed, step, self.place.group))  # the same chains in all of a group
        share = set_learning_rates(self.backend.optimizer, self.head, step, self.config)
        num_positions = sum(batch.input_ids.numel() for batch in taken)
        learned = self._learn(step, [batch.to(self.accelerator.device) for batch in taken])
        self.watchdog.at(f"step {step + 1}: its figures")
        if learned is None:
            self.num_empty += 1
            return None
        loss, device = learned["loss"], self.accelerator.device
        if not math.isfinite(loss):
            raise BadInput(f"step {step + 1}: the loss is {loss} ({self.trend}): {ADVICE}")
        seconds = time.perf_counter() - started
        self.waited, self.seconds = self.waited + waited, self.seconds + seconds
        read = num_positions * self.place.num_groups
        return {
            "step": step + 1,  # steps done
            **learned,
            "learning_rate": self.config.learning_rate * share,  # of AdamW's parameters
            "padding": round(1 - sum(batch.num_tokens for batch in taken) / num_positions, 4),  # in this process
            **asdict(StepSpeed.of(device, num_positions=read, seconds=seconds, waited=waited)),
        }

    def _taken(self, batches: Iterator[TrainingBatch]) -> list[TrainingBatch]:
        """The batches of a step."""
        if not self.may_lack_batches:
            return list(islice(batches, self.config.accumulation))
        taken, problem = [], None
        try:
            taken = list(islice(batches, self.config.accumulation))
        except BadInput as error:
            problem = error
        flags = [problem is not None, self.stopping.received is not None]
        lacking, signals = self.backend.total(torch.tensor(flags, device=self.accelerator.device).float()).tolist()
        if lacking:
            self.should_stop = signals > 0
            raise NoBatch(str(problem or "another process got no states from its server")) from problem
        return taken

    def share_waited(self) -> float:
        """The share of the steps' time in which they waited for batches, over all processes, which all ask for it."""
        times = torch.tensor([self.waited, self.seconds], device=self.accelerator.device, dtype=torch.float32)
        waited, seconds = self.backend.total(times).tolist()
        return waited / max(seconds, 1e-9)

    def _learn(self, step: int, batches: Sequence[TrainingBatch]) -> dict[str, Any] | None:
        """Forward, backward and update; returns the figures over all ranks, None if these have nothing to learn."""
        at, place = self.watchdog.at, self.place
        at(f"step {step + 1}: the counts of all ranks")
        chains = [self.head.training_starts(batch.loss_mask).part(place.part, place.num_parts) for batch in batches]
        counts = [  # [2, K] each: of supervised chains, with and without their weights
            torch.stack([starts.counts(batch.weights), starts.counts()])
            for starts, batch in zip(chains, batches, strict=True)
        ]
        denominators, num_chains = self.backend.total(torch.stack(counts).sum(0))
        if not denominators.any():
            return None
        sums, hits = torch.zeros_like(denominators), torch.zeros_like(denominators)
        loss = torch.zeros((), device=self.accelerator.device)
        for i, batch in enumerate(batches):
            where = f"step {step + 1}, batch {i + 1} of {len(batches)}"
            with self.backend.accumulating(is_last=i == len(batches) - 1):
                at(f"{where}: the target's forward")
                batch = replace(batch.filled(self.head.read_target), starts=chains[i])
                at(f"{where}: the head's forward")
                out = self.backend.loss(batch, denominators)
                at(f"{where}: the head's backward")
                self.backend.backward(out.loss)  # the denominators are those of all ranks already
            loss += out.loss.detach()
            sums += out.depth_loss
            hits += out.hits.sum((0, 1))
        at(f"step {step + 1}: the update")
        grad_norm = self.backend.update()
        at(f"step {step + 1}: the figures of all ranks")
        stops = loss.new_tensor([self.stopping.received is not None, time.monotonic() > self.deadline])
        totals = self.backend.total(torch.cat([stops, loss[None], sums, hits]))
        self.should_stop, self.is_late = (totals[:2] > 0).tolist()
        loss, sums, hits = totals[2], *totals[3:].chunk(2)
        return {
            "loss": loss.item(),
            "depth_loss": mean_of(sums, denominators).tolist(),  # mean over the chains supervised at each depth
            "depth_accuracy": mean_of(hits, num_chains).tolist(),  # share whose greedy draft is the data's token
            "grad_norm": grad_norm,  # before clipping
            "num_supervised": int(num_chains[0]),  # chains at depth 0
        }

    def check_finite(self, step: int) -> None:
        """Raises BadInput, in all processes, if weights or the optimizer's state are not finite. Called before anything
        is written, so that earlier checkpoints stay valid."""
        self.watchdog.at(f"step {step}: checking the weights")
        if not self.backend.is_finite():
            raise BadInput(f"step {step}: the weights are not finite any more ({self.trend}): {ADVICE}")

    def save(self, folder: Path, *, step: int, best: Best) -> None:
        """Write a checkpoint of all ranks' state, in the main process. Raises BadInput as `check_finite`."""
        self.check_finite(step)
        self.watchdog.at(f"step {step}: the checkpoint")
        weights, state = self.backend.weights(), self.backend.optimizer_state()
        if self.accelerator.is_main_process:
            progress = Progress(step, self.accelerator.num_processes, best, self.trend, self.num_empty)
            save_checkpoint(folder, weights, state, progress=progress, keep=self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def write_head(self, folder: Path, training: TrainingRecord) -> None:
        """The main process writes the head's folder. Raises BadInput as `check_finite`."""
        self.check_finite(training.steps)
        self.watchdog.at(f"step {training.steps}: {folder.name}/")
        with self.backend.whole() as head:
            if self.accelerator.is_main_process:
                confidence = training.validation and training.validation.confidence
                save_head(head, folder, training=training.to_json(), confidence=confidence)
        self.accelerator.wait_for_everyone()


def step_seed(seed: int, step: int, group: int) -> int:
    """The random seed of a group of processes in a step, so that a resumed run draws the same numbers."""
    return int(np.random.SeedSequence([seed, step, group]).generate_state(1, np.uint64)[0] >> 1)
