"""`headstart auto`: from a target and its traffic to the best head within a time. All of its decisions are made here.

Read command.py, then run.py (the stages in order). budget.py, prediction.py and halving.py decide, from figures alone;
machine.py, data.py, learning.py and evaluation.py get these figures, by our ordinary commands (../unattended);
journal.py keeps what was found and decided (auto.json), page.py tells it.
"""
