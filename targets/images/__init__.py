"""Pictures of rows: `pictures` (how rows give them), `reader` (the target's processor), and `image_rows`, which reads one
with pictures by the model's own code.
"""
