"""The training loop, on Accelerate; it is independent of the head family.

Read trainer.py first, which follows a run from start.py (config, data, checkpoint) through loop.py (a step, on
backend.py) and validation.py to the trained head.
"""
