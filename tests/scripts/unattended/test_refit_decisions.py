"""The decisions of `headstart refit`, from figures alone: what is held out, what is foreign, what is offered."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.data_pipelines.traffic import ServedChat, Traffic
from headstart.eval.decoding import generate
from headstart.scripts.unattended import reading
from headstart.scripts.unattended.candidates import find_candidates
from headstart.scripts.unattended.comparing import FORGETS, STAYS, compare_by_domain, decide_between, drift_of
from headstart.scripts.unattended.foreign import (
    OwnAnswers,
    is_foreign,
    served_temperature,
    standardised,
    temperatures_for,
    typicality,
)
from headstart.scripts.unattended.held_out import by_turns, mixed, split_traffic
from headstart.scripts.unattended.journal import Compared
from headstart.scripts.unattended.reading import RowReading, append, readings_in
from headstart.scripts.unattended.training import (
    LEAST_STEPS,
    MOST_EPOCHS,
    RATE,
    REFIT_VALIDATIONS,
    Pace,
    planned_steps,
    training_of,
)


def rows_of(count, *, of=1, prefix="q", domain=None):
    """count conversations of `of` rows each."""
    return [ServedChat({"messages": []}, f"logs:{i}", f"{prefix}{i % count}", domain=domain) for i in range(count * of)]


def test_held_out_conversations_are_learnt_from_on_neither_side():
    new, old = split_traffic(rows_of(30, of=3), rows_of(30, of=2), seed=0)
    held_out = {row.question for part in (new, old) for row in part.held_out.values()}
    learnt = {row.question for part in (new, old) for row in part.rest.values()}
    assert len(new.held_out) == 30 and len(old.held_out) == 20, "a third of the conversations, all of their rows"
    assert not held_out & learnt and learnt, "also what the other side holds out"
    again, _ = split_traffic(rows_of(30, of=3), rows_of(30, of=2), seed=0)
    assert list(again.rest) == list(new.rest)


def test_rows_are_read_by_turns_so_that_little_time_does_for_all_parts():
    a, b, c = (dict(zip(names, rows_of(len(names)), strict=True)) for names in ("aA", "bBxyz", "c"))
    assert list(by_turns(a, b, c)) == ["a", "b", "c", "A", "B", "x", "y", "z"]


@pytest.mark.parametrize(("given", "wanted"), [(None, [0.7, None]), (0.0, [0.0, 0.0]), (1.0, [1.0, 1.0])])
def test_a_given_temperature_takes_the_place_of_the_rows_own(given, wanted, monkeypatch):
    first, second = rows_of(2)
    monkeypatch.setattr(reading, "read_traffic", lambda _: Traffic([replace(first, temperature=0.7), second], {}, 0))
    run = SimpleNamespace(settings=SimpleNamespace(traffic="logs.jsonl", temperature=given))
    traffic: Any = vars(reading.RefitRun)["traffic"].func(run)
    assert [row.temperature for row in traffic.rows] == wanted


def test_too_few_conversations_are_refused():
    with pytest.raises(BadInput, match="--traffic: 11 different conversations, at least 12 are needed"):
        split_traffic(rows_of(11, of=2), [], seed=0)
    with pytest.raises(BadInput, match="--replay: 2 different"):
        split_traffic(rows_of(20), rows_of(2), seed=0)


@pytest.mark.parametrize(("share", "count"), [(0.5, 10), (0.75, 30), (0.0, 0)])
def test_old_rows_have_their_share_of_what_is_learnt(share, count):
    new, old = rows_of(10), rows_of(4, prefix="old")
    rows = mixed(new, old, replay_share=share, seed=0)
    assert len(rows) == 10 + count and sum(row.question.startswith("old") for row in rows) == count
    assert {row.question for row in new} <= {row.question for row in rows}
    assert len(mixed(new, [], replay_share=share, seed=0)) == 10


def typical(target, prompt, answer):
    states = target.forward(torch.tensor([prompt + answer])).post_norm[0, len(prompt) - 1 : -1]
    logits = target.logits(states).float()
    return {str(at): standardised(typicality(logits, torch.tensor(answer), at)) for at in temperatures_for(None)}


@pytest.fixture(scope="module")
def answers(target):
    """By temperature, typicality of 40 of the target's own answers, and of 20 random ones."""
    drawn = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 61, (40, 4), generator=drawn).tolist()
    found = {}
    for temperature in (0.0, 0.7, 1.0):
        how = {"temperature": temperature, "generator": drawn, "max_new_tokens": 24, "eos_token_ids": []}
        texts = generate(target, None, prompts, **how).token_ids
        own = [typical(target, *pair) for pair in zip(prompts, texts, strict=True)]
        random = torch.randint(3, 61, (20, 24), generator=drawn).tolist()
        found[temperature] = (
            own,
            [typical(target, *pair) for pair in zip(prompts, random, strict=False)],
        )
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_answers_of_others_are_found_and_no_others(answers, temperature):
    calibration = [
        OwnAnswers(at, [row[str(temperatures_for(at)[0])] for row in own[:8]]) for at, (own, _) in answers.items()
    ]
    own, others = answers[temperature][0][8:], answers[temperature][1]
    served = served_temperature([*own, *others])
    assert served == temperatures_for(temperature)[0], "the temperature of the traffic is seen in spite of them"
    assert served_temperature([]) is None, "all rows name theirs"
    found = [is_foreign(row, served, calibration) for row in [*own, *others]]
    hits = sum(found[len(own) :])
    assert hits >= 0.9 * len(others) and hits >= 0.9 * sum(found)


