"""The training loop, on Accelerate; it is independent of the head family.

Read trainer.py first, which follows a run from start.py (a run's inputs/, its head, its checkpoint) through loop.py (a
step, on backend.py) and validation.py to the trained head; watching/ sees how it goes.
"""
