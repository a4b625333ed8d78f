"""From conversations, prompts or plain text to training batches with exact masks.

`rows` (where they come from, and one form for all); a clean data set: `prepare`, `dataset_card`; tokens: `masks` and
`storage`; batches: `row_sequence`, `loader`. `answers` lets the target write answers, `served` gets its states from
a server.
"""
