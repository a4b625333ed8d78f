"""The error for bad input: one line that names the file, key or shape; the command line turns it into exit code 2."""


class BadInput(ValueError):
    """Something the user gave us cannot be used. The message is one line and says where the fault is."""
