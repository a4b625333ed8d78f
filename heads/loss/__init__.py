"""From chain starts to a scalar: `chains` (where drafts start, what is supervised), `functions` (losses by name),
`cross_entropy` (its gradient in one pass), `restricted` (the target's logits of drafted tokens alone), `chunked` (all
depths, without ever holding all logits); `sight` (what queries see) and `fusing` (for torch.compile).
"""
