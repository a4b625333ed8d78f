"""How good the head is at a step, which step was the best so far, and when there is nothing more to wait for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data_pipelines.loader import collate
from ..data_pipelines.storage.samples import Sample
from ..data_pipelines.storage.shard_file import StoredSample
from ..eval.generate import generate
from ..eval.measurement.metrics import Acceptance, acceptance, expected_acceptance
from ..heads.base import DraftBatch, DraftHead
from ..heads.nn.documents import Documents
from ..heads.target import Target, TargetOutput
from .backend import Backend
from .config import TrainConfig

PLAIN_PROMPT = 8  # tokens of a text without a prompt that the target goes on from


class Validation:
    """Measures the head on rows it is not trained on, in two ways that must agree.

    Taught: the rows' texts are walked as decoding would walk them, had the target written them, with teacher-forced
    drafts. Decoded: the target answers the prompts of the first rows, the head drafts, and the texts that come out are
    walked too. On one text both ways take the same rounds, near-ties apart, and have the same length but for the last
    round, of which a walk does not see what lies behind the text. Where they part, the head is trained on something
    else than what it drafts from; where only the rows' own figure differs, the target would not have written the rows.
    """

    def __init__(self, config: TrainConfig, backend: Backend, target: Target, rows: Sequence[StoredSample]):
        accelerator = backend.accelerator
        rank, num_ranks = accelerator.process_index, accelerator.num_processes
        self.config, self.backend, self.target = config, backend, target
        self.rows = rows[rank::num_ranks]
        room = max(target.max_positions - config.decode_tokens, 0) if target.can_decode else 0
        prompts = [prompt_of(row.sample)[-room:] for row in rows[: config.decode_prompts]] if room else []
        self.prompts, self.num_prompts = prompts[rank::num_ranks], len(prompts)
        self.num_draft = min(backend.head.num_depths, backend.head.default_draft_tokens)

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """The figures over all ranks' shares, equal in all of them."""
        taught, decoded, walked = self._nothing(), self._nothing(), self._nothing()
        with self.backend.whole() as head:
            head.eval()
            for start in range(0, len(self.rows), self.config.batch_size):
                batch = collate([[row] for row in self.rows[start : start + self.config.batch_size]])
                taught += self._taught(head, batch.to(self.backend.accelerator.device).filled(self._read))
            if self.prompts:
                decoded, walked = self._decoded(head)
            head.train()
        row = {"num_draft_tokens": self.num_draft, **described(self._over_ranks(taught))}
        decoded, walked = self._over_ranks(decoded), self._over_ranks(walked)
        if self.num_prompts:
            row["decoded"] = {"num_prompts": self.num_prompts, **described(decoded), "taught": described(walked)}
        return row

    def _read(self, input_ids: Tensor, *, documents: Documents | None = None) -> TargetOutput:
        return self.target.forward(input_ids, feature_layers=self.backend.head.feature_layers, documents=documents)

    def _taught(self, head: DraftHead, batch: DraftBatch) -> Acceptance:
        with self.backend.autocast():  # the target has read outside of it, as in training
            out = head.loss(batch)
        return expected_acceptance(out.starts, out.hits, num_draft_tokens=self.num_draft)

    def _decoded(self, head: DraftHead) -> tuple[Acceptance, Acceptance]:
        """Greedy chains on this rank's prompts, and the same texts walked."""
        how: dict[str, Any] = {"max_new_tokens": self.config.decode_tokens, "num_draft_tokens": self.num_draft}
        done = generate(self.target, head, self.prompts, **how)
        decoded = acceptance(done.rounds, num_draft_tokens=self.num_draft)
        rows = [prompt + new for prompt, new in zip(self.prompts, done.token_ids, strict=True)]
        device = self.backend.accelerator.device
        input_ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long, device=device)
        loss_mask = torch.zeros_like(input_ids, dtype=torch.bool)
        for i, (row, prompt) in enumerate(zip(rows, self.prompts, strict=True)):
            input_ids[i, : len(row)] = torch.tensor(row)
            loss_mask[i, len(prompt) : len(row)] = True
        return decoded, self._taught(head, DraftBatch(input_ids, loss_mask, self._read(input_ids)))

    def _nothing(self) -> Acceptance:
        return Acceptance(0, 0, [0] * self.num_draft, [0] * self.num_draft)

    def _over_ranks(self, counted: Acceptance) -> Acceptance:
        figures = [counted.num_rounds, counted.num_committed, *counted.tried, *counted.taken]
        total = self.backend.total(torch.tensor(figures, device=self.backend.accelerator.device)).tolist()
        return Acceptance(total[0], total[1], total[2 : 2 + self.num_draft], total[2 + self.num_draft :])


def prompt_of(sample: Sample) -> list[int]:
    """What comes before the first supervised token; of a text that is supervised from its start, its first tokens."""
    first = int(sample.loss_mask.argmax())
    return sample.input_ids[: first if first > 1 else PLAIN_PROMPT].tolist()


def described(counted: Acceptance) -> dict[str, Any]:
    """A metrics row's figures of these counts: tokens per target forward, and the rate at each draft position."""
    return {
        "num_rounds": counted.num_rounds,
        "acceptance_length": round(counted.length, 4) if counted.length else None,
        "acceptance_rate": [None if rate is None else round(rate, 4) for rate in counted.rate],
    }


@dataclass
class Best:
    """The best validation so far: its step and acceptance_length, taught; waited: validations since then."""

    step: int = 0
    acceptance_length: float = 0.0
    waited: int = 0

    def take(self, step: int, acceptance_length: float | None) -> bool:
        """Takes in a validation; returns whether it is the best."""
        if acceptance_length is not None and acceptance_length > self.acceptance_length:
            self.step, self.acceptance_length, self.waited = step, acceptance_length, 0
            return True
        self.waited += 1
        return False
