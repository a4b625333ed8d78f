"""Training goes on from a head: whole, or by adapters alone; and a target may learn with its heads."""

import json
import shlex

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.data_pipelines import vocab
from headstart.engines.export import export_head
from headstart.engines.heads import HEADS, build_head, load_head, save_head
from headstart.targets.target import Target
from headstart.train import start, trainer
from headstart.train.inputs import data as train_data
from run_files import final, losses

MEDUSA2 = ("head.target_lora_rank=2", "head.num_depths=2")
SHORT = ("train.max_steps=3", "train.warmup_steps=1")


def same(folder, other):
    a, b = final(folder), final(other)
    return losses(folder) == losses(other) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.fast_only(head_type=["draft_lm", "eagle3"])
def test_a_run_goes_on_from_a_head(head_type, run, capsys):
    first = run(head_type, "first")
    more = run(head_type, "more", f"train.start_from={first / 'final'}", "train.learning_rate=1e-12", *SHORT)
    assert "was trained with another" not in capsys.readouterr().err
    assert sum(losses(more)) < sum(losses(first)[:3])
    for name, value in final(more).items():
        torch.testing.assert_close(value, final(first)[name])


def test_a_fitted_start_lowers_the_first_loss_and_resumes_exactly(run):
    whole = run("eagle3", "whole", "head.start=fitted", *SHORT)
    run("eagle3", "half", "head.start=fitted", *SHORT, "train.stop_at_step=1")
    assert same(run("eagle3", "half", "head.start=fitted", *SHORT), whole)
    assert losses(whole)[0] < losses(run("eagle3", "random", "head.start=random", *SHORT))[0]


@pytest.mark.parametrize(("head_type", "overrides"), [("eagle3", []), ("block", ["head.start=fitted"])])
def test_too_few_rows_for_a_fit_are_said_before_the_target_is_loaded(head_type, overrides, run, monkeypatch, capsys):
    """Loading may take minutes. The head then starts from random weights, as it would have been told to."""
    own = start.load_target

    def load(run, accelerator, console):
        console.print("loading")
        return own(run, accelerator, console)

    monkeypatch.setattr(start, "load_target", load)
    folder = run(head_type, "few", "data.num_rows=2", *overrides, *SHORT)
    before, after = capsys.readouterr().err.split("loading\n")
    assert "head.start: 48 supervised tokens of the 64 that a fit takes" in before and "head.start" not in after
    assert same(run(head_type, "random", "data.num_rows=2", "head.start=random", *SHORT), folder)
    assert "head.start" not in capsys.readouterr().err


@pytest.mark.fast_only(head_type=["eagle3"])
def test_adapters_alone_train_and_resume_exactly(head_type, run):
    first = run(head_type, "first", *SHORT)
    how = (f"train.start_from={first / 'final'}", "train.lora_rank=2", "train.lora_alpha=4", "train.weight_decay=0.1")
    how += SHORT
    whole = run(head_type, "whole", *how)
    run(head_type, "half", *how, "train.stop_at_step=1")
    assert same(run(head_type, "half", *how), whole)
    before, after = final(first), final(whole)
    assert before.keys() == after.keys(), "an ordinary head"
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved
    for name in moved:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4) <= 2, name


@pytest.mark.slow
def test_the_draft_vocabulary_grows_where_the_run_asks_for_more(run):
    first = run("eagle3", "first", "head.draft_vocab_size=20")
    how = ("head.draft_vocab_size=30", f"train.start_from={first / 'final'}")
    more = run("eagle3", "more", *how, "train.learning_rate=1e-12")
    before, after = (torch.nonzero(final(folder)["t2d"])[:, 0] for folder in (first, more))
    assert len(after) == 30 and set(before.tolist()) <= set(after.tolist())
    kept = torch.isin(after, before)
    torch.testing.assert_close(final(more)["lm_head.weight"][kept], final(first)["lm_head.weight"])
    run("eagle3", "half", *how, "train.stop_at_step=3")
    assert same(run("eagle3", "half", *how), run("eagle3", "whole", *how)), (
        "a run that was stopped goes on as any other"
    )


def test_a_large_vocabulary_is_cut_to_what_the_answers_consist_of(run, monkeypatch):
    """The size stays that of the start when the run goes on, and when another run starts from its head."""
    monkeypatch.setattr(train_data, "LARGE_VOCABULARY", 1)
    monkeypatch.setattr(vocab, "SIZE_STEP", 4)
    how = ("train.draft_coverage=0.9", *SHORT)
    run("eagle3", "half", *how, "train.stop_at_step=1")
    whole = run("eagle3", "whole", *how)
    assert same(run("eagle3", "half", *how), whole)
    size = len(final(whole)["d2t"])
    assert 4 <= size < len(final(whole)["t2d"]) and size % 4 == 0
    assert len(final(run("eagle3", "given", *how, "head.draft_vocab_size=20"))["d2t"]) == 20, "what is given counts"
    more = run("eagle3", "more", "train.draft_coverage=0.5", f"train.start_from={whole / 'final'}", *SHORT)
    assert torch.equal(final(more)["d2t"], final(whole)["d2t"])
    monkeypatch.setattr(train_data, "LARGE_VOCABULARY", 10**6)
    assert "d2t" not in final(run("eagle3", "small", *how)), "a small one stays whole"


