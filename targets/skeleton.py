"""A target's shapes without its weights."""

import torch

from ..base.errors import BadInput, first_line
from .loading import TargetConfig, empty_model, quiet_loading, read_model_config
from .target import Target


class NoSkeleton(BadInput):
    """The target cannot be built without weights."""


def load_skeleton(config: TargetConfig) -> Target:
    """The target with shapes but no weights, on torch's meta device.

    Raises: BadInput if there is no such model, or it cannot be built without weights.
    """
    read_model_config(config)
    try:
        model = empty_model(config)
        with torch.device("meta"), quiet_loading():
            return Target(model, name=config.path, fingerprint="", source=config)
    except Exception as error:  # whatever the code of an unknown model raises
        raise NoSkeleton(f"target {config.path}: cannot be built without weights: {first_line(error)}") from error
