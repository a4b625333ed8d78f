"""What others made: `published` finds heads on disk or on the hub, `importers` turns each known layout into one of
ours, and `gguf` turns the files of llama.cpp into targets.
"""
