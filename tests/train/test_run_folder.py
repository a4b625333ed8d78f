"""A run folder belongs to its run: nothing in it is lost, taken over or mistaken for another run's."""

import json
import os
import shutil
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.base.owned import LOCK
from headstart.train import loop, trainer
from headstart.train import start as starting
from headstart.train.inputs.config import load_run
from run_files import contents, losses, weights
from transformers import AutoModelForCausalLM


@pytest.fixture
def other_rows(world, tmp_path):
    """As many rows of as many bytes under the same file name, in another folder; the first row's tokens differ."""
    path = tmp_path / "other" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text((world / "rows.jsonl").read_text().replace("[1, 5, 9,", "[1, 6, 9,", 1))
    assert path.stat().st_size == (world / "rows.jsonl").stat().st_size
    return path


def killed_before_its_config_is_written(run, monkeypatch):
    child = os.fork()
    if not child:
        try:
            monkeypatch.setattr(starting, "dump_config", lambda *_: os._exit(9))
            run("medusa", "a")
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_rows_that_a_kill_left_are_not_trained_on_under_another_name(run, other_rows, tmp_path, monkeypatch):
    killed_before_its_config_is_written(run, monkeypatch)
    assert (tmp_path / "a/tokens/manifest.json").exists() and not (tmp_path / "a/config.yaml").exists()
    with_others = run("medusa", "a", f"data.train={other_rows}")
    assert losses(with_others) == losses(run("medusa", "b", f"data.train={other_rows}"))
    assert losses(with_others) != losses(run("medusa", "c"))


def test_a_run_that_has_begun_is_refused_other_rows(run, refused, world, other_rows, tmp_path):
    mine = tmp_path / "rows.jsonl"
    shutil.copy(world / "rows.jsonl", mine)
    folder = run("medusa", "a", f"data.train={mine}", "train.stop_at_step=2")
    told = f"{folder}: its rows were encoded from another data.train; choose another folder"
    assert refused("medusa", "a", f"data.train={other_rows}") == told
    shutil.copy(other_rows, mine)
    assert refused("medusa", "a", f"data.train={mine}") == told, "changed under its name"
    mine.unlink()
    run("medusa", "a", f"data.train={mine}")
    assert weights(folder) == weights(run("medusa", "b")), "its rows are in the run folder"


def test_a_head_that_could_not_be_written_is_written_by_the_same_command(run, world, tmp_path, monkeypatch):
    how = ("train.checkpoint_every=2", f"data.validation={world / 'rows.jsonl'}", "train.decode_tokens=8")
    whole = run("medusa", "whole", *how)

    def full(head, folder, real=loop.save_head, **more):
        if folder.name == "final":
            raise OSError(28, "No space left on device")
        return real(head, folder, **more)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_head", full)
        with pytest.raises(BadInput, match=f"{tmp_path / 'a'}: cannot be written: No space left"):
            run("medusa", "a", *how)
    assert not (tmp_path / "a" / "final").exists()
    folder = run("medusa", "a", *how)
    assert contents(folder / "final") == contents(whole / "final")
    assert (folder / "metrics.jsonl").read_text().count("validation") == 1


def test_what_does_not_change_the_losses_does_not_block_a_resume(run):
    changes = "train.log_every=2", "train.checkpoint_every=4", "train.validate_every=5", "train.keep_checkpoints=1"
    whole = run("medusa", "whole")
    run("medusa", "half", "train.stop_at_step=3")
    assert weights(run("medusa", "half", *changes)) == weights(whole)


def test_a_run_goes_on_where_it_was_moved_and_by_any_path(run, world, tmp_path, monkeypatch):
    whole = run("medusa", "whole")
    run("medusa", "half", "train.stop_at_step=3")
    (tmp_path / "half").rename(tmp_path / "moved")
    shutil.copytree(world / "target", tmp_path / "target")
    (tmp_path / "deep").mkdir()
    shutil.copy(world / "rows.jsonl", tmp_path / "deep")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    how = ("target.path=./target", "data.train=~/deep/rows.jsonl", "train.output_dir=~/moved")
    run("medusa", "ignored", *how)
    assert weights(tmp_path / "moved") == weights(whole) and losses(tmp_path / "moved") == losses(whole)
    assert not (tmp_path / "~").exists()


