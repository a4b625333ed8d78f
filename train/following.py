"""A head that follows a policy, a target that RL trains: a few optimizer steps between those of the loop."""

import copy
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import BadInput
from ..base.files import remove_unfinished
from ..data_pipelines.loader import collate
from ..data_pipelines.rows.samples import Sample
from ..data_pipelines.storage.shard_file import StoredSample
from ..engines.export import export_head
from ..engines.heads import head_class, save_head, start_head
from ..engines.servers.address import Address
from ..eval.figures.metrics import Acceptance, AcceptancePart, expected_acceptance
from ..eval.figures.recorded_training import RecordedTraining
from ..eval.measurement.breakdown import acceptance_part
from ..heads.base import DraftBatch, DraftHead, LossOutput
from ..heads.stored.folder import config_of, read_record
from ..targets.layers.target_output import TargetOutput
from ..targets.target import Target
from .backend import Step
from .checkpoint import Best, Progress, checkpoints, head_tensors, load_checkpoint, read_progress, save_checkpoint
from .inputs.config import TrainConfig
from .inputs.launch import product_dtype
from .loop import step_seed
from .optim import MuonAdamW, build_optimizer, set_learning_rates
from .validation import evaluating
from .watching.speed import synchronize
from .watching.trend import ADVICE, Trend


@dataclass(frozen=True)
class Rollouts:
    """What a policy wrote, prompts included. states: those that its own forward over these rows computed, right-padded
    as `states_of` gives them; None: the target reads the rows."""

    rows: Sequence[Sequence[int]]  # token ids of each
    prompt_lengths: Sequence[int]  # where each answer begins
    states: TargetOutput | None = None  # [B, T, ...]

    def check(self) -> None:
        """Raises BadInput if there is no rollout, or lists and states are not of the same rows."""
        if not self.rows or len(self.rows) != len(self.prompt_lengths):
            raise BadInput(f"{len(self.rows)} rollouts with {len(self.prompt_lengths)} prompt lengths")
        longest = max(map(len, self.rows))
        shape = [] if self.states is None else list(self.states.post_norm.shape)
        if shape and (shape[0] != len(self.rows) or shape[1] < longest):
            raise BadInput(f"states {shape} are not of {len(self.rows)} rollouts of up to {longest} tokens")

    def batch(self, at: slice, head: DraftHead) -> DraftBatch:
        """Some of the rows as a head's input."""
        pairs = list(zip(self.rows[at], self.prompt_lengths[at], strict=True))
        samples = [Sample.of(row, [i >= length for i in range(len(row))]) for row, length in pairs]
        batch = collate([StoredSample(sample) for sample in samples]).to(head.target.device)
        if self.states is not None:
            num, dtype = batch.input_ids.shape[1], head.target.dtype
            some = (states[at, :num].detach().to(dtype) for states in (self.states.features, self.states.post_norm))
            batch = replace(batch, output=TargetOutput(*some)).to(head.target.device)
        with torch.no_grad():
            return batch.filled(head.read_target)


@dataclass(frozen=True)
class Followed:
    """What a call of `follow` did: optimizer steps, their mean loss, and the acceptance that the rollouts would have
    had with the head's greedy drafts, each drafted before the head learnt from it; None where no step was taken."""

    steps: int
    seconds: float
    loss: float | None = None
    acceptance: AcceptancePart | None = None


