"""What is measured here does not depend on how deep a target is."""

from two_layers import target, tiny_model, tiny_target

__all__ = ["target", "tiny_model", "tiny_target"]
