"""Files and folders are written whole or not at all, whatever call a kill or a failure comes at."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from headstart.configs import files
from headstart.configs.errors import BadInput
from headstart.configs.files import (
    locked,
    new_folder,
    remove,
    remove_unfinished,
    replacing,
    replacing_folder,
    restore_folder,
    write_json,
    write_text,
)


def contents(folder: Path) -> dict[str, str]:
    """The files below a folder, the unfinished ones aside."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".unfinished" not in str(path)]
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(paths)}


def save_folder(path: Path, word: str) -> None:
    with replacing_folder(path) as folder:
        (folder / "a").write_text(word)
        (folder / "inner").mkdir()
        (folder / "inner" / "b").write_text(word)
        (folder / word).write_text("")  # the two folders hold other names too


OLD = {"out/a": "old", "out/inner/b": "old", "out/old": ""}
NEW = {"out/a": "new", "out/inner/b": "new", "out/new": ""}


@pytest.mark.slow
def test_a_file_is_the_old_or_the_new_one(at_every_call, tmp_path):
    def start():
        (tmp_path / "deep").mkdir(exist_ok=True)
        (tmp_path / "deep/a.json").write_text("old")

    def check():
        assert contents(tmp_path)["deep/a.json"] in ("old", '{\n  "new": 1\n}\n')

    at_every_call(start, lambda: write_json(tmp_path / "deep/a.json", {"new": 1}), check)
    assert os.listdir(tmp_path / "deep") == ["a.json"], "what kills left is gone"


@pytest.mark.slow
@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_the_old_or_the_new_one(at_every_call, tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)

    def check():
        if not can_exchange:
            restore_folder(tmp_path / "out")  # as a reader of the folder does
        assert contents(tmp_path) in (OLD, NEW)

    at_every_call(lambda: save_folder(tmp_path / "out", "old"), lambda: save_folder(tmp_path / "out", "new"), check)
    assert contents(tmp_path) == NEW and os.listdir(tmp_path) == ["out"], "what kills left is gone"


@pytest.mark.slow
def test_a_first_folder_is_there_complete_or_not_at_all(at_every_call, tmp_path):
    def check():
        assert contents(tmp_path) in ({}, NEW)

    at_every_call(lambda: remove(tmp_path / "out"), lambda: save_folder(tmp_path / "out", "new"), check)
    assert contents(tmp_path) == NEW


@pytest.mark.slow
def test_a_removed_folder_is_complete_or_gone(at_every_call, tmp_path):
    def check():
        assert contents(tmp_path) in ({}, OLD)

    at_every_call(lambda: save_folder(tmp_path / "out", "old"), lambda: remove(tmp_path / "out"), check)
    remove(tmp_path / "out")  # nothing there: nothing to do
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("system", ["linux", "darwin", "without the call"])
def test_two_folders_are_exchanged_in_one_call(tmp_path, monkeypatch, system):
    if system != sys.platform:  # only how it would be called
        called = []

        class Library:
            pass

        library = Library()
        if system == "darwin":
            library.renamex_np = lambda *arguments: called.append(arguments) or 0
        if system == "linux":
            library.renameat2 = lambda *arguments: called.append(arguments) or 0
        monkeypatch.setattr(files.sys, "platform", system)
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: library)
        done = files._exchange(Path("a"), Path("b"))
        expected = {"darwin": [(b"a", b"b", 2)], "linux": [(-100, b"a", -100, b"b", 2)]}
        assert (done, called) == (system in expected, expected.get(system, []))
        return
    save_folder(tmp_path / "a", "old")
    save_folder(tmp_path / "b", "new")
    assert files._exchange(tmp_path / "a", tmp_path / "b")
    assert contents(tmp_path / "a")["a"] == "new" and contents(tmp_path / "b")["a"] == "old"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        files._exchange(tmp_path / "a", tmp_path / "nowhere")


def test_permissions_are_those_of_a_plain_write(tmp_path):
    before = os.umask(0o027)
    try:
        (tmp_path / "plain").mkdir()
        (tmp_path / "plain.txt").write_text("")
        write_text(tmp_path / "whole.txt", "")
        save_folder(tmp_path / "whole", "new")
        with files.replacing_folder(tmp_path / "tensors") as folder:
            (folder / "private").touch(mode=0o600)  # as safetensors writes
    finally:
        os.umask(before)
    pairs = ("whole", "plain"), ("whole.txt", "plain.txt"), ("whole/a", "plain.txt"), ("tensors/private", "plain.txt")
    for ours, plain in pairs:
        mode, expected = ((tmp_path / name).stat().st_mode for name in (ours, plain))
        assert stat.S_IMODE(mode) == stat.S_IMODE(expected), ours


def test_an_exception_leaves_what_was_there(tmp_path):
    write_text(tmp_path / "file", "old")
    save_folder(tmp_path / "out", "old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    with pytest.raises(RuntimeError), replacing_folder(tmp_path / "out") as temporary:
        (temporary / "a").write_text("half")
        raise RuntimeError
    assert contents(tmp_path) == {"file": "old", **OLD} and len(os.listdir(tmp_path)) == 2


def test_a_folder_does_not_replace_a_file(tmp_path):
    write_text(tmp_path / "out", "a file")
    with pytest.raises(NotADirectoryError):
        save_folder(tmp_path / "out", "new")
    with pytest.raises(BadInput, match="out: exists already"), new_folder(tmp_path / "out"):
        pass
    with pytest.raises(BadInput, match="out/deep"), new_folder(tmp_path / "out" / "deep"):
        pass
    with new_folder(tmp_path / "deep" / "new") as folder:
        (folder / "a").write_text("b")
    assert contents(tmp_path) == {"out": "a file", "deep/new/a": "b"}


def test_a_new_folder_replaces_nothing_that_was_made_meanwhile(tmp_path):
    with pytest.raises(BadInput, match="out: .*; it was made meanwhile"), new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("second")
        write_text(tmp_path / "out" / "a", "first")
    assert contents(tmp_path) == {"out/a": "first"}


def test_only_what_a_killed_process_left_is_removed(ended_process, tmp_path):
    dead, alive = ended_process, os.getppid()
    for name in (f".a.{dead}", f".a.{alive}", f".a.b.{dead}", ".a.b", ".a.x"):
        (tmp_path / f"{name}.unfinished").mkdir()
    write_text(tmp_path / "a", "")
    left = {f".a.{alive}.unfinished", f".a.b.{dead}.unfinished", ".a.b.unfinished", ".a.x.unfinished"}
    assert set(os.listdir(tmp_path)) == {"a", *left}
    remove_unfinished(tmp_path)
    assert set(os.listdir(tmp_path)) == {"a", *left} - {f".a.b.{dead}.unfinished"}


def test_json_is_as_people_read_it(tmp_path):
    assert write_json(tmp_path / "a.json", {"é": [1]}).read_text() == '{\n  "\\u00e9": [\n    1\n  ]\n}\n'
    assert write_json(str(tmp_path / "a.json"), {"b": [1]}, indent=None).read_text() == json.dumps({"b": [1]}) + "\n"


def test_a_lock_keeps_others_out_until_it_is_closed_or_the_process_ends(tmp_path):
    path = tmp_path / ".lock"
    with locked(path) as file:
        file.write(b"kept")
        with pytest.raises(BadInput, match=r"\.lock: in use by another process"):
            locked(path)
    code = "import os, sys; from headstart.configs.files import locked; file = locked(sys.argv[1]); os._exit(3)"
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 3
    with locked(path) as file:
        file.seek(0)
        assert file.read() == b"kept"
