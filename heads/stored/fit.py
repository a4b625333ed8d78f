"""Whether a head fits a target, and what it costs, from the target's config alone: no weights are read."""

from dataclasses import dataclass

import torch
from torch import nn

from ...base.errors import BadInput
from ...targets.loading import TargetConfig
from ...targets.skeleton import NoSkeleton, load_skeleton
from ...targets.target import Target
from ..base import DraftHead, HeadConfig
from ..families import head_class

TRAINING_BYTES = 16  # per trained parameter: an fp32 weight, its gradient and AdamW's two moments
FROZEN_BYTES = 4  # per frozen parameter of the head: an fp32 weight


@dataclass(frozen=True)
class HeadSize:
    """What a head reads from the target, and its memory."""

    feature_layers: tuple[int, ...]
    reads_post_norm: bool
    parameters: int  # trained ones only
    memory_bytes: int  # in training: weights, gradients and optimizer state; activations left out
    serving_bytes: int  # all the head's parameters in the target's dtype


@dataclass(frozen=True)
class TargetSize:
    """Bytes of a target's weights by part, in the dtype of its config."""

    embedding: int
    layers: int  # all of them
    largest_layer: int
    output: int  # the final norm and the output layer; one that is the embedding too is counted there

    @property
    def whole(self) -> int:
        return self.embedding + self.layers + self.output

    @property
    def bare(self) -> int:
        """The bytes of a target without its layers."""
        return self.embedding + self.output


def check_numbers(config: HeadConfig, skeleton: Target) -> None:
    """Raises BadInput if the target lacks a feature layer or has fewer tokens than the draft vocabulary."""
    skeleton.check_layers(tuple(config.feature_layers or ()))
    size = config.draft_vocab_size
    if size is not None and not 1 <= size <= skeleton.vocab_size:
        raise BadInput(f"draft vocabulary of {size} tokens: should be between 1 and the target's {skeleton.vocab_size}")


def build_skeleton_head(config: HeadConfig, skeleton: Target) -> DraftHead:
    """The head with shapes but no weights. Raises BadInput if it does not fit the target."""
    check_numbers(config, skeleton)
    with torch.device("meta"):
        size = config.draft_vocab_size
        ids = None if size is None else torch.arange(size)  # [Vd] any tokens: only shapes matter
        head = head_class(config.type)(config, skeleton, ids)
    skeleton.check_layers(head.feature_layers)
    return head


def check_fit(config: HeadConfig, target: TargetConfig) -> Target | None:
    """Raises BadInput if there is no such target or the head does not fit it, before any weights are loaded; returns
    the target without weights.

    Heads that start from a checkpoint are checked when loaded, as are targets that cannot be built without weights: of
    these it returns None.
    """
    try:
        skeleton = load_skeleton(target)
    except NoSkeleton:
        return None
    check_numbers(config, skeleton)
    if not (getattr(config, "path", None) or getattr(config, "init", None) == "checkpoint"):
        build_skeleton_head(config, skeleton)
    return skeleton


def target_size(skeleton: Target) -> TargetSize:
    """Bytes by part of a target without weights."""
    counted = set[int]()

    def num_bytes(*modules: nn.Module | None) -> int:
        new = {id(value): value for module in modules if module is not None for value in module.parameters()}
        new = {key: value for key, value in new.items() if key not in counted}
        counted.update(new)
        return sum(value.numel() * value.element_size() for value in new.values())

    embedding, output = num_bytes(skeleton.input_embedding), num_bytes(skeleton.final_norm, skeleton.output_layer)
    layers = [num_bytes(layer) for layer in skeleton.layers]
    rest_of_text = num_bytes(skeleton.base)  # as an embedding per layer
    return TargetSize(embedding, sum(layers) + rest_of_text, max(layers), output)


def row_share(target: Target) -> float:
    """Weights of a row of the target's output layer, relative to all of its weights."""
    return target.hidden_size / sum(parameter.numel() for parameter in target.model.parameters())


def head_size(config: HeadConfig, skeleton: Target) -> HeadSize:
    """What the head reads and its memory. Raises BadInput if it does not fit the target."""
    head = build_skeleton_head(config, skeleton)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    every = sum(p.numel() for p in head.parameters())
    return HeadSize(
        feature_layers=head.feature_layers,
        reads_post_norm=head.reads_post_norm,
        parameters=trained,
        memory_bytes=TRAINING_BYTES * trained + FROZEN_BYTES * (every - trained),
        serving_bytes=skeleton.dtype.itemsize * every,
    )
