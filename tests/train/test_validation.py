"""A run is steered by acceptance: taught and decoded figures agree, the best head is kept, patience ends the run."""

import json
import math

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.configs.jsonl import read_appended
from headstart.eval.decoding import generate, replay
from headstart.eval.measurement.metrics import AcceptancePart, acceptance
from headstart.heads.medusa import MedusaHead
from headstart.heads.registry import load_head
from headstart.heads.target import Target
from headstart.train.checkpoint import Best
from headstart.train.speed import Operations, Speed, StepSpeed
from headstart.train.validation import Validation, ValidationResult
from run_files import final, metrics, validations, weights
from safetensors.torch import load_file


@pytest.fixture
def validated(run, world):
    """validated(head_type, name, "key=value", ...): a run folder and its validations, (step, row) each."""

    def start(head_type, name, *overrides):
        how = ["train.max_steps=30", "train.batch_size=6", "train.learning_rate=1e-2", "train.validate_every=10"]
        how += ["train.decode_tokens=24"]
        folder = run(head_type, name, *how, f"data.validation={world / 'rows.jsonl'}", *overrides)
        return folder, validations(folder)

    return start


@pytest.mark.fast_only(head_type=["block", "eagle3"])
def test_taught_and_decoded_figures_agree(head_type, validated, world):
    folder, found = validated(head_type, "a", "train.decode_prompts=4", "train.decode_tokens=24")
    for _, row in found:
        decoded = row["decoded"]
        assert decoded["num_prompts"] == 4
        assert decoded["num_rounds"] == decoded["taught"]["num_rounds"]
        assert decoded["acceptance_length"] == pytest.approx(decoded["taught"]["acceptance_length"], rel=0.1)
    target = Target.load(world / "target")
    prompts = [json.loads(line) for line in (world / "rows.jsonl").read_text().splitlines()][:4]
    lengths = [row["prompt_length"] for row in prompts]  # 3, 8, 1 and 6: one has only its first token
    prompts = [row["input_ids"][: n if n > 1 else 8] for row, n in zip(prompts, lengths, strict=True)]
    k = found[-1][1]["num_draft_tokens"]
    done = generate(target, load_head(folder / "final", target), prompts, max_new_tokens=24, num_draft_tokens=k)
    counted = acceptance(done.rounds, num_draft_tokens=k)
    assert counted.length is not None
    assert found[-1][1]["decoded"]["acceptance_length"] == round(counted.length, 4) > 1.2


def test_a_confidence_head_is_calibrated_on_the_validation_rows(run, world):
    rows = f"data.validation={world / 'rows.jsonl'}"
    folders = [
        run("block", name, "head.confidence=true", "head.markov_rank=8", *options)
        for name, options in (("a", [rows]), ("b", []))
    ]
    stored = [final(folder) for folder in folders]
    differ = {key for key in stored[0] if not torch.equal(stored[0][key], stored[1][key])}
    assert differ == {"confidence_head.proj.weight", "confidence_head.proj.bias"}, "nothing else depends on these rows"


def test_answers_that_are_long_enough_are_decoded_in_recorded_steps(validated, monkeypatch):
    """On a GPU; the head is another one at each validation, so its steps are recorded anew."""
    plain, recorded = validated("medusa", "a")[1], []
    monkeypatch.setattr("headstart.train.validation.default_steps", lambda device, num_tokens: "compile")
    monkeypatch.setattr(replay, "compiled", lambda step, arguments: recorded.append(arguments) or step)
    assert validated("medusa", "b")[1] == plain
    assert len(recorded) == 2 * len(plain)


def test_a_head_that_drafts_from_something_else_shows(validated, monkeypatch):
    real = MedusaHead.first_logits
    monkeypatch.setattr(MedusaHead, "first_logits", lambda self, state: real(self, state).roll(1, -1))
    _, found = validated("medusa", "a")
    decoded = found[-1][1]["decoded"]
    assert decoded["acceptance_length"] < 1.1 < 1.2 < decoded["taught"]["acceptance_length"]


def test_decoding_can_be_left_out_and_is_where_a_target_cannot(validated, monkeypatch):
    _, found = validated("medusa", "a", "train.decode_prompts=0")
    assert [step for step, _ in found] == [10, 20, 30] and "decoded" not in found[0][1]
    monkeypatch.setattr(Target, "can_decode", False)
    _, found = validated("medusa", "b")
    assert [step for step, _ in found] == [10, 20, 30] and "decoded" not in found[0][1]


