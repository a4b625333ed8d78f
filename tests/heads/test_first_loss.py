"""Where training starts: before the first step, no family is further from the target than guessing evenly is.

Measured is `soft_ce`, the cross entropy to the target's distribution, over all depths of rows that the start has not
seen. Targets are random ones whose residual stream and final norm are as large as real models' can be.
"""

import json
import math
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.engines.heads import HEADS, build_head
from headstart.heads.base import DraftBatch, DraftHead
from headstart.heads.start.closed_form import scale_norm
from headstart.targets.target import Target
from torch import nn

VARIANTS = json.loads(Path(__file__).with_name("variants.json").read_text())
# without cut vocabularies: these are of the tokens that occur, and random targets write all tokens alike
WHOLE = [(name, words) for name, variants in VARIANTS.items() for words in variants if "draft_vocab_size" not in words]
CASES = sorted(HEADS) + [f"{name} {words}" for name, words in WHOLE]
ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_neox"]
# what a layer adds to the residual stream is as large as these make it
ADDING = (
    "o_proj",
    "down_proj",
    "attention.dense",
    "dense_4h_to_h",
    "post_attention_layernorm",
    "feedforward_layernorm",
)


@pytest.fixture(scope="module")
def loud_target(tiny_target):
    """loud_target(architecture, size, gain): what layers add times `size`, the final norm's gain `gain`."""

    @cache
    def make(architecture: str, size: float, gain: float) -> Target:
        target = tiny_target(architecture)
        adding = ADDING if architecture == "gemma3" else ADDING[:4]  # whose norms are behind the projections
        with torch.no_grad():
            for name, parameter in target.layers.named_parameters():
                if name.rpartition(".")[0].endswith(adding):
                    parameter.mul_(size)
            if not target.config.tie_word_embeddings:
                target.input_embedding.weight.mul_(size)
            norm = target.final_norm
            assert isinstance(norm, nn.Module)
            norm.get_parameter("weight").fill_(gain - (architecture == "gemma3"))
        return target

    return make


def batches_of(target: Target, head: DraftHead, *, number: int = 7) -> list[DraftBatch]:
    source, made = torch.Generator().manual_seed(3), []
    for _ in range(number):
        ids = torch.randint(3, target.vocab_size, (12, 24), generator=source)
        mask = torch.arange(24).expand(12, -1) >= 4
        made.append(DraftBatch(ids, mask, target.forward(ids, feature_layers=head.feature_layers)))
    return made


def first_loss(case: str, target: Target) -> torch.Tensor:
    """[K] in nats above even guessing's."""
    family, *words = case.split()
    options = {key: json.loads(value) for key, value in (word.split("=") for word in words)}
    head: Any = build_head(HEADS[family].config_class(type=family, **options), target, seed=1)
    spec_of = head.loss_spec
    head.loss_spec = lambda depth: replace(spec_of(depth), mix={"soft_ce": 1.0})  # without what a family adds
    *rows, unseen = batches_of(target, head)
    head.begin_training(iter(rows))
    with torch.no_grad():
        out = head(unseen)
    return out.depth_loss / out.depth_count - math.log(head.num_drafted)


SIZES = list(product([1, 30, 300], [1, 20]))
# every case on every architecture, and each of these with all sizes and gains; of these fast: every case on one of them
ALL = [
    pytest.param(case, architecture, *SIZES[(i + j) % 6], marks=[] if j == i % len(ARCHITECTURES) else pytest.mark.slow)
    for i, case in enumerate(CASES)
    for j, architecture in enumerate(ARCHITECTURES)
    if (case.split()[0], architecture) != ("assistant", "gpt_neox")  # whose keys are made otherwise
]


@pytest.mark.parametrize(("case", "architecture", "size", "gain"), ALL)
def test_a_head_begins_no_worse_than_guessing_evenly(case, architecture, size, gain, loud_target):
    assert first_loss(case, loud_target(architecture, size, gain)).mean() <= 0.1


def test_what_starts_right_is_left_as_it_is(target):
    """A draft model of all of the target's layers is the target, and stays so."""
    options: dict[str, Any] = {"type": "draft_lm", "num_layers": target.num_layers}
    head = build_head(HEADS["draft_lm"].config_class(**options), target, seed=1)
    *rows, unseen = batches_of(target, head)
    head.begin_training(iter(rows))
    starts, logits = head.teacher_forced_logits(unseen)
    torch.testing.assert_close(logits[:, :, 0], target.logits(starts.take(unseen.output.post_norm, offset=1)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_norm_of_any_kind_is_scaled(architecture, tiny_target):
    norm, x = tiny_target(architecture).final_norm, torch.randn(5, 32)
    with torch.no_grad():
        wanted = 0.3 * norm(x)
        scale_norm(norm, 0.3)
        torch.testing.assert_close(norm(x), wanted)
