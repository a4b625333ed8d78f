"""Pictures of rows: `pictures` (how rows give them), `reader` (the target's processor), and `rows`, which reads a row
with pictures by the model's own code.
"""
