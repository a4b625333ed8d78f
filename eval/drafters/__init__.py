"""What proposes tokens besides trained heads: `lookup` (n-grams and suffixes of the text), `draft_model`, `translated`
(a draft model with another tokenizer), `sparse_self`, `synthetic`. `host` is what drafters on the host share.
"""
