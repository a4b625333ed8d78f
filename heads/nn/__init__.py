"""Layers and attention that head families are built from: `layers` first, then `attention` and `cache`, which serve
decoding; `split_attention`, `chain_attention`, `fusing` and `repeated` make long contexts and training cheaper;
`documents` keeps packed texts apart.
"""
