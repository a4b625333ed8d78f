"""`make quickstart` (quickstart.sh, prompts.py): a real target, its answers, a head, a report. `make smoke` (smoke.sh,
toy_*.py): the same story on a small target of its own, without network. Not in the wheel.
"""
