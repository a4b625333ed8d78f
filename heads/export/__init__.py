"""Heads in the layouts that serving engines load. `write` is the entry point; then a file per kind of layout:
`portable` (EAGLE and speculators), `medusa`, `block`, `stitched` (MTP), `llamacpp`. `check`, with `contracts`, finds
what is wrong with a folder.
"""
