"""Lossless speculative decoding and the measurement of what a drafter saves."""
