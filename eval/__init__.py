"""Decoding and measuring: `decoding` (`generate` and the engine), `drafters` (all but trained heads), `suites`
(prompts), `figures` (their definitions), `proof` (is the text the target's own?), `measurement`, `report` and `plan`.
"""
