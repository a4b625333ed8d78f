"""Draft heads. `base` first: the contract of a head; then `drafting/` and a file for each family, which `families`
lists. `nn/` has their layers, `loss/` what they are trained by, `start/` where they start, `stored/` their folders.
"""
