"""Writing files and folders atomically; with owned.py the only place that renames, removes or locks on disk.

After a kill or a failure at any point, either the old or the new version exists, complete. The new one is written next
to it under a name of its own, `unfinished_name`; leftovers of a kill are removed by the next writer of NAME.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from .errors import BadInput

LOCAL = "a local path"
LocalPath = Annotated[str, LOCAL]  # of a config: the loader replaces `~` by the home folder
LEFT_SECONDS = 86_400.0  # without a change, after which a file of unknown processes is a leftover
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # by the file system, such as NFS, or an old kernel


def from_anywhere(name: str) -> str:
    """A path that is there as an absolute one, which is found from any working directory; else, as a hub id, itself."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def cache_root() -> Path:
    """The folder of files that can be recreated: $HEADSTART_CACHE, else ~/.cache/headstart; of a user
    without a home, as in a container under a number alone, a folder among the temporary files."""
    home = os.path.expanduser("~")
    own = Path(home, ".cache/headstart") if home != "~" else Path(tempfile.gettempdir(), f"headstart-{os.getuid()}")
    return Path(os.path.expanduser(os.environ.get("HEADSTART_CACHE") or own))


def write_text(path: str | Path, text: str) -> Path:
    """Writes a UTF-8 file; returns its path."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # a half of a character
    return Path(path)


def write_json(path: str | Path, value: Any, *, indent: int | None = 2) -> Path:
    """Writes a JSON file that ends with a newline; returns its path."""
    return write_text(path, json.dumps(value, indent=indent) + "\n")


def sha256_of(path: str | Path) -> str:
    """The hex digits of a file's sha256."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lack_of(folder: str | Path, name: str) -> str:
    """Says why there is no file of that name in a folder, in words that follow the folder's name."""
    if Path(folder).is_dir():
        return f"no {name} in it"
    return "a file, not a folder" if Path(folder).exists() else "no such folder"


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path next to `path` for a new file, which replaces `path` at the end; removed after an exception.

    Missing parent folders are created.
    """
    path = Path(path)
    temporary = unfinished(path)
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder next to `path`, which replaces `path` at the end; removed after an exception.

    An old folder is exchanged with the new one in one system call, and then removed. File systems without that call
    need two renames, and a kill between them leaves no folder: `restore_folder` then restores the old one.

    Raises: NotADirectoryError if `path` is a file.
    """
    path = Path(path)
    restore_folder(path)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file, not a folder", str(path))
    temporary = unfinished(path)
    try:
        temporary.mkdir()
        yield temporary
        _sync_folder(temporary)
        if not path.exists():
            os.replace(temporary, path)
        elif not _exchange(temporary, path):
            os.replace(path, _replaced(path))
            os.replace(temporary, path)
        _sync(path.parent)
    finally:
        restore_folder(path)
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder, which is renamed to `path` at the end; removed after an exception.

    Raises: BadInput if `path` exists, before or at the end, or the folder cannot be created.
    """
    path = Path(path).expanduser()
    if path.exists() or path.is_symlink():
        raise BadInput(f"{path}: exists already")
    try:
        temporary = unfinished(path)
        temporary.mkdir()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    try:
        yield temporary
        _sync_folder(temporary)
        try:
            os.rename(temporary, path)  # over nothing, or an empty folder
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}; it was made meanwhile") from error
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def restore_folder(path: str | Path) -> None:
    """Restore the old folder after a kill between the two renames of `replacing_folder`. Readers call this first."""
    path = Path(path)
    if path.exists():
        shutil.rmtree(_replaced(path), ignore_errors=True)
    elif _replaced(path).is_dir():
        os.replace(_replaced(path), path)


def remove(path: str | Path) -> None:
    """Remove a file or a folder, if it exists; a folder disappears atomically."""
    path = Path(path)
    with suppress(FileNotFoundError, NotADirectoryError):
        if path.is_dir() and not path.is_symlink():
            temporary = unfinished(path)
            os.replace(path, temporary)
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            path.unlink()


def remove_unfinished(folder: str | Path, name: str | None = None) -> None:
    """Remove unfinished files that killed processes left in a folder; name: only those of this file or folder.

    Of processes that are numbered otherwise, as in another container, it is not known whether they run: theirs are
    removed when they have not changed for LEFT_SECONDS.
    """
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        match = re.fullmatch(r"\.(.+)\.(\d+)-([0-9a-f]{8})-[0-9a-f]{8}\.unfinished", path.name)
        if match is None or name not in (None, match[1]):
            continue
        with suppress(OSError):  # removed meanwhile, by another process, or another user's
            is_known = match[3] == _numbering()
            if not is_running(int(match[2])) if is_known else time.time() - _last_change(path) > LEFT_SECONDS:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def unfinished_name(name: str, process: int) -> str:
    """The name under which a process writes NAME: .NAME.PROCESS-NUMBERING-RANDOM.unfinished"""
    return f".{name}.{process}-{_numbering()}-{secrets.token_hex(4)}.unfinished"


@cache
def _numbering() -> str:
    """8 hex digits, equal for processes that number each other alike: of one host, and there of one container."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:8]


def _last_change(path: Path) -> float:
    return max(part.lstat().st_mtime for part in (path, *(path.rglob("*") if path.is_dir() else ())))


def locked(path: str | Path, *, waits: bool = False) -> BinaryIO:
    """A file opened for reading and appending, created if missing, and locked until it is closed or the process ends.

    The caller closes it. Raises BadInput if another process has locked it, which file systems without locks do not
    know. Args: waits: until that has ended, instead.
    """
    file = Path(path).open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))  # the system ends it, also after a kill
    except OSError as error:
        if waits or error.errno in (*UNSUPPORTED, errno.ENOLCK):
            return file
        file.close()
        raise BadInput(f"{path}: in use by another process") from error
    return file


def unfinished(path: Path) -> Path:
    """The temporary path at which this process writes `path`; it does not exist. Missing parent folders are created.

    Raises: NotADirectoryError if the parent is a file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, f"{path.parent} is a file, not a folder", str(path)) from None
    remove_unfinished(path.parent, path.name)
    return path.with_name(unfinished_name(path.name, os.getpid()))


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def is_running(process: int) -> bool:
    """Whether a process of this machine has the number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's, or none of a process number
        return True
    return True


def _sync_folder(path: Path) -> None:
    """Flush a new folder, whose files others may read as they may read the folder: safetensors keeps them private."""
    readable = path.stat().st_mode & 0o666
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder, name)
            if not file.is_symlink():
                file.chmod(file.stat().st_mode | readable)
            _sync(file)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED or not path.is_dir():  # some file systems sync no folders
            raise
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Atomically exchange two paths on one file system; returns False if the system does not support it."""
    library, here = ctypes.CDLL(None, use_errno=True), -100  # AT_FDCWD: relative paths start in the working directory
    try:
        failed = library.renameat2(here, os.fsencode(first), here, os.fsencode(second), 2)  # RENAME_EXCHANGE
    except AttributeError:  # not of Linux, or old
        return False
    if failed and ctypes.get_errno() not in UNSUPPORTED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(second))
    return not failed
