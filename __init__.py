"""Headstart trains draft heads for speculative decoding on a frozen target and measures what they really save."""

__version__ = "0.1.0"
