"""Samples and target states on disk: `samples`, `shards` and `shard_file` (rows mapped into memory), `features` (which
states are kept), `extract` (the target writes them), `quantise` (8 bits).
"""
