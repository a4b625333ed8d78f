"""Shared parts of the unattended runs, `headstart auto` and `headstart refit`. No decision is taken here.

options.py has the options of both, clock.py counts the time, steps.py runs our ordinary commands, session.py opens
a run's folder, announces steps and keeps them, page.py tells what came of it.
"""
