"""Importing heads and targets. `importers` is the entry point: it finds out whose family a folder is, and that family's
`Serving` reads it, in its file of heads/export or, where that is long, in one here. `published` reads folders from disk
or the hub, `mtp_checkpoint` the MTP modules in a target's checkpoint, `gguf` converts GGUF files to targets.
"""
