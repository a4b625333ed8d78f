"""Unattended runs: `headstart auto` finds the best drafter for a target, its traffic and this machine within a time;
`headstart refit` trains a deployed head further on the traffic that it serves, and decides whether to replace it.

Read commands.py (options) and stages.py (the stages of both, in order, and what runs them), then the stages: of auto
machine.py, answers.py, rungs.py and evaluation.py; of refit refit.py, which uses reading.py, foreign.py (answers of
others) and comparing.py. Both use held_out.py and training.py. session.py is a run in its folder, journal.py what it
found and decided (auto.json, refit.json), clock.py its budget, steps.py the `headstart` commands that it runs, page.py
its result.
"""
