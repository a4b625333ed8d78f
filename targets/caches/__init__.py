"""Caches of decoding: `cache` first (keys and values of rows that advance independently), `masks` and `tree_nodes`,
with `attention` and `split_attention` over them; then recurrent layers: `state_cache`, `rounds` and `recurrences`.
"""
