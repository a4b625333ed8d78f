"""A run is steered by acceptance: taught and decoded figures agree, the best head is kept, patience ends the run, and
the head says of its training what was found."""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from headstart.base.errors import BadInput
from headstart.base.jsonl import read_appended
from headstart.data_pipelines.rows.samples import Sample
from headstart.data_pipelines.storage.shard_file import StoredSample
from headstart.data_pipelines.storage.shards import Shards, ShardWriter
from headstart.engines.export import export_head
from headstart.engines.heads import build_head, head_class, head_record, load_head
from headstart.eval.decoding import generate, replay
from headstart.eval.figures.metrics import AcceptancePart, acceptance
from headstart.eval.figures.recorded_training import AnswerSettings
from headstart.heads.medusa import MedusaHead
from headstart.targets.target import Target
from headstart.train.backend import Backend
from headstart.train.checkpoint import Best
from headstart.train.inputs.config import TrainConfig
from headstart.train.loop import Loop
from headstart.train.optim import build_optimizer
from headstart.train.training_record import answer_settings, common_ending
from headstart.train.validation import Validation, ValidationResult, evaluating
from headstart.train.watching.speed import StepSpeed
from run_files import final, metrics, validations, weights
from safetensors.torch import load_file
from torch import nn

FEW = ("train.max_steps=6", "train.validate_every=2")


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


def test_answers_are_decoded_with_the_window_that_is_asked_for_and_nothing_else_is(run, world, monkeypatch):
    seen = []

    def noting(target, head, *prompts, **how):
        seen.append((head, head.draft_window))
        return generate(target, head, *prompts, **how)

    monkeypatch.setattr("headstart.train.validation.generate", noting)
    run("eagle3", "a", "train.decode_window='4:1'", f"data.validation={world / 'rows.jsonl'}")
    assert seen and all((window.size, window.sink) == (4, 1) for _, window in seen)
    assert all(head.draft_window is None for head, _ in seen)


def test_a_window_that_a_head_cannot_have_is_refused_before_the_first_step(refused, world, monkeypatch):
    monkeypatch.setattr("headstart.train.loop.Loop.step", None)
    rows = f"data.validation={world / 'rows.jsonl'}"
    assert "train.decode_window: " in refused("medusa", "a", "train.decode_window='4:1'", rows)
    assert "train.decode_window: " in refused("eagle3", "b", "train.decode_window='4;1'", rows)


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
    plain, recorded = validated("medusa", "a", *FEW)[1], []
    monkeypatch.setattr("headstart.train.validation.default_steps", lambda device, num_tokens: "compile")
    monkeypatch.setattr(replay, "compiled", lambda step, arguments: recorded.append(arguments) or step)
    assert validated("medusa", "b", *FEW)[1] == plain
    assert len(recorded) == 2 * len(plain)


def test_a_head_that_drafts_from_something_else_shows(validated, monkeypatch):
    real = MedusaHead.first_logits
    monkeypatch.setattr(MedusaHead, "first_logits", lambda self, state: real(self, state).roll(1, -1))
    _, found = validated("medusa", "a")
    decoded = found[-1][1]["decoded"]
    assert decoded["acceptance_length"] < 1.1 < 1.2 < decoded["taught"]["acceptance_length"]


def test_decoding_can_be_left_out_and_is_where_a_target_cannot(validated, monkeypatch):
    _, found = validated("medusa", "a", *FEW, "train.decode_prompts=0")
    assert [step for step, _ in found] == [2, 4, 6] and "decoded" not in found[0][1]
    monkeypatch.setattr(Target, "can_decode", False)
    _, found = validated("medusa", "b", *FEW)
    assert [step for step, _ in found] == [2, 4, 6] and "decoded" not in found[0][1]


def validation_of(head, rows, **settings):
    config = TrainConfig(output_dir="unused", max_steps=1, decode_prompts=0, **settings)
    backend = Backend(Accelerator(cpu=True), head, build_optimizer(head, config), config)
    return Validation(backend, rows, SimpleNamespace(at=lambda where: None))  # pyright: ignore[reportArgumentType]


def test_a_validation_leaves_every_part_in_its_mode():
    """A draft model is trained without dropout, behind a validation too."""
    head = nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval())
    with evaluating(head):
        assert not head.training and not head[0].training
    assert [part.training for part in (head, head[0], head[1])] == [True, True, False]


def test_a_validation_keeps_no_row_unpacked(features, target):
    head = build_head(head_class("medusa").config_class(type="medusa", num_depths=3), target)
    validation = validation_of(head, Shards(features("medusa", "stored")))
    assert validation.measure().taught.num_rounds and validation.rows[0].packed is not None
    assert not any("states" in vars(row) for row in validation.rows)


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
    assert "no better validation in 2: ended at step 6; best: " in said and (whole / "final").is_dir()
    validated("medusa", "half", *how, "train.stop_at_step=5")
    half, _ = validated("medusa", "half", *how)
    assert metrics(half) == metrics(whole)


