"""Drafters from text, and other models, do not read between layers."""

from two_layers import target, tiny_target

__all__ = ["target", "tiny_target"]
