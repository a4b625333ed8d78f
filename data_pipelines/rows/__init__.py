"""Rows as they are read: `config` (the `data:` section of a run), `sources` and `formats` (where rows come from),
`row_shapes` (one form for all), `filters`, `mixture`, `joined_chats`, `traffic`; `samples` is what they become.
"""
