"""Heads in the layouts that serving engines load. `write` is the entry point. `serving` is what a family says of
engines, in a file of its own. `check`, with `contracts` and `gguf_check`, finds what is wrong with a folder;
`speculators` and `llamacpp` have what several families share there.
"""
