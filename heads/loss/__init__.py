"""From chain starts to a scalar: `chains` (where drafts start, what is supervised), `functions` (losses by name),
`cross_entropy` (its gradient in one pass), `chunked` (all depths, without ever holding all logits).
"""