def test_what_the_target_samples_is_standard_normal(answers):
    """The theory that the limits rest on."""
    values = torch.tensor([row["1.0"] for row in answers[1.0][0]])
    assert abs(values.mean()) < 0.5 and 0.6 < values.std() < 1.4
    assert all(row["0.3"] > 0 for row in answers[0.0][0]), "greedy answers are more typical than sampled ones"


def test_a_row_that_says_its_temperature_is_tested_there():
    own = [OwnAnswers(0.0, [3.0, 4.0]), OwnAnswers(1.0, [0.0, 0.5])]
    assert temperatures_for(0.0) == (0.3,) and temperatures_for(0.8) == (0.8,)
    assert is_foreign({"0.8": -3.5}, 0.3, own) and not is_foreign({"0.8": -2.5}, 0.3, own)


def readings(rounds, *, committed=20):
    return {key: RowReading(key, {}, 20, 19, count, committed) for key, count in rounds.items()}


def test_heads_are_compared_by_conversation():
    rows = dict(zip("abcdef", rows_of(3, of=2), strict=True))
    before, after = readings(dict.fromkeys("abcdef", 12)), readings(dict.fromkeys("abcdef", 10))
    [whole] = compare_by_domain("new", rows, before, after)
    assert (whole.conversations, whole.ratio) == (3, 1.2) and whole.interval == [1.2, 1.2]
    assert (whole.before, whole.after) == (round(20 / 12, 4), 2.0)


def test_drift_is_told_by_domain_and_week():
    rows = dict(zip("abcd", [*rows_of(2, domain="x"), *rows_of(2, domain="y")], strict=True))
    parts = drift_of("new", rows, readings({"a": 10, "b": 10, "c": 20}))
    assert [(part.domain, part.rows, part.acceptance_length) for part in parts] == [
        ("all", 3, 1.5),
        ("x", 2, 2.0),
        ("y", 1, 1.0),
    ]
    assert parts[0].covered == 0.95


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
    ],
)
def test_a_head_is_offered_where_it_is_better_and_forgets_nothing(new, old, is_offered, said):
    decision = decide_between([new, *([old] if old else [])], head="a", new_head="b c")
    assert decision.deploy == is_offered
    if not is_offered:
        assert decision.headline == (FORGETS if "a loss of" in said else STAYS)
    assert any(said in line for line in [*decision.reasons, *decision.cautions])
    assert any("head:'b c'" in command for command in decision.commands) == is_offered


def test_a_domain_on_which_it_is_worse_is_told():
    worse = side("new", 0.9, 0.85, 0.95, domain="poems")
    decision = decide_between([side("new", 1.2, 1.1, 1.3), worse], head="a", new_head="b")
    assert any("Worse on new traffic of poems" in caution for caution in decision.cautions)


@pytest.mark.parametrize("candidate", find_candidates(), ids=lambda candidate: candidate.name)
def test_a_trained_head_learns_on_as_a_fresh_one_does_but_slower(candidate):
    fresh, on = candidate.train, training_of(candidate.head)
    rates = {key for key in fresh if key.endswith("learning_rate")}
    assert rates >= {"learning_rate", "matrix_learning_rate"}
    assert on == {**fresh, **{key: pytest.approx(RATE * float(fresh[key])) for key in rates}}


def test_steps_fill_the_time_and_no_more_passes_than_teach():
    how = {"pace": Pace(step=1.0, overhead=10.0), "validation_seconds": 1.0, "batch_size": 8}
    assert planned_steps(100.0 + REFIT_VALIDATIONS, num_rows=10_000, **how) == 80
    assert planned_steps(1e6, num_rows=80, **how) == 10 * MOST_EPOCHS
    assert planned_steps(1e6, num_rows=1, **how) == LEAST_STEPS
    with pytest.raises(BadInput, match="--budget: too short for this target here; 1m more are the least"):
        planned_steps(20.0, num_rows=80, **how)


def test_a_reading_that_a_kill_cut_is_taken_again(tmp_path):
    path = tmp_path / "data" / "readings.jsonl"
    append(path, list(readings({"a": 3}).values()))
    path.write_text(path.read_text() + json.dumps({"key": "b"})[:5])
    assert list(readings_in(path)) == ["a"]
    append(path, list(readings({"b": 4}).values()))
    assert readings_in(path) == readings({"a": 3, "b": 4})