def test_a_run_in_slices_waits_as_one_at_once(validated, monkeypatch):
    """A slice that ends between two validations has one of its own, which no patience counts."""
    how = ("train.patience=2", "train.learning_rate=1e-9", "train.validate_every=2", "train.checkpoint_every=2")
    whole, _ = validated("medusa", "whole", *how)
    take = Loop.step

    def late(self, step, batches):
        row = take(self, step, batches)
        self.is_late = self.is_late or step == 2
        return row

    monkeypatch.setattr(Loop, "step", late)
    validated("medusa", "half", *how)
    monkeypatch.setattr(Loop, "step", take)
    half, found = validated("medusa", "half", *how)
    assert [step for step, _ in found] == [2, 3, 4, 6]
    assert [row for row in metrics(half) if row["step"] != 3] == [row for row in metrics(whole) if row["step"] != 3]


def test_patience_needs_validations(run, validated):
    with pytest.raises(BadInput, match=r"train.patience 1: counts validations, so data.validation must be given"):
        run("medusa", "a", "train.patience=1", "train.validate_every=2")
    with pytest.raises(BadInput, match=r"patience 1: counts validations, so validate_every must be above 0"):
        run("medusa", "a", "train.patience=1")


def test_only_a_better_validation_is_the_best():
    best = Best()
    assert [best.take(step, length) for step, length in enumerate([1.5, 1.5, None, 1.6])] == [True, False, False, True]
    assert best == Best(step=3, acceptance_length=1.6, best_due=1.6, waited=0)
    best.take(4, 1.6)
    assert [best.take(5, length, is_due=False) for length in (1.5, 1.7)] == [False, True]
    assert best == Best(step=5, acceptance_length=1.7, best_due=1.6, waited=1), "as without the one between"
    assert not best.take(6, 1.65) and best == Best(step=5, acceptance_length=1.7, best_due=1.65, waited=0)


# How fast


def test_a_steps_speed_is_of_all_processes():
    step = StepSpeed.of(torch.device("cpu"), num_positions=24, seconds=2.0, waited=0.5)
    assert step.tokens_per_second == 12 and step.data_wait == 0.25 and step.peak_bytes > 10_000_000


def test_a_run_whose_time_is_over_validates_and_can_be_continued(validated, capsys):
    stopped, found = validated("medusa", "half", *FEW, "train.stop_after=1e-6")
    assert [step for step, _ in found] == [1] and not (stopped / "final").exists()
    assert "train.stop_after: stopped at step 1 of 6; the same command goes on from there" in capsys.readouterr().err
    half, found = validated("medusa", "half", *FEW)
    whole, _ = validated("medusa", "whole", *FEW)
    assert [step for step, _ in found] == [1, 2, 4, 6]
    assert weights(half) == weights(whole)
    steps = [row for row in read_appended(whole / "metrics.jsonl") if "loss" in row]
    assert all(0 <= row["data_wait"] < 1 < row["tokens_per_second"] for row in steps)


def test_a_head_carries_its_last_or_best_validation_and_the_form_of_its_rows(run, world, tmp_path):
    rows = f"data.validation={world / 'rows.jsonl'}"
    folder = run("eagle3", "a", rows, "train.validate_every=3", "train.decode_tokens=8", "data.max_length=24")
    validated = validations(folder)
    training = head_record(folder / "final").training or {}
    assert (training["steps"], training["validation"]) == validated[-1] and validated[-1][0] == 6
    best = head_record(folder / "best").training or {}
    assert (best["steps"], best["validation"]) == max(validated, key=lambda one: one[1]["acceptance_length"])
    assert (training["max_length"], training["num_depths"], training["target_dtype"]) == (24, 3, "float32")
    assert training["answers"] is training["target_quantization"] is None
    assert len(training["template_hash"]) == 16 and json.loads(json.dumps(training)) == training

    export_head(folder, tmp_path / "served", to="vllm")
    assert head_record(tmp_path / "served").training == training


@pytest.mark.parametrize(
    ("prompts", "ending"),
    [
        ([[5, 9, 7, 8], [6, 7, 8], [7, 8]], [7, 8]),
        ([[5, 9, 7, 8], [6, 7, 9]], []),
        ([[5, 7, 8], [], [1]], [5, 7, 8]),  # a text, with its bos or without, says nothing of how prompts end
    ],
)
def test_the_ending_is_what_all_prompts_share(prompts, ending, tmp_path):
    writer = ShardWriter(tmp_path)
    for prompt in prompts:
        writer.add(StoredSample(Sample.of([*prompt, 3, 4, 2], [False] * len(prompt) + [True] * 3)))
    writer.finish()
    assert common_ending(Shards(tmp_path)) == ending


def test_a_later_piece_of_a_trace_is_no_prompt(tmp_path):
    writer = ShardWriter(tmp_path)
    writer.add(StoredSample(Sample.of([5, 7, 3, 4], [False, False, True, True])))
    writer.add(StoredSample(Sample.of([3, 9, 3, 4], [False, False, True, True], segments=[1, 1, 1, 1])))
    writer.finish()
    assert common_ending(Shards(tmp_path)) == [5, 7]


def test_how_answers_were_sampled_is_read_beside_them(tmp_path):
    way = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 9, "seed": 0, "num_samples": 1, "thinking": True}
    (tmp_path / "manifest.json").write_text(json.dumps({"settings": {"sampling": {"x.jsonl": way, "y.jsonl": way}}}))
    expected = [AnswerSettings(temperature=0.7, top_p=1.0, top_k=0, thinking=True)]
    assert answer_settings(str(tmp_path / "answers.jsonl")) == expected
    assert answer_settings([str(tmp_path / "answers.jsonl"), "owner/name"]) is None
