"""A finished report or plan is not lost to another command, and a folder has one writer."""

import json
import os

import pytest
from headstart.configs.owned import OwnedFolder


def tree(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and "lock" not in p.name
    }


FINISHED = {
    "eval": ("report.json", "--drafter ngram --max-new-tokens 8 --repeats 1"),
    "plan": (
        "plan.json",
        "--drafter ngram --max-new-tokens 8 --num-draft-tokens 1 --batch-size 1 --tree none --check none",
    ),
}


@pytest.fixture(params=["eval", pytest.param("plan", marks=pytest.mark.slow)])
def command(request, headstart, saved_target, prompts, tmp_path):
    """command("--option value"): the exit code and the error; .name, .output and .file."""
    file, options = FINISHED[request.param]
    path = prompts({"prompt": "w1 w5 w9"}, {"prompt": "w1 w7 w8 w3 w22"})

    def call(more="", output=tmp_path / "out"):
        line = f"{request.param} --target {saved_target} --prompts {path} --output {output} {options} {more}"
        code, _, err = headstart(line)
        return code, err

    call.__dict__.update(name=request.param, output=tmp_path / "out", file=tmp_path / "out" / file)
    return call


def test_a_finished_one_of_other_settings_is_replaced_only_when_asked(command):
    assert command()[0] == 0
    before = tree(command.output)
    code, err = command("--max-new-tokens 6")
    assert code == 2 and err.count("\n") == 1
    assert "with max_new_tokens 8, this would be with 6; --overwrite replaces it, or give a new folder" in err
    assert tree(command.output) == before
    assert command()[0] == 0, "the same command measures anew, as the quickstart does"
    assert command("--max-new-tokens 6 --overwrite")[0] == 0
    assert command()[0] == 2 and command("--max-new-tokens 6")[0] == 0
    assert json.loads(command.file.read_text())


def test_a_folder_in_use_or_of_something_else_is_refused_untouched(command, tmp_path):
    with OwnedFolder(command.output, command=f"headstart {command.name}"):
        code, err = command()
        assert code == 2 and f"out: in use by process {os.getpid()} on " in err and not command.file.exists()
    mine = tmp_path / "mine" / command.file.name
    mine.parent.mkdir()
    mine.write_text("mine")
    code, err = command(output=mine.parent)
    assert code == 2 and "mine: holds other files" in err and tree(mine.parent) == {mine.name: b"mine"}
    with OwnedFolder(tmp_path / "run", command="headstart train"):
        pass
    code, err = command(output=tmp_path / "run")
    assert code == 2 and f"run: belongs to headstart train; give headstart {command.name} another folder" in err
    assert command(output=tmp_path / "run" / command.name)[0] == 0
