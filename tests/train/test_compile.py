"""train.compile: the same run up to rounding, exact when it is interrupted, and refused where nothing compiles."""

import pytest
import torch
from headstart.base.terminal import PlainConsole
from headstart.heads.loss.fusing import Fusable, fuse
from headstart.train.inputs.config import TrainConfig
from headstart.train.start import fuse_where_asked
from run_files import losses, weights


@pytest.fixture(autouse=True)
def as_before():
    yield
    fuse(False)


@pytest.mark.slow
def test_a_compiled_run_is_the_plain_one_and_goes_on_exactly(run):
    plain, whole = run("eagle3", "plain"), run("eagle3", "whole", "train.compile=true")
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-5)
    run("eagle3", "half", "train.compile=true", "train.stop_at_step=3")
    half = run("eagle3", "half", "train.compile=true")
    assert losses(half) == losses(whole)
    assert weights(half) == weights(whole)


def test_a_machine_without_a_compiler_is_told_so(refused, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no working C++ compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", broken)
    told = "train.compile: torch.compile does not work on cpu: no working C++ compiler"
    assert refused("medusa", "a", "train.compile=true") == told
    assert not (tmp_path / "a").exists()


def asking(asked, max_steps):
    return TrainConfig(output_dir="run", max_steps=max_steps, compile=asked)


@pytest.mark.parametrize(
    ("asked", "device", "max_steps", "is_fused"),
    [
        (None, "cpu", 2000, False),
        (None, "cuda", 2000, True),
        (None, "cuda", 60, False),
        (True, "cuda", 60, True),
        (False, "cuda", 2000, False),
    ],
)
def test_where_a_run_does_not_say_it_is_compiled_on_a_gpu(asked, device, max_steps, is_fused, monkeypatch):
    """If it is long enough."""
    monkeypatch.setattr("headstart.train.start.fuse", lambda wanted, device: found.append(wanted))
    found = []
    fuse_where_asked(asking(asked, max_steps), torch.device(device), PlainConsole())
    assert found == [is_fused]


def test_a_gpu_without_a_compiler_trains_as_it_is_with_a_line(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no Triton")

    monkeypatch.setattr(torch, "compile", broken)
    fuse_where_asked(asking(None, 2000), torch.device("cuda"), PlainConsole())
    assert "torch.compile does not work on cuda: no Triton: steps run as" in capsys.readouterr().out
    assert not Fusable.is_fused