def test_another_target_under_the_same_name_is_refused(run, refused, world, tmp_path):
    shutil.copytree(world / "target", tmp_path / "target")
    how = f"target.path={tmp_path / 'target'}"
    folder = run("medusa", "half", how, "train.stop_at_step=3")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    output: Any = model.get_output_embeddings()
    torch.nn.init.normal_(output.weight)
    model.save_pretrained(tmp_path / "target")
    assert refused("medusa", "half", how).startswith(f"{folder} holds a run on another target, ")
    assert "another train.learning_rate" in refused("medusa", "half", "train.learning_rate=1")


def test_a_damaged_record_of_starts_is_one_line(run, refused):
    folder = run("medusa", "a", "train.stop_at_step=3")
    (folder / "run.json").write_text("")
    assert refused("medusa", "a").startswith(f"{folder / 'run.json'}: damaged (")
    (folder / "run.json").unlink()
    run("medusa", "a")


def test_copies_beside_the_checkpoints_are_not_taken_for_them(run, world):
    folder = run("medusa", "a", "train.checkpoint_every=2", "train.stop_at_step=3")
    copy = folder / "checkpoints" / "step_00000002.mine"
    shutil.copytree(folder / "checkpoints" / "step_00000002", copy)
    run("medusa", "a", "train.checkpoint_every=1", "train.keep_checkpoints=1")
    assert copy.is_dir() and weights(folder) == weights(run("medusa", "b"))


def test_a_config_may_say_home(tmp_path, monkeypatch, world):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "a.yaml"
    train = {"output_dir": "~/a", "max_steps": 1, "device": "cpu"}
    target, data = {"path": "~/target"}, {"train": "~/rows.jsonl"}
    for name in ("target", "rows.jsonl"):
        (tmp_path / name).symlink_to(world / name)
    path.write_text(json.dumps({"target": target, "head": {"type": "medusa"}, "data": data, "train": train}))
    trainer.train_head(load_run("~/a.yaml"))
    assert (tmp_path / "a" / "final").is_dir() and LOCK in os.listdir(tmp_path / "a")


def test_a_row_that_cannot_be_encoded_does_not_end_the_run(run, world, tmp_path, capfd):
    path = tmp_path / "rows.jsonl"
    path.write_text((world / "rows.jsonl").read_text() + '{"messages": "hi"}\n')
    run("medusa", "a", f"data.train={path}", "train.max_steps=1")
    told = "kept 6, malformed 1, dropped 1; the first refused: "
    said = " ".join(capfd.readouterr().err.split())
    assert f"data.train: {told}{path}:7: a chat should be a list of turns" in said, said


def test_a_piece_without_a_token_to_draft_takes_no_row_away(run, tmp_path, capfd):
    """Of 13 tokens in pieces of 6, the last piece has one supervised token."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": list(range(10, 23)), "prompt_length": 2}) + "\n")
    folder = run("medusa", "a", f"data.train={path}", "data.max_length=6", "data.too_long=split", "train.max_steps=1")
    manifest = json.loads((folder / "tokens" / "manifest.json").read_text())
    assert manifest["num_rows"] == 3 and "data.train: kept 1, split 1" in capfd.readouterr().err


def test_rows_that_are_not_read_whole_are_counted(run, world, tmp_path, capfd):
    """In training and in validation; a row whose answer begins behind `max_length` is dropped."""
    path = tmp_path / "held_out.jsonl"
    path.write_text((world / "rows.jsonl").read_text() + '{"input_ids": [1, 5, 9, 7, 8, 3, 4], "prompt_length": 6}\n')
    run("medusa", "a", "data.max_length=6", f"data.validation={path}", "train.max_steps=1")
    said = " ".join(capfd.readouterr().err.split())
    assert "data.train: kept 4, cut 4, dropped 2" in said and "data.validation: kept 4, cut 4, dropped 3" in said, said
    run("medusa", "b", "train.max_steps=1")
    assert "data.train: " not in capfd.readouterr().err, "all of them are whole"
