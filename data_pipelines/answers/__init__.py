"""The target's own answers to prompts. Start with `regenerate`, then `conversations` (the requests, turn by turn),
`dispatch` (many conversations in threads or batches), `client` (servers), `store` (answers on disk).
"""
