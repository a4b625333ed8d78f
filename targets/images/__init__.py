"""Pictures of rows: `pictures` (how rows give them), `reader` (the target's processor), `image_rows` (such a row, read
by the model's own code).
"""
