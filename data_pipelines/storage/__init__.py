"""Samples and target states on disk: `samples`, `shards` and `shard_file` (rows mapped into memory), `features` (which
states are stored), `extract` (runs the target and stores them), `quantise` (storage formats).
"""
