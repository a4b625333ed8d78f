"""The first loss of every family on every target is at most that of guessing evenly, log(draft vocabulary)."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.heads.base import DraftBatch, DraftHead, depth_weights_of
from headstart.heads.loading import fingerprint_of
from headstart.heads.registry import HEADS, build_head
from headstart.heads.target import Target

MARGIN = 0.1  # nats above even guessing
SMOLLM2 = "HEADSTART_SMOLLM2"  # environment variable: a Hugging Face folder of SmolLM2-135M-Instruct
# the parts of a layer that write to the residual stream; Gemma 3 normalises what they write
WRITERS = ("o_proj.weight", "down_proj.weight", "down_proj", "dense.weight", "dense_4h_to_h.weight")
GEMMA_WRITERS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
TEXT = """Once upon a time there was a little girl named Lily. She had a red ball and she liked to play with it in the
park. One day her ball rolled under a big tree. "Can you help me?" she asked the bird. The bird smiled and said, "Yes, I
can." To find how many balls there are in all, we add 8 balls and 5 balls: 8 + 5 = 13. The answer is 13."""


def first_loss(head: DraftHead, batch: DraftBatch) -> float:
    """The loss of a batch over the sum of the depth weights, in nats above guessing evenly."""
    config = head.config
    with torch.no_grad():
        loss = head.train().loss(batch).loss.item()
    weights = depth_weights_of(config.depth_weights, decay=config.depth_decay, num_depths=head.num_depths)
    size = config.draft_vocab_size or head.target.vocab_size
    return loss / sum(weights) - math.log(size)


def fresh(head_type: str, target: Target, **changes: Any) -> DraftHead:
    return build_head(HEADS[head_type].config_class(type=head_type, loss={"soft_ce": 1.0}, **changes), target)


def scaled_target(model: Any, *, states: float, gain: float) -> Target:
    """A target whose layers write `states` times as much, and whose final norm has `gain` times its gain."""
    is_gemma = model.config.model_type.startswith("gemma")
    offset = float(is_gemma)  # Gemma stores gains as 1 + w
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(GEMMA_WRITERS if is_gemma else WRITERS):
                parameter.copy_((parameter + offset) * states - offset)
        norm: Any = Target(model, name="before", fingerprint="").final_norm
        norm.weight.copy_((norm.weight + offset) * gain - offset)
    return Target(model, name="scaled", fingerprint=fingerprint_of(model))


@pytest.mark.parametrize("gain", [1, 20])
@pytest.mark.parametrize("states", [1, 30, 300])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "qwen3_moe"])
def test_on_targets_with_states_and_norms_of_any_scale(family, states, gain, tiny_model, make_batch):
    target = scaled_target(tiny_model(family), states=states, gain=gain)
    above = {}
    for name in HEADS:
        head = fresh(name, target)
        above[name] = first_loss(head, make_batch(target, head, num_rows=4, length=32))
    assert max(above.values()) <= MARGIN, above


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {"num_layers": 2}),
    ("eagle3", {"num_layers": 2, "fc_norm": True, "norm_output": True}),
    ("eagle3", {"norm_before_residual": True, "norm_before_fc": True}),
    ("hydra", {"prefix_attention": True, "num_blocks": 2}),
    ("hydra", {"output": "shared"}),
    ("medusa", {"num_blocks": 2}),
    ("mtp", {"init": "random"}),
    ("mtp", {"layout": "mimo", "independent": True}),
    ("mtp", {"feedback": "pre_norm"}),
    ("draft_lm", {"hidden_size": 16, "num_layers": 1}),
]


@pytest.mark.parametrize(("head_type", "changes"), VARIANTS, ids=str)
def test_of_every_kind_of_head(head_type, changes, tiny_model, make_batch):
    target = scaled_target(tiny_model("llama"), states=30, gain=20)
    head = fresh(head_type, target, **changes)
    assert first_loss(head, make_batch(target, head, num_rows=4, length=32)) <= MARGIN


def test_every_parameter_learns_from_the_first_step(head_type, tiny_model, make_batch):
    """What starts small must not start at zero, where others behind it would get no gradient."""
    target = scaled_target(tiny_model("llama"), states=30, gain=20)
    head = fresh(head_type, target).train()
    head.loss(make_batch(target, head)).loss.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_on_smollm2():
    folder = os.environ.get(SMOLLM2, "")
    if not Path(folder, "config.json").is_file():
        pytest.skip(f"{SMOLLM2} names no folder with SmolLM2-135M-Instruct: {folder!r}")
    target = Target.load(folder)
    ids = torch.tensor([target.tokenizer(TEXT)["input_ids"][:48]])
    above = {}
    for name in HEADS:
        head = fresh(name, target)
        output = target.forward(ids, feature_layers=head.feature_layers)
        above[name] = first_loss(head, DraftBatch(ids, torch.arange(ids.shape[1])[None] >= 8, output))
    assert max(above.values()) <= MARGIN, json.dumps(above)
