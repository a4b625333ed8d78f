"""Rows to token ids with exact supervision masks. Start with `chat`, then `assistant_masks` (finds the assistant's
tokens), `rendering` and `turn_by_turn` (chat templates), `segments` (prompt, think, answer), `traces` (long rows),
`retokenised` (ids that the target wrote beside those of their text).
"""
