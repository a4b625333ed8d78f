"""From conversations, prompts or plain text to training batches with exact masks.

Rows: `sources`, `formats`, `mixture`; a clean data set: `prepare`, `filters`, `dataset_card`; tokens: the packages
`masks` and `storage`; batches: `packing`, `loader`. The package `answers` lets the target write answers; `plan` and
`comparison` estimate whether extracting the target's states pays off.
"""
