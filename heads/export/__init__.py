"""Heads as serving engines load them: `write` first (plain models too), then a file per kind of layout: `portable`
(EAGLE and speculators), `medusa`, `stitched` (MTP). `check`, with `contracts`, finds what is wrong with a folder.
"""
