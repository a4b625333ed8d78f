"""Decoding and measuring, in six rooms: `decoding` (`generate` and the engine), `drafters` (all but trained heads),
`suites` (prompts), `measurement`, `report` and `plan`.
"""
