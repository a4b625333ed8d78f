"""What a head says of its own training, wherever it goes: the `training` part of its config.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..data_pipelines.masks.rendering import num_common
from ..data_pipelines.sources import read_sources
from ..data_pipelines.storage.samples import PROMPT
from ..data_pipelines.storage.shards import Shards
from ..heads.loading import quantization
from ..heads.reasoning import template_hash
from ..heads.target import Target
from .config import RunConfig
from .data import TrainingData

NUM_PROMPTS = 128  # rows, spread over the data, whose prompts are compared
LONGEST_ENDING = 16  # tokens of what they have in common


def training_record(run: RunConfig, target: Target, data: TrainingData) -> dict[str, Any]:
    """What is known before the first step; a head that is written adds `steps` and `validation`."""
    ending = common_ending(data.samples)
    return {
        "max_length": data.config.max_length,
        "num_depths": run.head.num_depths,
        "template_hash": template_hash(target.tokenizer),
        "prompt_ending": {"token_ids": ending, "text": target.tokenizer.decode(ending)} if ending else None,
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "target_quantization": quantization(target.model.config),
        "answers": answer_settings(data.config.train),
    }


def common_ending(samples: Shards) -> list[int]:
    """The token ids that all prompts end with, of rows that have one: what their template puts before an answer."""
    ending: list[int] | None = None
    for index in np.linspace(0, len(samples) - 1, min(len(samples), NUM_PROMPTS)).astype(int).tolist():
        sample = samples[index].sample
        length = int(sample.loss_mask.argmax())
        if length < 2 or (sample.segments[:length] != PROMPT).any():
            continue  # a text supervised from its start, or behind its first token, or a later piece of a long row
        tokens = sample.input_ids[max(length - LONGEST_ENDING, 0) : length].tolist()
        shared = len(tokens) if ending is None else num_common(ending[::-1], tokens[::-1])
        ending = tokens[len(tokens) - shared :]
    return ending or []


def answer_settings(train: Any) -> list[dict[str, Any]] | None:
    """How `headstart data regenerate` sampled the answers, each way once; None where a source was not made by it."""
    found: list[dict[str, Any]] = []
    for source in read_sources(train):
        path = Path(source.source).parent / "manifest.json"
        try:
            ways = json.loads(path.read_text())["settings"]["sampling"].values()
            found += [{key: way[key] for key in ("temperature", "top_p", "top_k", "thinking")} for way in ways]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return [way for i, way in enumerate(found) if way not in found[:i]]
