"""From conversations, prompts or plain text to training batches with exact masks.

Rows: `sources`, `formats`, `mixture`; a clean data set: `prepare`, `filters`, `dataset_card`; tokens: the rooms `masks`
and `storage`; batches: `packing`, `loader`. The room `answers` has the target write answers; `plan` weighs extraction.
"""