class FollowingHead:
    """A head that learns on from a policy's rollouts, between the policy's own steps, in the same process.

    Nothing of the policy is written: not its weights, gradients, mode, nor the random numbers that its loop draws.

    head: as it is now, in fp32. target: what it drafts for. folder: where `save` writes it, for engines.
    """

    def __init__(self, policy: Any, config: TrainConfig, *, share: float | None = 0.05):
        """Go on where `config.output_dir` was left, else from the head in `config.start_from`.

        Args:
            policy: a model of transformers, whose weights are read where they are; or a `Target`, where the policy
                trains elsewhere.
            config: as a run's `train`: the optimizer, its rates over max_steps, rows per step, precision.
            share: of the time since now, at most, that all calls together take; None: any.

        Raises: BadInput if there is no head of ours, it computes with adapters on the target, or its state is damaged.
        """
        if config.lora_rank or config.accumulation != 1:
            raise BadInput("lora_rank, accumulation: a head that follows trains its own weights, a batch a step")
        start = str(config.start_from)
        record = read_record(start)
        is_target = isinstance(policy, Target)
        self.target = policy if is_target else view_of(policy, name=record.target_name, fingerprint=record.fingerprint)
        head_config = config_of(record, head_class(record.family).config_class)
        self.head = start_head(head_config, self.target, start)
        if self.head.adapts_target:
            raise BadInput(f"head {start}: computes with adapters on the target, whose answers would be others")
        self.policy, self.has_checked_states = None if is_target else policy, False
        self.config, self.share, self.training = config, share, going_on(record.training, where=f"head {start}")
        self.optimizer, self.num_steps = build_optimizer(self.head, config), 0
        self.autocast = Step(self.head, dtype=product_dtype(config)).autocast
        self.folder, self.states = Path(config.output_dir, "head"), Path(config.output_dir, "checkpoints")
        remove_unfinished(self.states)  # by a kill
        if last := next(reversed(checkpoints(self.states)), None):
            self._load(last)
        self.began, self.spent, self.step_seconds = time.monotonic(), 0.0, 0.0
        self._write_head()  # as the state has it, also where a kill came between the two
        self.save_seconds = time.monotonic() - self.began

    def follow(self, rollouts: Rollouts, *, max_steps: int | None = None) -> Followed:
        """Take optimizer steps on the rollouts of the policy as it is now: max_steps, None: one pass over them; fewer
        where the time is used up, none after `config.max_steps` in all. Raises: BadInput as `Rollouts.check`, if the
        loss is not finite, and where the policy's weights or states are no longer what is read here."""
        rollouts.check()
        self._check_weights()
        self._check_states(rollouts)
        began, size = time.monotonic(), self.config.batch_size
        num_draft = min(self.head.num_depths, self.head.default_draft_tokens)  # as far as training reaches
        firsts = range(0, len(rollouts.rows), size)
        vars(self.head).pop("restricted_logits", None)  # a copy of what the policy has changed
        losses, counted = list[float](), Acceptance.nothing(num_draft)
        if not self.num_steps and isinstance(self.optimizer, MuonAdamW):
            self.head.measure(rollouts.batch(slice(first, first + size), self.head) for first in firsts)
            self.optimizer.rescale(self.head)
        for number in range(len(firsts) if max_steps is None else max_steps):
            if self.num_steps >= self.config.max_steps or not self._has_time(since=began):
                break
            started = time.monotonic()
            first = firsts[number % len(firsts)]
            before, out = self.num_steps, self._step(rollouts.batch(slice(first, first + size), self.head))
            losses += [out.loss.item()] * (self.num_steps - before)
            if number < len(firsts):
                counted += expected_acceptance(out.starts, out.hits, num_draft_tokens=num_draft)
            synchronize(self.target.device)
            self.step_seconds = time.monotonic() - started
        seconds = time.monotonic() - began
        self.spent += seconds
        if not losses:
            return Followed(0, seconds)
        return Followed(len(losses), seconds, sum(losses) / len(losses), acceptance_part(counted))

    def drafter(self) -> DraftHead:
        """A copy of the head as it is now, in the target's dtype, to draft with. Raises: BadInput if the policy's
        weights are no longer what is read here."""
        self._check_weights()
        vars(self.head).pop("restricted_logits", None)  # a copy of what the policy has changed
        copied = copy.deepcopy(self.head, {id(self.target): self.target})
        return copied.to(self.target.dtype).eval().requires_grad_(False)

    def states_of(self, hidden_states: Sequence[Tensor]) -> TargetOutput:
        """What the head reads, of a transformers forward with output_hidden_states: [B, T, D] what enters each layer,
        and last the state behind the final norm."""
        last = hidden_states[-1].detach()
        chosen = [hidden_states[i].detach() for i in self.head.feature_layers]
        none = last.new_empty(*last.shape[:2], 0, last.shape[2])
        return TargetOutput(torch.stack(chosen, 2) if chosen else none, last)

    def save(self) -> Path:
        """Write the optimizer's state and the head, each whole or not at all; returns the head's folder."""
        began = time.monotonic()
        progress, held = Progress(self.num_steps, 1, Best(), Trend()), self.optimizer.state
        named = {name: held.get(parameter, {}) for name, parameter in self.head.named_parameters()}
        state = {f"{name}|{key}": torch.as_tensor(value) for name, of in named.items() for key, value in of.items()}
        state = {entry: value.detach().cpu().contiguous() for entry, value in state.items()}
        save_checkpoint(self.states, head_tensors(self.head), state, progress=progress, keep=1)
        self._write_head()
        self.save_seconds = time.monotonic() - began
        self.spent += self.save_seconds
        return self.folder

    def _check_weights(self) -> None:
        """Where weights were replaced instead of written, the target would stay at those that were."""
        if self.policy is None:
            return
        for (name, own), read in zip(self.policy.named_parameters(), self.target.model.parameters(), strict=True):
            if own.data_ptr() != read.data_ptr():
                raise BadInput(
                    f"policy: {name} is another tensor than at first: make a FollowingHead of it as it is now"
                )

    @torch.no_grad()
    def _check_states(self, rollouts: Rollouts) -> None:
        """Once: whether states are of their tokens, by the row whose prompt would be padded most."""
        if self.policy is None or rollouts.states is None or self.has_checked_states:
            return
        row = min(range(len(rollouts.rows)), key=rollouts.prompt_lengths.__getitem__)
        read = self.target.forward(torch.tensor([rollouts.rows[row]], device=self.target.device)).post_norm[0].float()
        given = rollouts.states.post_norm[row, : len(read)].to(read)  # [T, D]
        if (given - read).norm() > 0.5 * read.norm():  # rounding and dropout make less of a difference
            raise BadInput(f"states of row {row} are not of its tokens: they must be right-padded, of all tokens")
        self.has_checked_states = True

    def _load(self, checkpoint: Path) -> None:
        self.num_steps, parameters = read_progress(checkpoint).step, dict(self.head.named_parameters())
        for entry, value in load_checkpoint(checkpoint, self.head).items():
            name, _, key = entry.rpartition("|")
            self.optimizer.state[parameters[name]][key] = value.to(parameters[name].device)

    def _write_head(self) -> None:
        save_head(self.head, self.folder, dtype=self.target.dtype, training=self.training)

    def _has_time(self, *, since: float) -> bool:
        """Whether another step and a save that take as long as the last ones stay within the share. since: begin of a
        call."""
        now, coming = time.monotonic(), self.step_seconds + self.save_seconds
        spent = self.spent + now - since + coming
        return self.share is None or spent <= self.share * (now + coming - self.began)

    def _step(self, batch: DraftBatch) -> LossOutput:
        """One optimizer step, over all chains that decoding could run; the hits are of drafts without noise."""
        device = self.target.device
        set_learning_rates(self.optimizer, self.head, self.num_steps, self.config)
        devices = range(torch.cuda.device_count()) if device.type == "cuda" else []  # the seed is set on all of them
        with torch.random.fork_rng(devices), torch.enable_grad():
            torch.manual_seed(step_seed(self.config.seed, self.num_steps, 0))  # some families draw noise
            with self.autocast():
                out = self.head.loss(batch)
                if self.head.is_noisy:
                    with torch.no_grad(), evaluating(self.head):
                        out = replace(out, hits=self.head.loss(batch).hits)
            if not out.loss.isfinite():
                raise BadInput(f"step {self.num_steps + 1} of following: the loss is {out.loss.item()}: {ADVICE}")
            if not out.depth_count.any():  # no position to learn, as of answers of one token
                return out
            out.loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), self.config.max_grad_norm or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return out


