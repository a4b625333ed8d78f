"""`headstart refit`: a deployed head, kept fresh on the traffic that it serves. All of its decisions are made here.

Read command.py, then run.py (the stages in order). data.py splits the traffic, reading.py has target and head read it,
foreign.py finds the answers of others, drift.py and decision.py say what the figures mean; journal.py keeps them
(refit.json), page.py tells them.
"""
