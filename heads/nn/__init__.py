"""Layers that are trained, of heads and of targets that heads are trained on: `layers` first (parts of a Llama layer),
`decoder_layer` and `block_layer` (whole ones), `chain_attention` (many drafts in one pass) over `sight`, `masks` and
`documents` (what each query sees); then `batch` (the input of a step), `kept` and `fusing` (its memory and its speed).
"""
