"""Shared parts of the unattended runs, `headstart auto` and `headstart refit`.

options.py has the command-line options of both, clock.py tracks the time budget, steps.py runs ordinary `headstart`
commands, session.py opens a run's folder and its journal, pace.py times training steps, and page.py renders the result.
"""
