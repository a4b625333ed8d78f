"""The error for bad input: one line that names the file, key or shape; the command line turns it into exit code 2."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from os import strerror
from pathlib import Path

REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)  # writing, by a full or failing disk


class BadInput(ValueError):
    """Something the user gave us cannot be used. The message is one line and says where the fault is."""


@contextmanager
def writing_into(folder: str | Path) -> Iterator[None]:
    """Raises BadInput naming the file, or the folder, where the system refuses to write: a full disk, and its like."""
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        told = re.search(r"\(os error (\d+)\)", str(error))  # by safetensors
        number = int(told[1]) if told else number
        if number not in REFUSED:
            raise
        where = (error.filename if isinstance(error, OSError) else None) or folder
        raise BadInput(f"{where}: cannot be written: {strerror(number)}") from error


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
