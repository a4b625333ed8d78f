"""Samples and target states on disk: `samples`, `shards` and `shard_file` (rows mapped into memory), `extract` and
`features` (the target's states), `quantise` (8 bits).
"""
