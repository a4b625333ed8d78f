"""Unattended runs: `headstart auto` finds the best drafter for a target, its traffic and this machine within a time;
`headstart refit` trains a deployed head further on the traffic that it serves, and decides whether to replace it.

Read commands.py (options), then auto.py and refit.py: each ends with the list of its stages, in order, which
session.py runs. The stages of auto use machine.py, answers.py and rungs.py; those of refit reading.py, foreign.py
(answers of others) and comparing.py; both held_out.py and training.py. session.py is a run in its folder, journal.py
what it found and decided (auto.json, refit.json), clock.py its budget, steps.py the `headstart` commands that it runs,
page.py its result.
"""
