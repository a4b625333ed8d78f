"""Importing heads and targets: `published` reads heads from disk or the hub, `importers` converts each known layout to
our heads, `mtp_checkpoint` reads the MTP modules in a target's checkpoint, `gguf` converts GGUF files to targets.
"""
