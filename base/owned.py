"""Output folders of commands: they have a marker file with command and settings, and a lock while they are written.

A folder is created together with its marker and its lock in one rename. The lock is the system's (`flock`), which ends
with the process in any case; the lock file names its holder. On file systems without such locks the name decides: the
folder is in use if the holder is running, or is on another host.
"""

import errno
import fcntl
import json
import os
import platform
import shutil
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Self

from .differing import is_same
from .errors import BadInput
from .files import UNSUPPORTED, is_running, remove, unfinished, write_json

MARKER, LOCK = ".headstart.json", ".headstart.lock"
_held: set[BinaryIO] = set()  # the lock files of this process, which forked children must not keep locked


class OwnedFolder:
    """A folder that only this process writes, from here to the end of the `with` block.

    A missing folder is created, with its parents; an empty one is accepted. After an exception a folder that was
    created here is removed, and an empty one emptied again, unless `keep` was called; any other stays as it is.

    path: with `~` expanded. is_new: whether it was missing or empty.

    Raises: BadInput, before anything is written, if another process holds it, another command made it, or it has files
    but no marker; and if it cannot be created or written.
    """

    def __init__(self, path: str | Path, *, command: str, settings: Mapping[str, Any] | None = None):
        """Args: command: such as `headstart eval`. settings: its settings, as JSON; an existing marker keeps its own
        until `record`."""
        self.path, self.command = Path(path).expanduser(), command
        self.is_new = self._is_kept = self._was_there = False
        try:
            self._lock = self._taken(settings or {})
            self.settings: dict[str, Any] = _marker(self.path)["settings"]
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror or error}") from error

    def keep(self) -> None:
        """From now on keep the folder after a failure, so that the same command can resume in it."""
        self._is_kept = True

    def record(self, settings: Mapping[str, Any]) -> None:
        """Replace the settings in the folder's marker."""
        self.settings = _plain(settings)
        _mark(self.path, self.command, self.settings)

    def check_settings(self, settings: Mapping[str, Any], *, finished: str, overwrite: bool) -> None:
        """Raises BadInput if the file `finished` is there, made with other settings, and is not to be replaced."""
        now, before = _plain(settings), self.settings
        key = next((key for key in [*now, *before] if not is_same(before.get(key), now.get(key))), None)
        if (self.path / finished).exists() and key is not None and not overwrite:
            was, would = (json.dumps(values.get(key)) for values in (before, now))
            problem = f"holds a finished {finished} with {key} {was}, this would be with {would}"
            raise BadInput(f"{self.path}: {problem}; --overwrite replaces it, or give a new folder")

    def close(self) -> None:
        """Release the lock."""
        with suppress(OSError):
            self._lock.truncate(0)
        _held.discard(self._lock)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is not None and not self._is_kept and self.is_new:
                for path in self.path.iterdir() if self._was_there else [self.path]:
                    remove(path)
        finally:
            self.close()

    def _taken(self, settings: Mapping[str, Any]) -> BinaryIO:
        for _ in range(9):
            try:
                if not self.path.exists() and (lock := self._make(settings)) is not None:
                    return lock
                check_owner(self.path, command=self.command)
                lock = _locked(self.path, self.command)
            except FileNotFoundError:  # removed meanwhile, by the process that had made it
                continue
            check_owner(self.path, command=self.command)
            if not (self.path / MARKER).exists():  # an empty folder
                self.is_new = self._was_there = True
                _mark(self.path, self.command, settings)
            return lock
        raise FileNotFoundError(errno.ENOENT, "cannot be made")

    def _make(self, settings: Mapping[str, Any]) -> BinaryIO | None:
        """The lock of a folder that is made now; None if another process was faster."""
        temporary = unfinished(self.path)
        temporary.mkdir()
        lock = None
        try:
            _mark(temporary, self.command, settings)
            lock = _locked(temporary, self.command)
            os.rename(temporary, self.path)  # over nothing, or an empty folder
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if lock is not None:
                _held.discard(lock)
                lock.close()
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            return None
        self.is_new = True
        return lock


def check_owner(path: str | Path, *, command: str) -> None:
    """Raises BadInput if a folder is not one that `command` may write into: a file, not ours, or another command's.
    Writes nothing."""
    path = Path(path).expanduser()
    if path.is_symlink() and not path.exists():
        raise BadInput(f"{path}: a link to nothing")
    if not path.exists():
        return
    if not path.is_dir():
        raise BadInput(f"{path}: a file, not a folder")
    if (path / MARKER).is_file():
        other = _marker(path)["command"]
        if other != command:
            raise BadInput(f"{path}: belongs to {other}; give {command} another folder")
        return
    names = sorted(name for name in os.listdir(path) if name != LOCK)
    if names:
        raise BadInput(f"{path}: holds other files ({names[0]}), not those of {command}; give a new folder")


def _marker(path: Path) -> dict[str, Any]:
    try:
        marker = json.loads((path / MARKER).read_text())
        return {"command": str(marker["command"]), "settings": dict(marker["settings"])}
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path / MARKER}: damaged; give a new folder") from error


def _mark(path: Path, command: str, settings: Mapping[str, Any]) -> None:
    made = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(path / MARKER, {"command": command, "made": made, "settings": _plain(settings)})


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings after a round trip through JSON."""
    return json.loads(json.dumps(dict(settings), default=str))


def _locked(folder: Path, command: str) -> BinaryIO:
    """Lock an existing folder; the lock file names this process. Raises BadInput if another process has the lock."""
    path = folder / LOCK
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_lock = True
        except OSError as error:
            if error.errno not in (*UNSUPPORTED, errno.ENOLCK, errno.EWOULDBLOCK):
                file.close()
                raise
            has_lock = error.errno != errno.EWOULDBLOCK and not _is_held(file)
        if not has_lock:
            holder = _holder(file)
            file.close()
            who = "process {pid} on {host} ({command}, since {since})" if holder else "another process"
            raise BadInput(f"{folder}: in use by {who.format(**holder)}")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()  # of a folder that was removed
    since = datetime.now(UTC).isoformat(timespec="seconds")
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), "host": platform.node(), "command": command, "since": since}).encode())
    file.flush()
    _held.add(file)
    return file


def _holder(file: BinaryIO) -> dict[str, Any]:
    """The holder named in a lock file; empty if there is none, or the file holds something else."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) and {"pid", "host", "command", "since"} <= holder.keys() else {}


def _is_held(file: BinaryIO) -> bool:
    """Whether the named holder still has the folder, on file systems without locks. In a container every start may have
    the same number."""
    holder = _holder(file)
    if holder and holder["host"] == platform.node() and holder["pid"] == os.getpid():
        return any(os.path.samestat(os.fstat(one.fileno()), os.fstat(file.fileno())) for one in _held)
    return bool(holder) and (holder["host"] != platform.node() or is_running(holder["pid"]))


def _leave_to_parent() -> None:
    """In a forked child: close inherited locks, so that a worker that outlives its parent does not block others."""
    while _held:
        _held.pop().close()


os.register_at_fork(after_in_child=_leave_to_parent)
