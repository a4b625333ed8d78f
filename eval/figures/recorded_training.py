"""What a head's folder says of its own training (docs/reference/run_folder.md), as reports read it."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...base.typed import read_json
from ...targets.chat.messages import plain_text
from .metrics import AcceptancePart

MOST_RECORDED = 20_000  # prompts that are recorded
HASH_BYTES = 5  # of a prompt: two of a million different ones are taken for the same once in a million


@dataclass(frozen=True)
class LearntPrompts:
    """The prompts of a head's training rows, as short hashes. hashes: of each, one behind another, in hex. num_rows:
    of the training data, of which MOST_RECORDED at most are looked at, spread over all; a row of several chats counts
    as so many."""

    hashes: str
    num_rows: int

    @classmethod
    def of(cls, texts: Iterable[str], *, num_rows: int) -> "LearntPrompts":
        return cls("".join(sorted({prompt_hash(text) for text in texts})), num_rows)

    @property
    def rows_per_recorded(self) -> float:
        return max(1.0, self.num_rows / max(MOST_RECORDED, len(self.known())))

    def __add__(self, other: "LearntPrompts") -> "LearntPrompts":
        both, rows = self.known() | other.known(), max(self.rows_per_recorded, other.rows_per_recorded)
        return LearntPrompts("".join(sorted(both)), round(len(both) * rows))

    def known(self) -> set[str]:
        size = 2 * HASH_BYTES
        return {self.hashes[at : at + size] for at in range(0, len(self.hashes), size)}


def prompt_hash(text: str) -> str:
    """Hashes a prompt as `plain_text`, so that case and spaces do not tell prompts apart."""
    return hashlib.blake2b(plain_text(text).encode(), digest_size=HASH_BYTES).hexdigest()


@dataclass(frozen=True)
class PromptEnding:
    """The tokens with which all prompts in training ended."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class AnswerSettings:
    """How the target sampled the answers that the head was trained on."""

    temperature: float
    top_p: float
    top_k: int
    thinking: bool | None


@dataclass(frozen=True)
class RecordedValidation(AcceptancePart):
    """The validation at the end of a head's training, teacher-forced. decoded: by decoding."""

    decoded: AcceptancePart | None = None


@dataclass(frozen=True)
class RecordedTraining:
    """A head's record of its own training (docs/reference/run_folder.md); None: not known. raw: the record as read."""

    raw: dict[str, Any]
    max_length: int | None = None
    num_depths: int | None = None
    template_hash: str | None = None
    prompt_ending: PromptEnding | None = None
    prompts: LearntPrompts | None = None
    earlier_prompts: LearntPrompts | None = None  # of the heads that it started from
    target_dtype: str | None = None
    target_quantization: str | None = None
    answers: list[AnswerSettings] | None = None
    validation: RecordedValidation | None = None

    @classmethod
    def from_json(cls, record: dict[str, Any], *, where: str = "training") -> "RecordedTraining":
        """Raises BadInput naming a key of the wrong type."""
        return read_json(cls, {**record, "raw": record}, where=where)

    @property
    def learnt(self) -> LearntPrompts | None:
        """All prompts that are recorded, of earlier trainings too."""
        known = [part for part in (self.prompts, self.earlier_prompts) if part is not None]
        return sum(known[1:], known[0]) if known else None
