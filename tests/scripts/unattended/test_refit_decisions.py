"""The decisions of `headstart refit`, from figures alone: what is held out, and what is offered."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.data_pipelines.rows.samples import Sample
from headstart.data_pipelines.rows.traffic import ServedChat
from headstart.data_pipelines.vocab import SIZE_STEP
from headstart.engines.heads import HEADS, build_head, save_head
from headstart.engines.servers.setting import EngineSetting
from headstart.eval.proof.lossless import LosslessReport
from headstart.eval.served.figures import Percentiles, SideFigures
from headstart.eval.served.load import Load
from headstart.eval.served.served_result import ServedResult
from headstart.eval.served.text_check import PromptCheck, TextCheck
from headstart.scripts.unattended.candidates import find_candidates
from headstart.scripts.unattended.comparing import FORGETS, STAYS, DraftedRow, compare_by_domain, decide_between
from headstart.scripts.unattended.held_out import mixed, split_traffic
from headstart.scripts.unattended.refit import (
    MATRIX_RATES,
    MOST_EPOCHS,
    NUM_VALIDATIONS,
    RATE,
    deploying,
    grown_vocabulary,
    planned_steps,
    training_of,
    write_config,
)
from headstart.scripts.unattended.running.journal import Compared, TrainingPlan
from headstart.scripts.unattended.training import LEAST_STEPS, Pace
from headstart.targets.target import Target
from headstart.train.inputs.config import load_run

SIDE = SideFigures(12, 0, 0, 100.0, 50.0, Percentiles(), Percentiles(), None, Percentiles(), 0.1)


def rows_of(count, *, of=1, prefix="q", domain=None):
    """count conversations of `of` rows each."""
    return [ServedChat({"messages": []}, f"logs:{i}", f"{prefix}{i % count}", domain=domain) for i in range(count * of)]


def test_held_out_conversations_are_learnt_from_on_neither_side():
    new, old = split_traffic(rows_of(30, of=3), rows_of(30, of=2), seed=0)
    held_out = {row.question for part in (new, old) for row in part.held_out}
    learnt = {row.question for part in (new, old) for row in (*part.rest, *part.validation)}
    assert len(new.held_out) == 30 and len(old.held_out) == 20, "a third of the conversations, all of their rows"
    assert not held_out & learnt and learnt, "also what the other side holds out"
    for part in (new, old):
        asked = [{row.question for row in rows} for rows in (part.validation, part.rest)]
        assert all(asked) and not asked[0] & asked[1], "nor is a question of the validation"
    again, _ = split_traffic(rows_of(30, of=3), rows_of(30, of=2), seed=0)
    assert again == new


def test_too_few_conversations_are_refused():
    with pytest.raises(BadInput, match="--traffic: 11 different conversations, at least 12 are needed"):
        split_traffic(rows_of(11, of=2), [], seed=0)
    with pytest.raises(BadInput, match="--replay: 2 different"):
        split_traffic(rows_of(20), rows_of(2), seed=0)


def test_old_rows_are_half_of_what_is_learnt():
    new, old = rows_of(10), rows_of(4, prefix="old")
    rows = mixed(new, old, seed=0)
    assert len(rows) == 20 and sum(row.question.startswith("old") for row in rows) == 10
    assert {row.question for row in new} <= {row.question for row in rows}
    assert len(mixed(new, [], seed=0)) == 10


def test_heads_are_compared_by_conversation_and_domain():
    rows = [*rows_of(3, of=2, domain="x"), *rows_of(3, prefix="other")]
    drafted = [DraftedRow(row, [12, 10], [24, 24]) for row in rows]
    whole, part = compare_by_domain("new", drafted)
    assert (whole.conversations, whole.ratio, whole.interval) == (6, 1.2, [1.2, 1.2])
    assert (part.domain, part.conversations, part.before, part.after) == ("x", 3, 2.0, 2.4)


def side(traffic, ratio, low, high, domain="all", conversations=20):
    return Compared(traffic, domain, conversations, 2.0, 2.0 * ratio, ratio, [low, high])


@pytest.mark.parametrize(
    ("new", "old", "is_offered", "said"),
    [
        (side("new", 1.2, 1.1, 1.3), side("old", 1.0, 0.99, 1.01), True, "On new traffic: 1.200 [1.100, 1.300] times"),
        (side("new", 1.2, 0.99, 1.4), side("old", 1.0, 0.99, 1.01), False, "not shown to be better"),
        (side("new", 1.03, 1.01, 1.05), side("old", 1.0, 0.99, 1.01), False, "not shown to be by the 2 %"),
        (side("new", 1.03, 1.021, 1.04), side("old", 1.0, 0.99, 1.01), True, "1.030 [1.021, 1.040] times"),
        (side("new", 1.2, 1.1, 1.3), side("old", 0.985, 0.97, 1.0), False, "a loss of more than 1 %"),
        (side("new", 1.2, 1.1, 1.3), side("old", 0.995, 0.97, 1.02), True, "is not ruled out"),
        (side("new", 1.2, 1.1, 1.3), None, True, "No old rows were given with --replay"),
        (side("new", 1.2, 1.1, 1.3, conversations=3), None, False, "3 conversations could be compared"),
        (
            side("new", 1.2, 1.1, 1.3),
            side("old", 0.5, 0.4, 0.6, conversations=3),
            True,
            "On old traffic 3 conversations",
        ),
    ],
)
def test_a_head_is_offered_where_it_is_better_and_forgets_nothing(new, old, is_offered, said):
    decision = decide_between([new, *([old] if old else [])])
    assert decision.deploy == is_offered
    part = side("new", 1.0, 0.9, 1.1)
    assert decide_between([new, part, *([old] if old else [])]) == decision, "a domain of the name of the whole"
    if not is_offered:
        assert decision.headline == (FORGETS if "a loss of" in said else STAYS)
    assert any(said in line for line in [*decision.reasons, *decision.cautions])


def test_a_domain_on_which_it_is_worse_is_told():
    worse = side("new", 0.9, 0.85, 0.95, domain="poems")
    decision = decide_between([side("new", 1.2, 1.1, 1.3), worse])
    assert any("Worse on new traffic of poems" in caution for caution in decision.cautions)


def test_what_deploys_the_new_head_is_quoted_and_names_the_adapter(saved_target, lora, tmp_path):
    head, adapter = tmp_path / "b c", lora(saved_target)
    save_head(build_head(HEADS["eagle3"].config_class(type="eagle3"), Target.load(saved_target)), head)
    engine = EngineSetting(name="vllm", args="--max-model-len 64")
    how = {"target": str(saved_target), "head": "a", "adapter": str(adapter), "engine": engine}
    settings: Any = SimpleNamespace(**how)
    exporting, serving, remark, timing = deploying(settings, str(head), folder=Path("run"))
    assert exporting == f"headstart export '{head}' served/drafts --target {saved_target} --to vllm"
    assert serving.startswith(f"vllm serve {saved_target} --speculative-config ")
    assert f" --max-model-len 64 --enable-lora --lora-modules {adapter.name}={adapter} " in serving
    assert remark.startswith("# to time both heads")
    wanted = f" --target {saved_target} --adapter {adapter} --drafter head:a --drafter 'head:{head}' "
    assert wanted + "--prompts run/data/held_out.jsonl --output run/eval" in timing


def test_the_head_learns_on_in_the_precision_in_which_its_steps_were_timed(tmp_path):
    """That of the target, also where its dtype was left to its file."""
    settings = SimpleNamespace(target="T", adapter="", dtype="auto", device="cuda", seed=0, head="H", max_length=64)
    plan = TrainingPlan(20, 0.5, 10, 0, 60.0, None, 0.1, "bfloat16")
    config = HEADS["eagle3"].config_class(type="eagle3")
    how = {"folder": tmp_path, "data": tmp_path, "settings": settings, "config": config}
    run: Any = SimpleNamespace(journal=SimpleNamespace(plan=plan), **how)
    written = load_run(write_config(run))
    assert (written.train.precision, written.target.dtype) == ("bf16", "bfloat16")


@pytest.mark.parametrize("candidate", find_candidates(), ids=lambda candidate: candidate.name)
def test_a_trained_head_learns_on_as_a_fresh_one_does_but_slower(candidate):
    fresh, on = candidate.train, training_of(candidate.head)
    rates = {key for key in fresh if key.endswith("learning_rate")}
    assert rates >= {"learning_rate", "matrix_learning_rate"}
    factors = {"matrix_learning_rate": MATRIX_RATES.get(candidate.head.type, RATE)}
    assert on == {**fresh, **{key: pytest.approx(factors.get(key, RATE) * float(fresh[key])) for key in rates}}


def test_steps_fill_the_time_and_no_more_passes_than_teach():
    how = {"pace": Pace(step=1.0, overhead=10.0), "validation_seconds": 1.0, "batch_size": 8}
    assert planned_steps(100.0 + NUM_VALIDATIONS, num_rows=10_000, **how) == 80
    assert planned_steps(1e6, num_rows=80, **how) == 10 * MOST_EPOCHS
    assert planned_steps(1e6, num_rows=1, **how) == LEAST_STEPS
    with pytest.raises(BadInput, match="--budget: too short for this target here; 1m more are the least"):
        planned_steps(20.0, num_rows=80, **how)


def test_more_tokens_only_where_the_rows_need_them(tiny_target):
    config, few = HEADS["eagle3"].config_class(type="eagle3", draft_vocab_size=4), torch.tensor([1, 2, 3, 5])
    head = build_head(config, tiny_target("llama", vocab_size=1024), draft_token_ids=few)
    known, unknown = (Sample.of([1, *tokens * 200], [False, *[True] * 600]) for tokens in ([2, 3, 5], [4, 6, 1000]))
    same, more = grown_vocabulary(head, [known]), grown_vocabulary(head, [known, unknown])
    assert same is not None and torch.equal(same, few)
    assert more is not None and len(more) == SIZE_STEP and {*few.tolist(), 4, 6, 1000} <= set(more.tolist())
    whole = build_head(HEADS["eagle3"].config_class(type="eagle3"), tiny_target("llama"))
    assert grown_vocabulary(whole, [known]) is None


@pytest.mark.parametrize(
    ("ends", "deploys"),
    [
        ([(1.05, 1.2)], True),
        ([(1.05, 1.2), (0.9, 1.1)], True),
        ([(1.05, 1.2), (0.8, 0.95)], False),
        ([(1.0, 1.1)], False),
    ],
)
def test_the_server_says_which_head_is_better_where_it_was_asked(ends, deploys):
    """Faster at a load and slower at none, whatever the tokens per forward are."""
    compared = [Compared("new", "all", 20, 2.0, 2.0, 1.0, [0.99, 1.01])]
    served = [
        ServedResult(
            *("vllm", "head:NEW at K 4", 4, Load(2**i), 96, 0.0, 12, "ABBAABBA", True),
            *(sum(pair) / 2, pair, SIDE, SIDE, None, PromptCheck(), None),
            baseline_drafter="head:OLD",
        )
        for i, pair in enumerate(ends)
    ]
    decision = decide_between(compared, served)
    assert decision.deploy == deploys
    bad = replace(served[0], texts=TextCheck(LosslessReport(12, 11, 0, 1), 12, 0))
    wrong = decide_between(compared, [bad, *served[1:]])
    assert not wrong.deploy and any("not the target's own" in one for one in wrong.cautions)
    assert decision.reasons[0].startswith("vLLM with head NEW, 4 drafts, beside head OLD: 1 at a time: ")
    assert "leave drafts off" not in decision.reasons[0]
