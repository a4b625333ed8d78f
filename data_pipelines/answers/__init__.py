"""The target's own answers to prompts: `regenerate` first, then `conversations` (what is asked, turn by turn), `asking`
(many conversations by threads or in batches), `client` (servers), `store` (what is answered already).
"""
