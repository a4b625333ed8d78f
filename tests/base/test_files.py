"""Files and folders are written whole or not at all, whatever call a kill or a failure comes at; JSON Lines are read
whole and in order, and every fault is named by file and line."""

import errno
import gzip
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from headstart import __version__
from headstart.base import files
from headstart.base.errors import BadInput
from headstart.base.files import locked, new_folder, remove, replacing_folder, unfinished_name, write_json, write_text
from headstart.base.jsonl import iter_jsonl, read_jsonl


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
            files.restore_folder(tmp_path / "out")  # as a reader of the folder does
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


@pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")
def test_two_folders_are_exchanged_in_one_call(tmp_path):
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
    with pytest.raises(RuntimeError), files.replacing(tmp_path / "file") as temporary:
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
    own, running, others = unfinished_name("a", dead), unfinished_name("a", alive), unfinished_name("a.b", dead)
    foreign, forgotten = (f".a.b.{dead}-{number}-00000000.unfinished" for number in ("00000000", "00000001"))
    for name in (own, running, others, foreign, forgotten, ".a.b.unfinished"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / forgotten, (0, 0))
    write_text(tmp_path / "a", "")
    left = {running, others, foreign, forgotten, ".a.b.unfinished"}
    assert set(os.listdir(tmp_path)) == {"a", *left}
    files.remove_unfinished(tmp_path)
    assert set(os.listdir(tmp_path)) == {"a", *left} - {others, forgotten}, "of another container only what is old"


def test_processes_of_one_number_do_not_share_what_is_unfinished(tmp_path):
    """As in containers, where each writer is process 1."""
    with replacing_folder(tmp_path / "a") as first:
        (first / "x").write_text("first")
        with replacing_folder(tmp_path / "a") as second:
            (second / "y").write_text("second")
        assert contents(tmp_path / "a") == {"y": "second"}
    assert contents(tmp_path / "a") == {"x": "first"}


def test_a_user_without_a_home_has_a_cache(tmp_path):
    code = (
        "import os, pwd, sys\n"
        "def unknown(number): raise KeyError(number)\n"
        "pwd.getpwuid = unknown\n"
        "from headstart.base.files import cache_root\n"
        "from headstart.scripts.cli import main\n"
        "print(cache_root())\n"
        "sys.argv = ['headstart', '--version']\n"
        "main()\n"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "HEADSTART_CACHE")}
    done = subprocess.run([sys.executable, "-c", code], env=kept | {"TMPDIR": str(tmp_path)}, capture_output=True)
    assert done.stdout.decode().split() == [f"{tmp_path}/headstart-{os.getuid()}", __version__], done.stderr.decode()


def test_a_lock_keeps_others_out_until_it_is_closed_or_the_process_ends(tmp_path):
    path = tmp_path / ".lock"
    with locked(path) as file:
        file.write(b"kept")
        with pytest.raises(BadInput, match=r"\.lock: in use by another process"):
            locked(path)
    code = "import os, sys; from headstart.base.files import locked; file = locked(sys.argv[1]); os._exit(3)"
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 3
    with locked(path) as file:
        file.seek(0)
        assert file.read() == b"kept"


def test_a_file_system_without_locks_keeps_nobody_out(monkeypatch, tmp_path):
    def unsupported(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("headstart.base.files.fcntl.flock", unsupported)
    with locked(tmp_path / ".lock") as first, locked(tmp_path / ".lock"):
        assert not first.closed


def test_half_a_character_is_written_as_its_number(tmp_path):
    assert write_text(tmp_path / "page.html", "a\ud83d").read_text() == "a\\ud83d"


# JSON Lines


def written(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_objects_come_in_file_order_and_blank_lines_are_counted(tmp_path: Path) -> None:
    """After a byte order mark, which is no part of the data; in UTF-8; gzipped or plain."""
    content = '\ufeff{"a": "é"}\r\n   \n\n{"a": "日本"}\n\n'.encode()
    for path in (written(tmp_path, content), written(tmp_path, gzip.compress(content), "rows.jsonl.gz")):
        assert list(iter_jsonl(path)) == [(1, {"a": "é"}), (4, {"a": "日本"})]
        assert read_jsonl(path) == [{"a": "é"}, {"a": "日本"}]


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        ('{"a": 1}\n\n{"a": }\n', 3, "not JSON: Expecting value at column 7"),
        ('{"a": 1}\n[1, 2]\n', 2, "not a JSON object but [1, 2]"),
        ('"text"\n', 1, 'not a JSON object but "text"'),
        ('{"a": 1' + "0" * 5000 + "}\n", 1, "not JSON that can be read: a number of too many digits"),
        ('{"a": ' + "[" * 100_000 + "}\n", 1, "not JSON that can be read: nested too deeply"),
        (b'{"a": 1}\n{"a": "\xff"}\n', 2, "not UTF-8: invalid start byte at byte 8 of the line"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, content: str, line: int, problem: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(BadInput) as caught:
        read_jsonl(path)
    assert str(caught.value) == f"{path}:{line}: {problem}"


def test_what_is_no_file_of_objects_is_named(tmp_path: Path) -> None:
    written(tmp_path, "\n \n", "empty.jsonl")
    written(tmp_path, gzip.compress(b'{"a": 1}\n' * 100)[:-12], "cut.jsonl.gz")
    written(tmp_path, "not gzip at all", "other.jsonl.gz")
    problems = {"gone.jsonl": ": no such file$", "gone.jsonl.gz": ": no such file$", "": ": a folder, not a file$"}
    problems |= {"empty.jsonl": ": empty file$"}
    problems |= dict.fromkeys(["cut.jsonl.gz", "other.jsonl.gz"], r":\d+: damaged gzip file")
    for name, problem in problems.items():
        with pytest.raises(BadInput, match=f"^{tmp_path / name}{problem}"):
            read_jsonl(tmp_path / name)
