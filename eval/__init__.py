"""Decoding and measuring. `generate` is the loop, on `engine`, which drafts and verifies; `verify` has accept rules,
`sampling` the target's choice of tokens. Then `drafters`, `suites`, `measurement`, `report` and `plan`.
"""
