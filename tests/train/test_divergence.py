"""What training went wrong is named and never takes the place of what was well."""

from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.train import trainer
from headstart.train.checkpoint import checkpoints
from headstart.train.watching.trend import Trend
from run_files import losses


def saved(folder):
    return [int(path.name.removeprefix("step_")) for path in checkpoints(folder / "checkpoints")]


def test_a_head_that_is_not_finite_is_never_written(run, tmp_path):
    with pytest.raises(BadInput, match="step 1: the weights are not finite any more .*a lower train.learning_rate"):
        run("medusa", "a", "train.max_steps=1", "train.warmup_steps=0", "train.learning_rate=1e39")
    assert not (tmp_path / "a" / "final").exists() and not saved(tmp_path / "a")


@pytest.mark.parametrize("what", ["weights", "optimizer"])
def test_the_last_good_checkpoint_stays(what, run, monkeypatch, tmp_path):
    whole = run("medusa", "whole")

    def poisoned(self, step, batches, real=trainer.Loop.step):
        row = real(self, step, batches)
        if step == 2:
            parameter = next(self.head.parameters())
            held = self.backend._torch_optimizer.state[parameter]["exp_avg_sq"] if what == "optimizer" else parameter
            held.data.flatten()[0] = float("inf")
        return row

    how = ("train.checkpoint_every=1", "train.keep_checkpoints=1")
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Loop, "step", poisoned)
        with pytest.raises(BadInput, match="step 3: the weights are not finite any more .losses of late"):
            run("medusa", "a", *how)
    assert saved(tmp_path / "a") == [2]
    assert losses(run("medusa", "a", *how)) == losses(whole)


def test_divergence_is_named_once_and_the_checkpoints_of_before_stay(run, tmp_path, capsys):
    how = ("train.max_steps=14", "train.warmup_steps=8", "train.learning_rate=40", "train.stop_at_step=5")
    folder = run("eagle3", "a", *how, "head.start=random", "train.checkpoint_every=1")
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("the loss diverges") == 1
    assert "step 3: the loss diverges (losses of late " in told, told[told.index("diverges") - 30 :][:200]
    assert "take a lower train.learning_rate, in another train.output_dir" in told
    assert saved(folder) == [1, 2, 4, 5]


def test_a_run_that_goes_on_compares_with_its_first_loss(run, monkeypatch, capsys):
    """Although that was not logged: 7 is below three times the first, and above three times the loss of step 2."""
    losses = [10.0, 2.0, 2.0, 7.0, 7.0, 7.0]
    real: Any = trainer.Loop.step
    monkeypatch.setattr(trainer.Loop, "step", lambda self, step, some: {**real(self, step, some), "loss": losses[step]})
    for how in (["train.stop_at_step=2"], []):
        run("medusa", "a", "train.log_every=2", *how)
    assert "the loss diverges" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("curve", "step"),
    [
        ([10, 9, 37, 1047, 336], 4),
        ([37, 1047, 336], 3),
        ([10, 9, 400, 9, 8, 390, 7], None),  # single steps of hard rows
        ([0, 0, 10, 11, 0, 12], None),  # steps without a supervised token
        ([0.01, 0.02, 0.02, 0.028], None),
    ],
)
def test_a_loss_that_goes_up_for_good_diverges(curve, step):
    trend = Trend()
    begins = [number for number, loss in enumerate(curve, start=1) if trend.take(number, loss)]
    assert begins == ([] if step is None else [step])
