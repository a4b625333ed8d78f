"""Pictures of rows: `pictures` (how rows give them), `reader` (the target's processor) and `image_rows`, which reads such
a row by the model's own code.
"""
