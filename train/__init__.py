"""The training loop, over Accelerate; it knows no head by name.

Read trainer.py first: a run from start.py (config, data, checkpoint) through loop.py (a step, over backend.py) and
validation.py to the head that it writes.
"""