def going_on(training: dict[str, Any] | None, *, where: str) -> dict[str, Any] | None:
    """The record of a head's training, once it learns from rollouts too, whose prompts nobody records. Raises BadInput
    on a damaged one. Args: where: whose."""
    if training is None:
        return None
    learnt = RecordedTraining.from_json(training, where=where).learnt
    return {**training, "prompts": None, "earlier_prompts": learnt and asdict(learnt), "validation": None}


def view_of(policy: nn.Module, *, name: str, fingerprint: str | None) -> Target:
    """A target that reads the very weights of a model in training: what its optimizer writes is seen at once, and its
    mode, gradients and attention stay its own. Layers decode as transformers has them, as kernels read copies.

    Args: name, fingerprint: of the target that it was before, whose heads it then takes.
    """
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in policy.parameters()}
    shared |= {id(buffer): buffer for buffer in policy.buffers()}
    model = copy.deepcopy(policy, shared)
    if not hasattr(model, "_hf_hook"):
        vars(model).pop("forward", None)  # a trainer's, which may be of the policy itself, in its mode
    target = Target.of(model, name=name, fingerprint=str(fingerprint))
    target._has_decoder = False
    return target


def send_head(head: str | Path, url: str, *, through: str | Path, seconds: float = 600.0) -> None:
    """Have a running vLLM draft with a head from now on: behind the answers that are under way, before any other.

    The server runs with `headstart_drafts.HeadstartDrafts` (docs/rl.md) and drafts with a head of these sizes.

    Args: through: a folder that the server reads too, where the exported head lies meanwhile. seconds: for answers that
        are under way.
    Raises: BadInput if the head cannot be exported, or the server does not take it.
    """
    server = Address.of(url, where="url")
    with tempfile.TemporaryDirectory(dir=through) as folder:
        export_head(head, Path(folder, "head"), to="vllm")
        try:
            server.post("/pause?mode=wait", seconds=seconds)
            server.post("/collective_rpc", {"method": "load_draft", "args": [str(Path(folder, "head").absolute())]})
        finally:
            server.post("/resume")
