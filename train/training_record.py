"""How a head was trained: the `training` part of its config.json, which every export carries along."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..data_pipelines.masks.rendering import num_common
from ..data_pipelines.sources import read_sources
from ..data_pipelines.storage.samples import PROMPT
from ..data_pipelines.storage.shards import Shards
from ..eval.measurement.result import AnswerSettings, PromptEnding
from ..heads.loading import quantization
from ..heads.reasoning import template_hash
from ..heads.target import Target
from .config import RunConfig
from .data import TrainingData
from .validation import ValidationResult

NUM_PROMPTS = 128  # rows, spread over the data, whose prompts are compared
LONGEST_ENDING = 16  # tokens of what they have in common


@dataclass(frozen=True)
class TrainingRecord:
    """The `training` part of a head's config.json; docs/run_folder.md has its keys."""

    max_length: int  # tokens of the longest rows
    num_depths: int
    template_hash: str | None
    prompt_ending: PromptEnding | None
    target_dtype: str
    target_quantization: str | None
    answers: list[AnswerSettings] | None
    steps: int = 0  # done
    validation: ValidationResult | None = None  # of that step

    @classmethod
    def of(cls, run: RunConfig, target: Target, data: TrainingData) -> "TrainingRecord":
        """What is known before the first step."""
        ending = common_ending(data.samples)
        shown = PromptEnding(ending, str(target.tokenizer.decode(ending))) if ending else None
        return cls(
            max_length=data.config.max_length,
            num_depths=run.head.num_depths,
            template_hash=template_hash(target.tokenizer),
            prompt_ending=shown,
            target_dtype=str(target.dtype).removeprefix("torch."),
            target_quantization=quantization(target.model.config),
            answers=answer_settings(data.config.train),
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "validation": self.validation and self.validation.to_json()}


def common_ending(samples: Shards) -> list[int]:
    """The token ids that all prompts end with, of rows that have one: what their template puts before an answer."""
    ending: list[int] | None = None
    for index in np.linspace(0, len(samples) - 1, min(len(samples), NUM_PROMPTS)).astype(int).tolist():
        sample = samples[index].sample
        length = int(sample.loss_mask.argmax())
        if length < 2 or (sample.segments[:length] != PROMPT).any():
            continue  # a text supervised from its start or second token, or a later piece of a long row
        tokens = sample.input_ids[max(length - LONGEST_ENDING, 0) : length].tolist()
        shared = len(tokens) if ending is None else num_common(ending[::-1], tokens[::-1])
        ending = tokens[len(tokens) - shared :]
    return ending or []


def answer_settings(train: Any) -> list[AnswerSettings] | None:
    """How the answers of data.train were sampled, each way once; None where a source has other rows."""
    ways: list[AnswerSettings] = []
    names = [field.name for field in fields(AnswerSettings)]
    for source in read_sources(train):
        path = Path(source.source).parent / "manifest.json"
        try:
            settings = json.loads(path.read_text())["settings"]["sampling"].values()
            ways += [AnswerSettings(**{name: way[name] for name in names}) for way in settings]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return list(dict.fromkeys(ways))
