"""What runs that nobody watches have in common: `headstart auto` and `headstart refit`. No decision is taken here.

clock.py counts the time, steps.py runs our ordinary commands, session.py announces and keeps them, page.py tells what
came of it.
"""
