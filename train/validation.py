"""Validation: the head's acceptance on rows that it is not trained on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import naming
from ..data_pipelines.loader import collate
from ..data_pipelines.rows.samples import Sample
from ..data_pipelines.storage.shard_file import StoredSample
from ..eval.decoding import generate
from ..eval.decoding.replay import default_steps
from ..eval.drafters.registry import set_window
from ..eval.figures.metrics import Acceptance, AcceptancePart, acceptance, expected_acceptance
from ..eval.measurement.breakdown import acceptance_part
from ..heads.base import DraftBatch, DraftHead, LossOutput
from ..heads.drafting.windowed import Windowed
from ..heads.loss.calibration import NUM_BINS, ConfidenceLine, count_accepted, fit_confidence
from ..targets.images.pictures import pictures_of, with_pictures
from .backend import Backend
from .watching.stopping import Watchdog

PROMPTS = 8  # that are decoded
PLAIN_PROMPT = 8  # tokens of a text without a prompt that serve as one


@dataclass(frozen=True)
class DecodedValidation:
    """Greedy chains on texts that the target wrote in answer to `num_prompts` prompts: as decoded, and as taught."""

    num_prompts: int
    figures: AcceptancePart
    taught: AcceptancePart


@dataclass(frozen=True)
class ValidationResult:
    """Taught figures of the validation rows, and what decoding gave, where there was any."""

    num_draft_tokens: int
    taught: AcceptancePart
    decoded: DecodedValidation | None = None
    confidence: ConfidenceLine | None = None  # by which a confidence head is calibrated on these rows

    def to_json(self) -> dict[str, Any]:
        """The validation as docs/reference/run_folder.md has it."""
        row: dict[str, Any] = {"num_draft_tokens": self.num_draft_tokens, **asdict(self.taught)}
        if self.decoded is not None:
            figures, taught = asdict(self.decoded.figures), asdict(self.decoded.taught)
            row["decoded"] = {"num_prompts": self.decoded.num_prompts, **figures, "taught": taught}
        return row

    def __str__(self) -> str:
        taught = f"acceptance length {self.taught.acceptance_length} taught"
        return f"{taught}, {self.decoded.figures.acceptance_length} decoded" if self.decoded else taught


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In evaluation mode within; then each part is in its own mode again, such as a draft model without dropout."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class Validation:
    """Measures the head on rows it is not trained on, in two ways that must agree.

    Taught: teacher-forced drafts on the rows' texts, counted in rounds as if the target had written these texts.
    Decoded: the target answers the prompts of the first rows with the head's drafts; the resulting texts are also
    counted as taught. On the same text both must give the same rounds, except for near-ties and for the last round,
    which ends with the text if taught. If they differ, the head's inputs in training and decoding differ; if only the
    figure of the rows' own texts differs, the target would not have written these texts.
    """

    def __init__(self, backend: Backend, rows: Sequence[StoredSample], watchdog: Watchdog):
        config, target, accelerator = backend.config, backend.head.target, backend.accelerator
        rank, num_ranks = accelerator.process_index, accelerator.num_processes
        self.config, self.backend, self.watchdog, self.device = config, backend, watchdog, accelerator.device
        self.rows, self.most_rows = rows[rank::num_ranks], -(-len(rows) // num_ranks)  # of this rank, of any
        room = max(target.num_positions - config.decode_tokens, 0) if target.can_decode else 0
        num = PROMPTS if config.decode_prompts is None else config.decode_prompts
        prompts = [prompt_of(row.sample, room) for row in rows[:num]] if room else []
        self.prompts, self.num_prompts = prompts[rank::num_ranks], len(prompts)
        self.num_draft = min(backend.head.num_depths, backend.head.default_draft_tokens)
        if config.decode_window:
            with naming("train.decode_window: "):
                set_window(backend.head, config.decode_window)
            if isinstance(backend.head, Windowed):
                backend.head.draft_window = None  # of decoding alone

    @torch.no_grad()
    def measure(self) -> ValidationResult:
        """The result over the rows of all ranks, the same in every rank."""
        taught, decoded, decoded_taught = (Acceptance.nothing(self.num_draft) for _ in range(3))
        estimated = torch.zeros(2, NUM_BINS, device=self.device)
        with self.backend.whole() as head, evaluating(head):
            for start in range(0, self.most_rows, self.config.batch_size):
                self.watchdog.at(f"validation, row {start + 1} of {len(self.rows)}")
                rows = self.rows[start : start + self.config.batch_size]
                if not rows:  # other ranks have one more, and may need this rank's part of the target for it
                    if head.target.is_sharded:
                        head.read_target(torch.zeros(1, 1, dtype=torch.long, device=head.target.device))
                    continue
                fresh = [replace(row) for row in rows]  # a row keeps its states once they are unpacked
                batch = collate(fresh).to(self.device).filled(head.read_target)
                out = self._forced(head, batch)
                taught += expected_acceptance(out.starts, out.hits, num_draft_tokens=self.num_draft)
                estimated += self._estimated(head, batch, out)
            self.watchdog.at(f"validation, decoding {len(self.prompts)} answers")
            if self.prompts:
                decoded, decoded_taught = self._decoded(head)
        self.watchdog.at("validation, the figures of all ranks")
        confidence = fit_confidence(self.backend.total(estimated))
        result = ValidationResult(self.num_draft, self._over_ranks(taught), confidence=confidence)
        if not self.num_prompts:
            return result
        parts = self._over_ranks(decoded), self._over_ranks(decoded_taught)
        return replace(result, decoded=DecodedValidation(self.num_prompts, *parts))

    def _forced(self, head: DraftHead, batch: DraftBatch) -> LossOutput:
        with self.backend.autocast():  # the target has read outside of it, as in training
            return head.loss(batch)

    def _estimated(self, head: DraftHead, batch: DraftBatch, forced: LossOutput) -> Tensor:
        """[2, NUM_BINS] counts of `count_accepted`; zeros of a head that has no confidence head."""
        with self.backend.autocast():
            logits = head.taught_confidence(batch, forced.starts)
        if logits is None:
            return torch.zeros(2, NUM_BINS, device=batch.input_ids.device)
        return count_accepted(logits, forced.starts.valid, forced.hits)

    def _decoded(self, head: DraftHead) -> tuple[Acceptance, Acceptance]:
        """Greedy chains on this rank's prompts, and taught counts on the same texts."""
        num_draft, num_tokens = self.num_draft, self.config.decode_tokens
        if self.config.decode_window:
            set_window(head, self.config.decode_window)
        generated = generate(
            head.target,
            head,
            self.prompts,
            max_new_tokens=num_tokens,
            num_draft_tokens=num_draft,
            steps=default_steps(head.target.device, num_tokens=num_tokens),
        )
        if isinstance(head, Windowed):
            head.draft_window = None  # of decoding alone
        decoded = acceptance(generated.rounds, num_draft_tokens=num_draft)
        rows = [prompt + new for prompt, new in zip(self.prompts, generated.token_ids, strict=True)]
        input_ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long, device=self.device)
        loss_mask = torch.zeros_like(input_ids, dtype=torch.bool)
        for i, (row, prompt) in enumerate(zip(rows, self.prompts, strict=True)):
            input_ids[i, : len(row)] = torch.tensor(row)
            loss_mask[i, len(prompt) : len(row)] = True
        output = head.read_target(input_ids, [pictures_of(prompt) for prompt in self.prompts])
        out = self._forced(head, DraftBatch(input_ids, loss_mask, output))
        return decoded, expected_acceptance(out.starts, out.hits, num_draft_tokens=num_draft)

    def _over_ranks(self, counts: Acceptance) -> AcceptancePart:
        numbers = [counts.num_rounds, counts.num_committed, *counts.tried, *counts.taken]
        total = self.backend.total(torch.tensor(numbers, device=self.device)).tolist()
        tried, taken = total[2 : 2 + self.num_draft], total[2 + self.num_draft :]
        return acceptance_part(Acceptance(total[0], total[1], tried, taken))


def prompt_of(sample: Sample, room: int) -> list[int]:
    """The last `room` tokens before the first supervised one; for a text that is supervised from its start, of its
    first tokens."""
    first = int(sample.loss_mask.argmax())
    ids = sample.input_ids[: first if first > 1 else PLAIN_PROMPT].tolist()
    return with_pictures(ids[-room:], sample.pictures if len(ids) <= room else ())
