"""Heads in the layouts that serving engines load. `write` is the entry point. `serving` is what a family says of
engines and of the folders that they load, in a file of its own. `check`, with `contracts` and `gguf_check`, finds what
is wrong with a folder; `speculators` and `llamacpp` have what several families share there.
"""
