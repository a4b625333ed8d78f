"""Output folders are made with a marker, locked while in use, and nothing that was there before is touched."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from headstart.base import owned
from headstart.base.errors import BadInput
from headstart.base.owned import LOCK, MARKER, OwnedFolder, check_owner
from run_files import contents

HOLD = """
import sys, time
from headstart.base.owned import OwnedFolder
with OwnedFolder(sys.argv[1], command="headstart train"):
    print("held", flush=True)
    time.sleep(60)
"""


def owned_by(folder: Path, command: str = "headstart eval") -> OwnedFolder:
    return OwnedFolder(folder, command=command)


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_the_second_is_told_who_holds_the_folder_and_touches_nothing(holder, tmp_path):
    before = contents(tmp_path)
    with pytest.raises(BadInput) as caught:
        owned_by(tmp_path / "out", "headstart train")
    who = f"out: in use by process {holder.pid} on {platform.node()} (headstart train, since 20"
    assert who in str(caught.value)
    assert contents(tmp_path) == before
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with owned_by(tmp_path / "out", "headstart train") as folder:
        assert not folder.is_new, "a lock ends with its process, the folder stays"


@pytest.mark.slow
def test_of_many_at_once_one_gets_the_folder(tmp_path):
    for turn in range(10):
        path, start = tmp_path / f"out{turn}", time.monotonic() + 0.03
        told, telling = os.pipe()
        children = []
        for _ in range(4):
            child = os.fork()
            if not child:
                try:
                    while time.monotonic() < start:
                        pass
                    owned_by(path)
                    os.write(telling, b"got\n")
                except BaseException as error:
                    os.write(telling, f"{error}\n".encode())
                time.sleep(30)
                os._exit(0)
            children.append(child)
        with open(told) as file:
            lines = [file.readline() for _ in children]
        os.close(telling)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert sum("in use by process" in line for line in lines) == 3 and "got\n" in lines, lines


@pytest.mark.parametrize("name", ["progress/a", "tokens/a", ".draft.tmp", "config.yaml", ".hidden"])
def test_a_folder_that_is_not_ours_is_refused_before_anything_is_written(name, tmp_path):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(BadInput, match=r"out: holds other files \(.*\), not those of headstart eval; give a new"):
        owned_by(tmp_path / "out")
    assert contents(tmp_path) == {f"out/{name}": b"mine"}


def test_a_folder_of_another_command_is_refused(tmp_path):
    with owned_by(tmp_path / "out", "headstart train"):
        pass
    before = contents(tmp_path)
    for take in (lambda: owned_by(tmp_path / "out"), lambda: check_owner(tmp_path / "out", command="headstart eval")):
        with pytest.raises(BadInput, match="out: belongs to headstart train; give headstart eval another folder"):
            take()
    assert contents(tmp_path) == before
    with owned_by(tmp_path / "out" / "eval"):
        pass  # a folder within another is one of its own


def fail(folder: OwnedFolder) -> None:
    with folder:
        (folder.path / "half").write_text("")
        (folder.path / "inner").mkdir()
        raise RuntimeError


def test_a_failure_removes_only_what_was_made_here(tmp_path):
    (tmp_path / "feat" / "a").mkdir(parents=True)
    (tmp_path / "feat" / "a" / "finished").write_text("")
    with pytest.raises(RuntimeError):
        fail(owned_by(tmp_path / "feat" / "b"))
    assert set(contents(tmp_path)) == {"feat/a/finished"} and not (tmp_path / "feat" / "b").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError):
        fail(owned_by(tmp_path / "empty"))
    assert os.listdir(tmp_path / "empty") == [], "it was there"
    with owned_by(tmp_path / "old"):
        pass
    with pytest.raises(RuntimeError):
        fail(owned_by(tmp_path / "old"))
    assert (tmp_path / "old" / "half").exists(), "of an earlier process, to go on with"
    kept = owned_by(tmp_path / "kept")
    kept.keep()
    with pytest.raises(RuntimeError):
        fail(kept)
    assert (tmp_path / "kept" / "half").exists()


@pytest.mark.parametrize("call", ["_mark", "_locked", "os.rename"])
def test_a_folder_is_there_with_its_marker_or_not_at_all(call, monkeypatch, tmp_path):
    """Killed at any step of being made; the next process then makes it, and nothing else is left."""
    child = os.fork()
    if not child:
        monkeypatch.setattr(f"headstart.base.owned.{call}", lambda *_: os._exit(9))
        owned_by(tmp_path / "out")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (tmp_path / "out").exists()
    with owned_by(tmp_path / "out"):
        assert os.listdir(tmp_path) == ["out"] and {MARKER, LOCK} <= set(os.listdir(tmp_path / "out"))


def test_what_cannot_be_a_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in ("file", "file/deep", "link"):
        with pytest.raises(BadInput, match=path):
            owned_by(tmp_path / path)
    with owned_by(tmp_path / "out"):
        (tmp_path / "out" / MARKER).write_text("")
    with pytest.raises(BadInput, match=r"out/.headstart.json: damaged"):
        owned_by(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "out"]


def test_settings_are_kept_until_they_are_recorded_anew(tmp_path):
    with OwnedFolder(tmp_path / "out", command="headstart eval", settings={"k": (1, 2)}) as folder:
        assert folder.settings == {"k": [1, 2]}
    with OwnedFolder(tmp_path / "out", command="headstart eval", settings={"k": 3}) as folder:
        assert folder.settings == {"k": [1, 2]}
        folder.record({"k": 3})
    with owned_by(tmp_path / "out") as folder:
        assert folder.settings == {"k": 3}


def test_a_worker_that_outlives_its_parent_holds_nothing(tmp_path):
    folder = owned_by(tmp_path / "out")
    told, telling = os.pipe()
    child = os.fork()
    if not child:
        os.write(telling, b"started")
        time.sleep(30)
        os._exit(0)
    try:
        os.read(told, 7)
        folder.close()
        owned_by(tmp_path / "out").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_where_there_are_no_locks_the_named_holder_decides(monkeypatch, tmp_path, ended_process):
    def unsupported(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(owned.fcntl, "flock", unsupported)
    first = owned_by(tmp_path / "out")
    with pytest.raises(BadInput, match=f"in use by process {os.getpid()} on"):
        owned_by(tmp_path / "out")
    first.close()
    ours = os.getpid()  # in a container, of the process that was killed too
    for host, pid, is_free in (
        (platform.node(), ended_process, True),
        (platform.node(), ours, True),
        ("elsewhere", ended_process, False),
    ):
        held = {"pid": pid, "host": host, "command": "headstart eval", "since": ""}
        (tmp_path / "out" / LOCK).write_text(json.dumps(held))
        if is_free:
            owned_by(tmp_path / "out").close()
        else:
            with pytest.raises(BadInput, match="in use by process .* on elsewhere"):
                owned_by(tmp_path / "out")
    for strange in ("[1]", '{"pid": 1}', "3"):  # names nobody
        (tmp_path / "out" / LOCK).write_text(strange)
        owned_by(tmp_path / "out").close()


def test_the_home_folder_is_meant_by_a_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with owned_by(Path("~/out")) as folder:
        assert folder.path == tmp_path / "out"
