"""`headstart refit`: trains a deployed head further on the traffic that it serves, and decides whether to replace it.

Start reading at command.py (options), then run.py (the stages in order). data.py splits the traffic, reading.py runs
target and head over it, foreign.py finds answers that the target did not write, learning.py trains. drift.py and
decision.py interpret the figures. journal.py stores findings and decisions in refit.json, and page.py renders them as
refit.html.
"""
