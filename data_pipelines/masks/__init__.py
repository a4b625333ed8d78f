"""Rows to token ids with exact supervision masks. Start with `chat`, then `assistant_masks` (finds the assistant's
tokens), `rendering` and `turn_by_turn` (chat templates), `messages`, `segments` (prompt, think, answer), `traces` (long
rows).
"""
