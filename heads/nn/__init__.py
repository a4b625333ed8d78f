"""Layers of heads: `layers` first (parts of a Llama layer), `decoder_layer` and `block_layer` (whole ones),
`chain_attention` (many drafts in one pass), `candidates` with `dflash2` and `lilicorr` (which drafts go together); then
`batch` (the input of a step), `kept` (its memory) and `mask_token`.
"""