def test_a_head_of_another_target_is_adapted_with_a_note(run, world, tmp_path, capsys):
    target = Target.load(world / "target")
    target.stored_fingerprint, target.name = "other", "elsewhere"
    config = HEADS["eagle3"].config_class(type="eagle3", num_depths=3)
    folder = save_head(build_head(config, target), tmp_path / "of_another_target")
    done = run("eagle3", "a", f"train.start_from={folder}", *SHORT)
    told = " ".join(capsys.readouterr().err.split())
    assert "train.start_from: a head of another target, elsewhere; it goes on for" in told
    assert "was trained with another" not in told
    load_head(done / "final", Target.load(world / "target"))


def exported(run, name, to, *how):
    folder = run(*how)
    export_head(folder, folder.with_name(name), to=to)
    return folder / "final", folder.with_name(name)


EXPORTS = [("medusa", "vllm"), ("eagle3", "speculators"), ("draft_lm", "hf")]


@pytest.mark.parametrize(("family", "to"), EXPORTS)
def test_a_run_goes_on_from_an_export_as_from_the_head(run, family, to, capsys):
    head, served = exported(run, "served", to, family, "first", *SHORT)
    ours = run(family, "ours", f"train.start_from={head}", *SHORT)
    theirs = run(family, "theirs", f"train.start_from={served}", *SHORT)
    assert same(ours, theirs)
    assert "another target" not in capsys.readouterr().err


def test_a_run_goes_on_from_a_head_that_others_made(run, world, tmp_path):
    """One of another rotation and residual: refused with the keys to set, and with these it learns."""
    rotation = "{rope_parameters: {rope_type: default, rope_theta: 7.0}}"
    how = ("head.norm_before_residual=true", f"head.architecture={rotation}")
    _, served = exported(run, "served", "vllm", "eagle3", "first", *how, *SHORT)
    config = json.loads((served / "config.json").read_text())
    del config["headstart_export"]
    (served / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="computes otherwise than this config: set ") as caught:
        run("eagle3", "a", f"train.start_from={served}")
    named = shlex.split(str(caught.value).partition(": set ")[2])
    assert [one.partition("=")[0] for one in named] == ["head.norm_before_residual", "head.architecture"]
    before = run("eagle3", "b", f"train.start_from={served}", *named, "train.max_steps=20", "train.learning_rate=1e-2")
    assert losses(before)[-1] < losses(before)[0]
    target = Target.load(world / "target")
    assert load_head(before / "final", target).config.as_dict()["norm_before_residual"]


# Medusa-2


@pytest.mark.slow
def test_medusa_2_resumes_exactly(run, world):
    how = (*MEDUSA2, "train.validate_every=2", "train.decode_tokens=8", f"data.validation={world / 'rows.jsonl'}")
    whole = run("medusa", "whole", *how)
    run("medusa", "half", *how, "train.stop_at_step=3")
    assert same(run("medusa", "half", *how), whole)


def test_medusa_2_does_not_depend_on_how_batches_are_cut(run):
    how = (*MEDUSA2, "head.target_learning_rate_scale=1", "train.max_steps=4")
    one = run("medusa", "one", *how, "train.batch_size=4")
    two = run("medusa", "two", *how, "train.batch_size=2", "train.accumulation=2")
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)


def test_the_targets_adapters_learn_at_a_quarter_of_the_rate(run, monkeypatch):
    rates = {}

    def watched(self, step, batches, real=trainer.Loop.step):
        row = real(self, step, batches)
        rates.update({group["part"]: group["lr"] for group in self.backend.optimizer.param_groups})
        return row

    monkeypatch.setattr(trainer.Loop, "step", watched)
    run("medusa", "a", *MEDUSA2, "train.max_steps=2")
    assert 0 < rates["adapter."] == pytest.approx(0.25 * rates[""])


def test_medusa_2_goes_on_from_medusa_1(run, capsys):
    first = run("medusa", "first", "head.num_depths=2", *SHORT)
    second = run("medusa", "second", *MEDUSA2, f"train.start_from={first / 'final'}", *SHORT)
    assert "that head was trained with another target_lora_rank" in " ".join(capsys.readouterr().err.split())
    assert any("lora_B" in name and value.abs().sum() > 0 for name, value in final(second).items())
    with pytest.raises(BadInput, match="train.lora_rank 2: this MedusaHead has adapters already"):
        run("medusa", "third", *MEDUSA2, f"train.start_from={second / 'final'}", "train.lora_rank=2")
