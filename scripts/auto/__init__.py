"""`headstart auto`: finds the best drafter for a target, its traffic and this machine within a time budget.

Start reading at command.py (options), then run.py (the stages in order) and choosing.py (the training stages).
budget.py, prediction.py and halving.py are pure functions that decide. machine.py, data.py, learning.py, sizes.py and
evaluation.py measure, mostly by running ordinary `headstart` commands (../unattended). journal.py stores findings and
decisions in auto.json, and page.py renders them as auto.html.
"""
