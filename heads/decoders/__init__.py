"""Decoders, which read tokens into caches: `cache` first (keys and values of rows that advance independently), with
`attention` and `split_attention` over it, and `tree_nodes`; then the layers of whole targets, `joined_decoder` on a GPU
and `cpu` in bf16 on a CPU; last recurrent layers: `state_cache`, `rounds` and `recurrences`.
"""
