"""Unattended runs: `headstart auto` finds the best drafter for a target, its traffic and this machine within a time;
`headstart refit` trains a deployed head further on the traffic that it serves, and decides whether to replace it.

Read ../unattended_commands.py (options), then auto.py and refit.py: each ends with the list of its stages, in order.
Those of auto use machine.py, candidates.py, answers.py and rungs.py; those of refit comparing.py; both held_out.py,
training.py and in_server.py. running/ is the run in its folder; page.py its result. After a signal to stop, whatever
takes time raises SystemExit.
"""
