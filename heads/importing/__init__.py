"""What others made: `published` finds heads on disk or on the hub, `importers` turns each known layout into one of
ours, `mtp_checkpoint` reads the modules in a target's checkpoint, and `gguf` turns files of llama.cpp into targets.
"""
