"""Decoding with speculation. Read `one_round` first, which is the algorithm on a page, then `loop` (`generate`), then
`engine`, which runs the steps of a round on the device by `replay`; `verify` has the accept rules, `sampling` the
target's choice of tokens, `widths` how many drafts are verified, `stopping` what ends an answer. `continuous` refills a
batch as its rows end.
"""

from .loop import generate as generate
