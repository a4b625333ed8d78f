"""Heads measured where they are served: `questions` (what is asked), `load` (so many at a time, or arriving at a rate),
`figures` (of a block of answers, and of both sides), `blocks` (of both sides in turns, kept on disk), `text_check` (are
they equal).
"""
