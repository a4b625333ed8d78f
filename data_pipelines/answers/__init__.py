"""The target's own answers to prompts. Start with `regenerate`, then `conversations` (the requests, turn by turn),
`asking` (many conversations in threads or batches), `client` (servers), `store` (answers on disk).
"""
