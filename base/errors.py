"""The error for bad input: one line that names the file, key or shape; the command line turns it into exit code 2."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import strerror
from pathlib import Path

REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)  # writing, by a full or failing disk
FORBIDDEN = (errno.EACCES, errno.EPERM)  # reading or writing, by the rights of a file or folder
NO_ROOM = 2**16  # bytes
NO_TEMPORARY = "No usable temporary directory"  # how Python's error begins
ACTING = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class BadInput(ValueError):
    """Something the user gave us cannot be used. The message is one line and says where the fault is."""

    def __init__(self, message: object):
        super().__init__(printable(str(message)))


@contextmanager
def naming(where: str) -> Iterator[None]:
    """BadInput from inside with a text in front, such as the key of a config."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{where}{error}") from error


def printable(text: str, *, shown: str = "") -> str:
    """A text with the characters that a terminal acts on, such as ESC, escaped as in a Python string. shown: characters
    to leave as they are."""
    return ACTING.sub(lambda match: match[0] if match[0] in shown else match[0].encode("unicode_escape").decode(), text)


@contextmanager
def writing_into(folder: str | Path) -> Iterator[None]:
    """Turn errors of a full, failing or read-only disk, and of rights, into BadInput that names the file or the
    folder."""
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        told = re.search(r"\(os error (\d+)\)", str(error))  # by safetensors
        number = int(told[1]) if told else number
        if number == errno.ENOENT and NO_TEMPORARY in str(error):
            raise BadInput(f"TMPDIR: {strerror(errno.ENOSPC)}, or no rights: {first_line(error)}") from error
        if number not in (*REFUSED, *FORBIDDEN):
            raise
        where = (error.filename if isinstance(error, OSError) else None) or full_folder(folder)
        what = "" if number in FORBIDDEN else "cannot be written: "
        raise BadInput(f"{where}: {what}{strerror(number)}") from error


def full_folder(folder: str | Path) -> str | Path:
    """The folder that an error without a file's name is about: that of temporary files, where that one is full."""
    with suppress(OSError):
        temporary = os.environ.get("TMPDIR") or tempfile.gettempdir()
        if shutil.disk_usage(temporary).free < NO_ROOM:
            return f"TMPDIR {temporary}"
    return folder


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