def test_the_best_head_is_kept(run, world, monkeypatch):
    lengths = iter([1.5, 2.0, 1.8])
    monkeypatch.setattr(Validation, "measure", lambda self: ValidationResult(3, AcceptancePart(9, next(lengths), [])))
    how = ("train.validate_every=2", f"data.validation={world / 'rows.jsonl'}", "train.checkpoint_every=4")
    folder = run("medusa", "a", *how)
    best, last = load_file(folder / "best" / "model.safetensors"), final(folder)
    then = load_file(folder / "checkpoints" / "step_00000004" / "head.safetensors")
    assert sorted(map(float, (value.sum() for value in best.values()))) == sorted(
        map(float, (value.sum() for value in then.values()))
    )
    assert any(not torch.equal(best[name], last[name]) for name in best)
    assert load_head(folder / "best", Target.load(world / "target")).config.type == "medusa"


def test_patience_ends_a_run_and_an_interrupted_one_alike(validated, capsys):
    how = ("train.patience=2", "train.learning_rate=1e-9", "train.validate_every=2")
    whole, found = validated("medusa", "whole", *how)
    assert [step for step, _ in found] == [2, 4, 6]
    said = " ".join(capsys.readouterr().err.split())
    assert "no better validation in 2: ended at step 6; best acceptance length" in said and (whole / "final").is_dir()
    validated("medusa", "half", *how, "train.stop_at_step=5")
    half, _ = validated("medusa", "half", *how)
    assert metrics(half) == metrics(whole)


def test_patience_needs_validations(run, validated):
    with pytest.raises(BadInput, match=r"train.patience 1: counts validations, so data.validation must be given"):
        run("medusa", "a", "train.patience=1", "train.validate_every=2")
    with pytest.raises(BadInput, match=r"patience 1: counts validations, so validate_every must be above 0"):
        run("medusa", "a", "train.patience=1")


def test_only_a_better_validation_is_the_best():
    best = Best()
    assert [best.take(step, length) for step, length in enumerate([1.5, 1.5, None, 1.6])] == [True, False, False, True]
    assert best == Best(step=3, acceptance_length=1.6, waited=0)


# How fast


def test_operations_are_counted_and_change_nothing():
    a, b = torch.randn(5, 7, requires_grad=True), torch.randn(7, 3)
    plain = torch.nn.functional.smooth_l1_loss(a @ b, torch.ones(5, 3))
    with Operations() as counted:
        loss = torch.nn.functional.smooth_l1_loss(a @ b, torch.ones(5, 3))
        loss.backward()
    assert counted.total == 2 * (2 * 5 * 7 * 3), "the product, and the gradient of one factor"
    assert torch.equal(loss, plain)


def test_a_step_is_set_against_what_the_machine_can_do():
    speed = Speed(torch.device("cpu"), torch.float32)
    a = torch.randn(512, 512)
    with speed.counted(4):
        torch.matmul(a, a)
    with speed.counted(4):
        pass
    step = speed.of_step(num_positions=8, seconds=2.0, waited=0.5, num_groups=3)
    assert step.tokens_per_second == 12 and step.data_wait == 0.25 and step.peak_bytes > 10_000_000
    assert math.isclose(step.mfu, 2 * 512**3 * 2 / 2.0 / speed.rate, abs_tol=1e-4)


def test_a_run_whose_time_is_over_validates_and_can_be_continued(validated, capsys):
    stopped, found = validated("medusa", "half", "train.stop_after=1e-6")
    assert [step for step, _ in found] == [1] and not (stopped / "final").exists()
    assert "train.stop_after: stopped at step 1 of 30; the same command goes on from there" in capsys.readouterr().err
    half, found = validated("medusa", "half")
    whole, _ = validated("medusa", "whole")
    assert [step for step, _ in found] == [1, 10, 20, 30]
    assert weights(half) == weights(whole)


def test_every_step_tells_its_speed(run):
    rows = read_appended(run("medusa", "a") / "metrics.jsonl")
    assert all(StepSpeed.__dataclass_fields__.keys() <= row.keys() for row in rows)
    assert all(0 < row["mfu"] < 1 and 0 <= row["data_wait"] < 1 for row in rows)


@pytest.mark.slow
def test_tensorboard_has_the_curve(run, world):
    name = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(name)
    how = ("train.tensorboard=true", f"data.validation={world / 'rows.jsonl'}", "train.validate_every=3")
    run("medusa", "a", *how, "train.stop_at_step=4")
    folder = run("medusa", "a", *how)
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    losses = {row["step"]: row["loss"] for row in read_appended(folder / "metrics.jsonl") if "loss" in row}
    assert {one.step: one.value for one in events.Scalars("loss")} == pytest.approx(losses)
    assert [one.step for one in events.Scalars("validation/decoded/acceptance_length")] == [3, 6]
