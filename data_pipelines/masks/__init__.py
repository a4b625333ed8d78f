"""From chats to token ids with exact supervision masks: `chat` first, then `assistant_masks` (where the assistant's
tokens are), `rendering` and `turn_by_turn` (the chat template), `messages`, `segments` (prompt, think,
answer), `traces` (long rows).
"""
