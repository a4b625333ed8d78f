"""The error for bad input: one line that names the file, key or shape; the command line turns it into exit code 2."""


class BadInput(ValueError):
    """Something the user gave us cannot be used. The message is one line and says where the fault is."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))  # what the user gave may have several


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
