"""What surrounds a run reaches into it by its config alone, or a line says so."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.train.inputs.data import TrainingData
from headstart.train.inputs.launch import DECIDED_BY_RUN, check_environment
from headstart.train.watching.tracking import has_wandb_key
from run_files import metrics, weights


def test_accelerate_s_variable_does_not_divide_gradients(run, monkeypatch):
    plain = run("medusa", "a")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    other = run("medusa", "b")
    assert metrics(other) == metrics(plain) and weights(other) == weights(plain)


@pytest.mark.parametrize("key", DECIDED_BY_RUN)
def test_a_variable_that_overrules_the_config_is_refused(key):
    with pytest.raises(BadInput, match=f"^{key} is true: .* decides that, so unset it$"):
        check_environment({key: "true"})
    assert check_environment({key: DECIDED_BY_RUN[key][0]}) is None


def test_a_variable_that_changes_how_a_run_computes_is_said(run, monkeypatch, capsys):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    run("medusa", "a")
    assert "set in the environment: NVIDIA_TF32_OVERRIDE=0" in capsys.readouterr().err


def test_a_run_folder_is_one_run_of_weights_and_biases(run, monkeypatch):
    """With each step once, though the second start does steps again that no checkpoint kept."""
    started, logged = [], []

    class Run:
        def log(self, values, *, step):
            logged.append(step)

        def finish(self, exit_code):
            pass

    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", lambda **given: started.append(given) or Run())
    for key in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(key, raising=False)
    how = ("train.wandb_project=mine", "train.checkpoint_every=2")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        folder = run("medusa", "a", *how, "train.stop_at_step=5")
    for step in (4, 5):  # as if it was killed before they were written
        shutil.rmtree(folder / "checkpoints" / f"step_{step:08}")
    run("medusa", "a", *how)
    assert logged == [1, 2, 3, 4, 5, 6]
    assert len({one["id"] for one in started}) == 1 and all(one["resume"] == "allow" for one in started)
    run("medusa", "b", *how, "train.max_steps=2")
    assert len({one["id"] for one in started}) == 2


def test_a_key_of_weights_and_biases_is_found_without_its_package(tmp_path):
    assert has_wandb_key({"WANDB_API_KEY": "x"})
    file = tmp_path / "netrc"
    file.write_text("machine api.wandb.ai login user password x\n")
    assert has_wandb_key({"NETRC": str(file)}) and not has_wandb_key({"NETRC": str(tmp_path / "none")})
    assert not has_wandb_key({"NETRC": str(file), "WANDB_BASE_URL": "https://other.example"})


def test_rows_without_a_position_to_learn_are_dropped(run, tmp_path, world):
    """Such a row alone was a step with the loss 0."""
    rows = (world / "rows.jsonl").read_text()
    short = json.dumps({"input_ids": [1, 2, 3], "prompt_length": 2}) + "\n"
    path = tmp_path / "some.jsonl"
    path.write_text(rows + short * 6)
    assert metrics(run("medusa", "a", f"data.train={path}")) == metrics(run("medusa", "b"))


def emptied(monkeypatch: pytest.MonkeyPatch, is_emptied: Callable[[torch.Tensor], bool]) -> None:
    """Batches of such token ids have no position to learn, as rows of extracted features may have none."""
    whole = TrainingData._collated

    def collated(self: TrainingData, rows: Any) -> Any:
        batch = whole(self, rows)
        mask = torch.zeros_like(batch.loss_mask) if is_emptied(batch.input_ids) else batch.loss_mask
        return replace(batch, loss_mask=mask)

    monkeypatch.setattr(TrainingData, "_collated", collated)


def test_batches_without_a_position_to_learn_are_no_step(run, monkeypatch, capsys):
    """The next ones are taken, also by a run that goes on; nothing is logged of them."""
    emptied(monkeypatch, lambda ids: ids[0, :3].tolist() == [1, 44, 3])  # one of six rows
    how = ("train.batch_size=1", "train.max_steps=12")
    whole = run("medusa", "a", *how)
    assert "its rows have no position to learn, so the next ones are taken" in capsys.readouterr().err
    steps = metrics(whole)
    assert [row["step"] for row in steps] == [*range(1, 13)] and all(row["loss"] > 0 for row in steps)
    assert steps[-1]["epoch"] in (round(14 / 6, 4), round(15 / 6, 4)), "two or three batches more than steps"
    for stop in (5, 11):
        run("medusa", "b", *how, f"train.stop_at_step={stop}")
    other = run("medusa", "b", *how)
    assert metrics(other) == steps and weights(other) == weights(whole)


def test_a_pass_without_a_position_to_learn_ends_the_run(run, monkeypatch):
    """Be it that segments weigh nothing."""
    for name, how in {"a": ["data.segment_weights={answer: 0}"], "b": []}.items():
        with pytest.raises(BadInput, match="^step 1: no row has a position to learn in a whole pass over the data$"):
            run("medusa", name, *how)
        emptied(monkeypatch, lambda ids: True)
