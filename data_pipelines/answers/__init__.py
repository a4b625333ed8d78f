"""The target's own answers to prompts: `regenerate` first, then `conversations` (turn by turn), `client` and
`endpoints` (servers), `store` (what is answered already).
"""
