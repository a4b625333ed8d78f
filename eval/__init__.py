"""Decoding and measuring. `generate` is the decoding loop over `engine`, which drafts and verifies; `verify` has the
accept rules, `sampling` the target's choice of tokens. Then `drafters`, `suites`, `measurement`, `report` and `plan`.
"""
