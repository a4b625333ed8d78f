"""Training repeats exactly: by seed, from a checkpoint, after a kill, however a batch is cut; and never half-starts."""

import json
import sys

import pytest
import torch
from accelerate.state import AcceleratorState
from headstart.base.errors import BadInput
from headstart.base.files import unfinished_name
from headstart.base.jsonl import read_appended
from headstart.base.owned import LOCK
from headstart.engines.heads import HEADS, load_head
from headstart.eval.decoding import generate
from headstart.targets.target import Target
from headstart.train import trainer
from headstart.train.inputs.config import load_run
from headstart.train.watching.tracking import Tracker
from rich.console import Console
from run_files import contents, final, losses, metrics, validations, weights


@pytest.fixture
def other_precision():
    """Accelerate keeps one precision per process; tests of others start and leave it fresh."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


# The same run is the same run


# every head with both optimizers, once with checkpoints on the way and once with none
INTERRUPTED = [
    (name, optimizer, 2 * ((i + j) % 2))
    for i, name in enumerate(sorted(HEADS))
    for j, optimizer in enumerate(["adamw", "muon"])
]


@pytest.mark.parametrize(("head_type", "optimizer", "every"), INTERRUPTED)
@pytest.mark.fast_only(head_type=["eagle3", "medusa"], every=[2])
def test_an_interrupted_run_goes_on_exactly(every, optimizer, head_type, run, world):
    how = (f"data.validation={world / 'rows.jsonl'}", "train.validate_every=2", "train.decode_tokens=8")
    how += (f"train.optimizer={optimizer}",)
    whole = run(head_type, "whole", *how)
    again = (*how, f"train.checkpoint_every={every}")
    half = run(head_type, "half", *again, "train.stop_at_step=3")
    assert not (half / "final").exists() and [row["step"] for row in metrics(half)] == [1, 2, 2, 3]
    run(head_type, "half", *again)
    assert metrics(half) == metrics(whole) and weights(half) == weights(whole)


@pytest.mark.fast_only(head_type=["eagle3"])
def test_a_killed_run_goes_on_exactly(head_type, run, ended_process):
    """The kill came two steps behind a checkpoint, within a metrics row and while another checkpoint was written."""
    whole = run(head_type, "whole")
    half = run(head_type, "half", "train.stop_at_step=3")
    unfinished = half / "checkpoints" / unfinished_name("step_00000005", ended_process)
    unfinished.mkdir()
    (unfinished / "head.safetensors").write_bytes(b"cut")
    with (half / "metrics.jsonl").open("a") as file:
        for row in metrics(whole)[3:5]:
            file.write(json.dumps({**row, "loss": -1.0}) + "\n")
        file.write('{"step": 6, "lo')
    run(head_type, "half")
    assert metrics(half) == metrics(whole) and weights(half) == weights(whole) and not unfinished.exists()


@pytest.mark.fast_only(head_type=["medusa"])
def test_a_run_killed_before_its_first_checkpoint_starts_again(head_type, run, monkeypatch):
    whole = run(head_type, "whole")

    class Killed(Exception):
        pass

    steps = []

    def one_step(self, step, batches, real=trainer.Loop.step):
        steps.append(step)
        if len(steps) == 3:
            raise Killed
        return real(self, step, batches)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Loop, "step", one_step)
        with pytest.raises(Killed):
            run(head_type, "half")
    half = run(head_type, "half")
    assert metrics(half) == metrics(whole) and weights(half) == weights(whole)


def test_a_gradient_norm_of_0_does_not_clip(run):
    off, far = (run("medusa", name, f"train.max_grad_norm={most}") for name, most in (("off", 0), ("far", 1e9)))
    assert metrics(off) == metrics(far) and weights(off) == weights(far)


def test_a_warm_up_as_long_as_the_run_is_shortened_and_said(run, capfd):
    told = "train.warmup_steps 9: not below train.max_steps 3; 2 are taken"
    long, fitting = (
        run("medusa", name, "train.max_steps=3", f"train.warmup_steps={n}") for name, n in (("a", 9), ("b", 2))
    )
    assert losses(long) == losses(fitting) and " ".join(capfd.readouterr().err.split()).count(told) == 1


def test_a_finished_run_is_left_alone(run):
    folder = run("medusa", "a")
    before = contents(folder, but=LOCK)
    run("medusa", "a")
    assert contents(folder, but=LOCK) == before


@pytest.mark.fast_only(head_type=["mtp"])
def test_the_written_config_repeats_the_run(head_type, run, tmp_path):
    first = run(head_type, "a")
    trainer.train_head(load_run(first / "config.yaml", [f"train.output_dir={tmp_path / 'again'}"]))
    assert metrics(tmp_path / "again") == metrics(first) and weights(tmp_path / "again") == weights(first)


@pytest.mark.fast_only(head_type=["block", "eagle3"])
def test_accumulated_batches_are_one_batch(head_type, run):
    """Rows of different lengths: the mean is over all supervised chains, not over means."""
    one = run(head_type, "one", "train.batch_size=4")
    two = run(head_type, "two", "train.batch_size=2", "train.accumulation=2")
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["num_supervised"] == b["num_supervised"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["depth_loss"] == pytest.approx(b["depth_loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


# What comes out


@pytest.mark.fast_only(head_type=["block"])
def test_training_on_the_targets_own_text_raises_the_acceptance_length(head_type, run, world):
    how = ["train.max_steps=30", "train.batch_size=6", "train.learning_rate=1e-2", "train.validate_every=10"]
    how += ["train.decode_tokens=8", f"data.validation={world / 'rows.jsonl'}"]
    folder = run(head_type, "a", *how)
    steps, figures = zip(*validations(folder), strict=True)
    assert steps == (10, 20, 30)
    lengths = [one["acceptance_length"] for one in figures]
    assert lengths[-1] > max(1.6, lengths[0] + 0.1) and lengths[0] >= 1
    assert losses(folder)[-1] < losses(folder)[0]
    target = Target.load(world / "target")
    head = load_head(folder / "final", target)
    rows = [json.loads(line) for line in (world / "rows.jsonl").read_text().splitlines()]
    prompts = [row["input_ids"][: row["prompt_length"]] for row in rows]
    out = generate(target, head, prompts, max_new_tokens=24, eos_token_ids=[])
    assert out.token_ids == [row["input_ids"][row["prompt_length"] :] for row in rows]
    assert len(out.rounds) < 24, "fewer rounds than tokens"


@pytest.mark.fast_only(head_type=["mtp"])
def test_a_target_spread_over_devices_trains_the_same_head(head_type, run):
    """A layer that is read from the disk in every forward."""
    places = {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(4)}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    spread = run(head_type, "spread", f"target.device_map={json.dumps(places)}")
    assert metrics(spread) == metrics(run(head_type, "whole"))


def test_a_cut_draft_vocabulary_keeps_the_end_token(run, world):
    folder = run("eagle3", "a", "head.draft_vocab_size=20", "train.max_steps=3")
    head = load_head(folder / "final", Target.load(world / "target"))
    assert head.vocabulary is not None and len(head.vocabulary.to_target) == 20
    assert 2 in head.vocabulary.to_target, "eos"


def test_bf16_trains_on_fp32_master_weights(run, other_precision):
    folder = run("eagle3", "a", "train.precision=bf16", "train.max_steps=3")
    assert all(0 < loss < 100 for loss in losses(folder))
    assert {value.dtype for value in final(folder).values()} == {torch.float32}


def test_only_the_newest_checkpoints_are_kept(run):
    """Six rows, batches of four: batches cross the ends of epochs and are always full."""
    folder = run("medusa", "a", "train.checkpoint_every=1", "train.keep_checkpoints=2", "train.batch_size=4")
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_00000005", "step_00000006"]
    assert [row["epoch"] for row in metrics(folder)] == [round(4 * n / 6, 4) for n in range(1, 7)]


def test_a_kill_before_the_first_new_row_loses_no_old_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    Tracker(tmp_path, num_steps=6, first_step=2, is_main=True, console=Console())
    assert read_appended(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("line", ['{"step": 2, "lo', "\0\0\0", "2"])
def test_a_damaged_line_of_metrics_is_named_with_what_to_do(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(BadInput, match=r"metrics.jsonl:2: not .*; delete that line"):
        Tracker(tmp_path, num_steps=6, first_step=3, is_main=True, console=Console())


# What is refused, before anything is written


@pytest.mark.parametrize("finished", [True, False])
def test_another_config_in_the_same_folder_is_refused(finished, run, refused, tmp_path):
    run("medusa", "a", *([] if finished else ["train.stop_at_step=2"]))
    before = contents(tmp_path / "a", but=LOCK)
    for override in ("train.learning_rate=1e-3", "head.num_depths=2", "train.max_steps=9", "data.max_length=20"):
        key = override.partition("=")[0]
        assert refused("medusa", "a", override).startswith(f"{tmp_path / 'a'} holds a run with another {key};")
        assert contents(tmp_path / "a", but=LOCK) == before


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["data.train={bad}"], "bad.jsonl:2: input_ids[1] is 61, outside the vocabulary of 61"),
        (["data.train={short}"], "data.train: no row has a token to draft"),
        (["head.feature_layers=[1, 2, 4]"], "feature layer 4: "),
        (["head.feature_layers=[-1, 2]"], "feature layer -1: "),
        (["head.feature_layers=[]"], "head.feature_layers: []: "),
        (["head.feature_layers=[2, 1]"], "head.feature_layers: [2, 1]: must ascend"),
        (["head.loss.medium_ce=1"], "head: loss.medium_ce: unknown loss; expected some of hard_ce, greedy_gce, "),
        (["head.loss={{l1: much}}"], "head.loss.l1: should be a valid number, got 'much'"),
        (["head.depth_weights=linear"], "head: depth_weights 'linear': expected one of geometric, normalised, exp"),
        (["head.depth_decay=0"], "head: depth_decay 0.0: expected more than 0"),
        (["train.optimizer=sgd"], "train.optimizer: should be 'adamw' or 'muon', got 'sgd'"),
        (["train.matrix_learning_rate=1e-2"], "train: matrix_learning_rate 0.01: only with optimizer muon"),
        (["train.max_steps=0"], "train.max_steps: should be greater than 0, got 0"),
        (["train.seed=-1"], "train.seed: should be greater than or equal to 0, got -1"),
        (["train.weight_decay=-1"], "train.weight_decay: should be greater than or equal to 0, got -1"),
        (["train.learning_rate=.nan"], "train.learning_rate: should be "),
        (
            ["data.max_length=60", "data.validation={long}"],
            "data.validation: no row has supervised tokens in data.max_length 60: ",
        ),
        (["data.layout=packed"], "data: layout 'packed': expected padded or bucketed"),
        (["train.device=cuda:1"], "train.device: should be 'cpu' or 'cuda', got 'cuda:1'"),
        (["head.type=medusae"], "head.type: 'medusae': expected one of"),
        (["target.dtype=int8"], "dtype 'int8': expected one of auto"),
        (["train.output_dir={file}"], "train.output_dir"),
        (["train.lora_rank=2"], "train: lora_rank 2: adapters need a trained head, so train.start_from is required"),
    ],
)
def test_nothing_is_left_of_a_run_that_cannot_start(overrides, problem, refused, tmp_path):
    files = {
        "bad": '{"input_ids": [1, 2], "prompt_length": 1}\n{"input_ids": [1, 61], "prompt_length": 1}\n',
        "short": '{"input_ids": [1, 2, 3], "prompt_length": 2}\n',
        "long": json.dumps({"input_ids": [3] * 72, "prompt_length": 70}) + "\n",
        "file": "a file where the folder should be",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    filled = [one.format(**{n: tmp_path / f"{n}.jsonl" for n in files}) if "{" in one else one for one in overrides]
    before = sorted(p for p in tmp_path.rglob("*"))
    assert problem in refused("eagle3", "a", *filled)
    assert sorted(p for p in tmp_path.rglob("*") if p.name != "a.yaml") == before
    assert (tmp_path / "file.jsonl").read_text() == files["file"]


def test_nothing_is_left_where_what_a_run_logs_to_is_missing(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    before, problem = sorted(tmp_path.rglob("*")), "train.wandb_project: needs wandb: pip install wandb"
    assert refused("eagle3", "a", "train.wandb_project=mine") == problem
    assert sorted(p for p in tmp_path.rglob("*") if p.name != "a.yaml") == before


def test_a_damaged_checkpoint_is_named(run, refused):
    folder = run("medusa", "a", "train.stop_at_step=2")
    file = folder / "checkpoints" / "step_00000002" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert refused("medusa", "a").startswith(f"checkpoint {file.parent}: ")


def test_every_start_is_on_record(run):
    folder = run("eagle3", "a", "train.stop_at_step=3")
    run("eagle3", "a")
    first, second = json.loads((folder / "run.json").read_text())
    assert first["data"]["num_rows"] == 6 and len(first["data"]["sha256"]) == 1
    assert len(first["target"]["fingerprint"]) > 8 and first["packages"]["torch"]
    assert {**first, "started": ""} == {**second, "started": ""}
