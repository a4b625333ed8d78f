"""Proofs that what is measured is the target's own: `own_forward` first, then `baseline` (before anything is timed),
`lossless` and `texts` (those that differ), and `sampling_check`. `config` is how to measure, `runner` decodes for both.
"""
