"""What a target (target.py) is made of: parts.py, where its parts are; check.py, whether our reading of them is the
model's; prompts.py, reading prompts into its cache; same_vocabulary.py, whether a draft model speaks its tokens.
"""
