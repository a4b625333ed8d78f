"""The record of how a head was trained: the `training` part of its config.json, which every export copies."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..data_pipelines.masks.rendering import num_common
from ..data_pipelines.masks.segments import token_table
from ..data_pipelines.rows.samples import PROMPT, Sample
from ..data_pipelines.rows.sources import read_sources
from ..data_pipelines.storage.shard_file import StoredSample
from ..engines.heads import head_record
from ..eval.figures.recorded_training import (
    MOST_RECORDED,
    AnswerSettings,
    LearntPrompts,
    PromptEnding,
    RecordedTraining,
)
from ..targets.chat.reasoning import template_hash
from ..targets.loading import quantization
from ..targets.target import Target
from .inputs.config import RunConfig
from .inputs.data import TrainingData
from .validation import ValidationResult

NUM_PROMPTS = 128  # rows, spread over the data, whose prompts are compared
LONGEST_ENDING = 16  # tokens of what they have in common


@dataclass(frozen=True)
class TrainingRecord:
    """The `training` part of a head's config.json; docs/reference/run_folder.md has its keys."""

    max_length: int  # tokens of the longest rows
    num_depths: int
    template_hash: str | None
    prompt_ending: PromptEnding | None
    prompts: LearntPrompts | None  # by which an evaluation knows what the head has learnt
    earlier_prompts: LearntPrompts | None  # of the heads that it started from
    target_dtype: str
    target_quantization: str | None
    target_adapter: str | None  # the folder of the target's served adapter
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
            prompts=learnt_prompts(data.samples, target.tokenizer),
            earlier_prompts=earlier_prompts(run.train.start_from),
            target_dtype=str(target.dtype).removeprefix("torch."),
            target_quantization=quantization(target.model.config),
            target_adapter=None if target.adapter is None else target.adapter.path,
            answers=answer_settings(data.config.train),
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "validation": self.validation and self.validation.to_json()}


def spread(samples: Sequence[StoredSample], most: int) -> Iterator[Sample]:
    """At most so many rows, spread over the data."""
    for index in np.linspace(0, len(samples) - 1, min(len(samples), most)).astype(int).tolist():
        yield samples[index].sample


def prompts_in(sample: Sample, special: Collection[int] = ()) -> Iterator[list[int]]:
    """The token ids before each answer of a row that is learnt, each as if its question were asked alone: a later one
    stands behind what precedes the first, such as a system prompt. None of a text without a prompt, or of one token.

    Args: special: ids of special tokens, of which a question's turn has the same number wherever it stands; without
        any, only the first prompt is found.
    """
    is_prompt, ids = sample.segments == PROMPT, sample.input_ids.tolist()
    edges = [0, *(np.flatnonzero(np.diff(is_prompt)) + 1).tolist(), len(ids)]
    if not is_prompt[0] or edges[1] < 2:
        return
    places = [place for place in range(edges[1]) if ids[place] in special]
    for begin, end, last in zip(edges[::2], edges[1::2], edges[2::2], strict=False):
        turn = ids[begin:end]
        own = [place for place, token in enumerate(turn) if token in special]
        if sample.loss_mask[end:last].any() and (begin == 0 or 0 < len(own) <= len(places)):
            yield turn if begin == 0 else ids[: places[-len(own)]] + turn[own[0] :]  # without what ends the turn before


def common_ending(samples: Sequence[StoredSample]) -> list[int]:
    """The token ids with which all prompts end: what the chat template puts before an answer."""
    ending: list[int] | None = None
    for prompt in (prompt for sample in spread(samples, NUM_PROMPTS) for prompt in prompts_in(sample)):
        tokens = prompt[-LONGEST_ENDING:]
        shared = len(tokens) if ending is None else num_common(ending[::-1], tokens[::-1])
        ending = tokens[len(tokens) - shared :]
    return ending or []


def learnt_prompts(samples: Sequence[StoredSample], tokenizer: Any) -> LearntPrompts | None:
    """None if no row has a prompt."""
    special = token_table(tokenizer).special
    few = [len(list(prompts_in(sample, special))) for sample in spread(samples, NUM_PROMPTS)]
    rows = list(spread(samples, max(1, MOST_RECORDED * len(few) // max(len(few), sum(few)))))
    texts = [tokenizer.decode(ids) for sample in rows for ids in prompts_in(sample, special)]
    num_rows = len(samples) * max(len(rows), len(texts)) // len(rows)
    return LearntPrompts.of(texts, num_rows=num_rows) if texts else None


def earlier_prompts(start: str | None) -> LearntPrompts | None:
    """Those that a head which is trained on has learnt. Args: start: its folder. Raises BadInput."""
    training = None if start is None else head_record(start).training
    return None if training is None else RecordedTraining.from_json(training, where=f"train.start_from {start}").learnt


def answer_settings(train: Any) -> list[AnswerSettings] | None:
    """The distinct sampling settings of data.train's answers; None if a source was not regenerated by us."""
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
