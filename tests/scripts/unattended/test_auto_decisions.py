"""The decisions of `headstart auto`, from figures alone: shares of the time, predictions, halving, candidates."""

import json
from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.base.jsonl import read_jsonl
from headstart.data_pipelines.answers.conversations import SamplingConfig, exchanges
from headstart.data_pipelines.rows.sources import iter_rows
from headstart.engines.heads import HEADS, save_head
from headstart.engines.servers.setting import EngineSetting
from headstart.heads.block_network import BlockConfig
from headstart.scripts.unattended import candidates, machine
from headstart.scripts.unattended.answers import asks_again, first_question, num_validation_rows, warnings_of
from headstart.scripts.unattended.auto import end_of_learning, plan_evaluation
from headstart.scripts.unattended.candidates import find_candidates, is_served
from headstart.scripts.unattended.held_out import split_prompts
from headstart.scripts.unattended.machine import GENEROUS, predict_length, served_costs
from headstart.scripts.unattended.rungs import (
    by_gain_per_cost,
    learn,
    rung_seconds,
    starting_candidates,
    survivors,
)
from headstart.scripts.unattended.running.clock import EVALUATION, TRAINED, Clock, clock_text, parse_budget
from headstart.scripts.unattended.running.journal import (
    AnswerCounts,
    AutoJournal,
    Chosen,
    Machine,
    Measured,
    RoundCost,
    Rung,
    Score,
    Split,
    Trained,
)
from headstart.scripts.unattended.running.steps import StepRecord
from headstart.scripts.unattended.training import FITTING, LEAST_STEPS, Learner, Pace, steps_in
from headstart.train.inputs.config import load_run
from safetensors.torch import save_file


def run_of(**parts) -> Any:
    """A run of `headstart auto` that has these parts."""
    return SimpleNamespace(**parts)


def test_a_budget_is_a_time_and_anything_else_is_refused_by_name():
    seconds = {"90s": 90, "20m": 1200, "2h": 7200, "1h30m": 5400, "1.5m": 90}
    assert {text: parse_budget(text) for text in seconds} == seconds
    for text in ("", "20", "20 m", "m", "5s", "-3m", "2d"):
        with pytest.raises(BadInput, match=f"--budget {text}"):
            parse_budget(text)


def test_times_read_as_clocks():
    assert [clock_text(seconds) for seconds in (7, 187, 3723)] == ["0:07", "3:07", "1:02:03"]


@pytest.mark.parametrize(("share", "is_said"), [(0.35, True), (0.02, False), (None, False)])
def test_times_that_were_taken_beside_other_work_are_said_to_be_so(share, is_said, monkeypatch):
    step = SimpleNamespace(round_ms=9.0, prefill_ms=0.0)
    stubs = {
        "workload": lambda *_: None,
        "timed_cell": lambda *_: SimpleNamespace(run=lambda **_: None, baseline=step, plain=[step]),
        "load_skeleton": lambda _: None,
        "find_candidates": lambda _: [SimpleNamespace(name="eagle3")],
        "measure_candidate": lambda *_: Measured("eagle3", bound=2.0),
        "start_seconds": lambda _: 1.0,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(machine, name, stub)
    monkeypatch.setattr(machine.ProcessorMeter, "others", lambda _: share)
    said: list[str] = []
    settings, clock = SimpleNamespace(engine=EngineSetting(name="vllm"), budget=100.0), SimpleNamespace(used=0.0)
    run = run_of(settings=settings, clock=clock, say=said.append, check_stop=lambda: None, load_seconds=0.0)
    target = SimpleNamespace(name="T", dtype=torch.float32, device="cpu", hidden_size=8)
    machine.measure_machine(run, target)  # type: ignore[arg-type]
    assert [line for line in said if "35% of the processor" in line] == said[1:] and (len(said) == 2) == is_said


@pytest.mark.parametrize(
    ("longest", "width", "lengths", "passes", "output"),
    [
        (None, 61, [1, 3, 5], [1, 3, 5], 0),  # a pass for each draft, with an output layer of its own
        (None, 60, [1, 3, 5], [1, 3, 5], 61 * 32),  # by the target's output layer
        (4, 61, [1, 2, 4], [1, 1, 1], 0),  # all drafts in one pass
    ],
)
def test_rounds_in_a_server_are_estimated_by_its_rates(longest, width, lengths, passes, output, target):
    """A token of a prompt takes 1 ms, a step of 2 rows 20 ms: a verified draft of each costs a tenth of it."""
    weights = torch.zeros(width, 100)
    head: Any = SimpleNamespace(parameters=lambda: iter([weights]), num_drafted=61, max_draft_tokens=longest)
    head.num_depths, head.default_draft_tokens = 3, 5
    costs = served_costs(target, head, 0.001, num_rows=2, step_seconds=0.02)
    read = sum(parameter.numel() for parameter in target.model.parameters()) - 61 * 32  # all but the embedding
    share = (width * 100 + output) / read
    assert [cost.num_draft_tokens for cost in costs] == lengths
    expected = [1 + num * share + 0.1 * k for k, num in zip(lengths, passes, strict=True)]
    assert [cost.steps for cost in costs] == pytest.approx(expected, abs=1e-4)


def test_verifying_in_a_server_wakes_more_experts_than_a_step(tiny_target):
    """Of 4 experts a token picks 2: a step of a row reads half of them, a round with k drafts 1 - 1 / 2 ** (k + 1)."""
    target = tiny_target("qwen3_moe")
    head: Any = SimpleNamespace(parameters=lambda: iter([torch.zeros(61, 100)]), num_drafted=61, max_draft_tokens=5)
    head.num_depths, head.default_draft_tokens = 3, 5
    costs = served_costs(target, head, 0.001, num_rows=1, step_seconds=0.02)
    named = [(name, parameter.numel()) for name, parameter in target.model.named_parameters() if "embed" not in name]
    experts = sum(size for name, size in named if "experts" in name)
    others = sum(size for _, size in named) - experts
    step, more = others + experts / 2, {k: (1 / 2 - 1 / 2 ** (k + 1)) * experts for k in (1, 3, 5)}
    expected = [1 + more[k] / step + 6100 / step + 0.05 * k for k in more]
    assert [cost.steps for cost in costs] == pytest.approx(expected, abs=1e-4)
    assert more[5] / step > 0.1, "or it would not show"


def test_time_that_was_used_before_a_kill_counts(tmp_path):
    (tmp_path / "clock.json").write_text('{"seconds": 40.0}')
    assert 59 < Clock(tmp_path / "clock.json", 100).left <= 60
    (tmp_path / "clock.json").write_text("{")
    assert Clock(tmp_path / "clock.json", 100).used < 1, "a damaged note costs no more than the note"


@pytest.mark.parametrize(
    ("rates", "costs", "expected"),
    [
        ([0.5, None, 0.9], {1: 1.0, 5: 1.0}, (1, 1.5)),  # a position that was never reached adds nothing
        ([0.5], {1: 1.0, 5: 1.0}, (5, 1.9688)),  # further ones are like the last
        ([1.0, 1.0, 1.0, 0.0], {1: 1.2, 5: 2.0}, (3, 4 / 1.6)),  # costs lie between those of measured lengths
        ([0.6, 0.5, 0.4], {1: 1.1, 3: 2.5}, (1, 1.4545)),  # where drafts cost the longest chain is not the best
        ([GENEROUS], {1: 2.0, 5: 5.0}, (1, 0.9)),  # what cannot pay is known before training
    ],
)
def test_the_chain_with_the_highest_predicted_speedup_is_found(rates, costs, expected):
    assert predict_length(rates, [RoundCost(*cost) for cost in costs.items()]) == expected


def test_rungs_halve_until_one_is_left():
    """1: none is needed; 2; 3, 2; 4, 2; 5, 3, 2; 7, 4, 2; 9, 5, 3, 2."""
    assert [60 / rung_seconds(60, count) for count in (1, 2, 3, 4, 5, 7, 9)] == [1, 1, 2, 2, 3, 3, 4]


def test_only_as_many_candidates_begin_as_there_is_time_for():
    paces = {name: Pace(step=1.0, overhead=5.0) for name in "abcd"}
    least = 5 + LEAST_STEPS
    assert starting_candidates("abcd", paces, 2 * 4 * least) == list("abcd")
    assert starting_candidates("abcd", paces, 2 * 4 * least - 1) == list("abc"), "the last in rank is left out"
    assert starting_candidates("abcd", paces, 1) == ["a"]


def test_steps_fill_the_time_left_by_the_overhead():
    assert steps_in(105, Pace(step=0.5, overhead=5)) == (TRAINED * 105 - 5) / 0.5
    assert steps_in(105, Pace(step=0.5, overhead=5), validating=5) == (TRAINED * 100 - 5) / 0.5


ANSWERS = AnswerCounts(
    written=20,
    sampled=0,
    validation=4,
    tokens=4000,
    row_tokens=6000,
    truncated=0,
    looping=0,
    complete=True,
    draft_vocab_size=None,
    coverage=None,
    max_length=400,
    warnings=[],
)


def learner_of(name, machine, tmp_path, rungs=(), **answers):
    journal = AutoJournal({}, answers=replace(ANSWERS, **answers), rungs=[*rungs])
    settings = SimpleNamespace(target="target", adapter="", device="cuda", seed=0, draft_window="64:4")
    run = run_of(machine=machine, journal=journal, settings=settings, folder=tmp_path, data=tmp_path)
    [candidate] = [candidate for candidate in find_candidates() if candidate.name == name]
    return Learner(run, candidate)


def test_a_rung_is_too_short_to_be_compiled_for(tmp_path):
    eagle3 = Measured("eagle3", step_seconds=0.5)
    machine = Machine(10.0, "bfloat16", start_seconds=5.0, start_tokens=1000, candidates=[eagle3])
    _, config, *_ = learner_of("eagle3", machine, tmp_path).rung_training(20, seconds=60.0)
    train = load_run(config).train
    assert train.compile is False and train.decode_window == "64:4", "scored with the window of the measurement"


def test_a_fresh_head_is_fitted_before_its_first_step_only(tmp_path):
    costs = [RoundCost(1, 1.1)]
    medusa = Measured("medusa", costs=costs, step_seconds=2.0, token_seconds=0.01)
    machine = Machine(10.0, "float32", start_seconds=5.0, start_tokens=1000, candidates=[medusa])
    learner = learner_of("medusa", machine, tmp_path)
    fitting = FITTING * 1500 * 0.01
    continued = 5.0 + learner.validation_seconds
    assert astuple(learner.pace) == pytest.approx((2.0, continued + fitting))
    score = Score("medusa", 10, continued + fitting + 30.0, 1.5, [0.5], 1, 1.2)
    continuing = learner_of("medusa", machine, tmp_path, rungs=[Rung({"medusa": 10}, [score])])
    assert astuple(continuing.pace) == pytest.approx((3.0, continued)), "steps took longer than expected"
    resumed = Score("medusa", 10, continued, 1.5, [0.5], 1, 1.2)  # of the process behind a kill alone
    after = learner_of("medusa", machine, tmp_path, rungs=[Rung({"medusa": 10}, [resumed])])
    assert astuple(after.pace) == pytest.approx((2.0, continued))
    loading = learner_of("medusa", replace(machine, load_seconds=60.0), tmp_path)
    assert loading.pace.overhead == pytest.approx(60.0 + continued + fitting), "each training loads the target"
    few = learner_of("medusa", machine, tmp_path, tokens=40, row_tokens=60)
    assert few.fitting_seconds == pytest.approx(FITTING * 60 * 0.01), "there are no more rows"


@pytest.mark.parametrize(("is_trained_on", "stopped"), [(False, True), (True, True), (True, False)])
def test_the_score_of_the_head_that_is_taken_is_of_its_own_step(is_trained_on, stopped, target, tmp_path):
    """The last validation of a rung, or of a training that was stopped, may be of a later step that is worse."""

    def written(folder, steps, length):
        figures = {"num_rounds": 9, "acceptance_length": length, "acceptance_rate": [length - 1]}
        save_head(untrained("medusa", target), tmp_path / folder, training={"steps": steps, "validation": figures})
        row = {"step": steps + 10, "validation": figures | {"acceptance_length": 1.1, "acceptance_rate": [0.1]}}
        (tmp_path / folder).with_name("metrics.jsonl").write_text(json.dumps(row) + "\n")

    def train(*_, **__):
        written("training/best", 15, 1.8)
        return StepRecord("learn-chosen", "train", "log", 30.0, 143, stopped=stopped)

    written("candidates/medusa/best", 20, 1.6)
    medusa = Measured("medusa", costs=[RoundCost(1, 1.1)], step_seconds=2.0, token_seconds=0.01)
    machine = Machine(10.0, "float32", start_seconds=5.0, start_tokens=1000, candidates=[medusa])
    run = learner_of("medusa", machine, tmp_path).run
    late = Score("medusa", 30, 1.0, 1.1, [0.1], 1, 1.0)  # of the rung's last step
    run.journal.chosen = Chosen("medusa", LEAST_STEPS * is_trained_on, late)
    said = list[str]()
    run.settings.engine, run.left_until, run.say = EngineSetting(), lambda _: 600.0, said.append
    found = learn(run, run_of(gives_states=False, train=train, close=lambda: None)).score
    assert found is not None
    assert (found.steps, found.acceptance_length) == ((15, 1.8) if is_trained_on else (20, 1.6))
    assert [line.partition("; ")[2] for line in said] == ["its best checkpoint is taken"] * (not stopped)


@pytest.mark.parametrize("minutes", [20, 120])
def test_what_is_kept_for_the_end_lasts_for_all_held_out_prompts(minutes):
    machine = Machine(9.0, "float32", start_seconds=5.0, start_tokens=1000, candidates=[])
    told = {"engine": EngineSetting(), "batch_size": 1, "max_new_tokens": 128, "adapter": ""}
    settings = SimpleNamespace(budget=60.0 * minutes, **told)
    journal = SimpleNamespace(split=Split(32, 900), trained=Trained("HEAD", None), serving=None)
    run = run_of(machine=machine, settings=settings, journal=journal)
    reserve = settings.budget - end_of_learning(run)
    run.clock = SimpleNamespace(left=reserve)
    assert plan_evaluation(run).num_prompts == 32
    assert reserve <= EVALUATION * settings.budget


def test_larger_budgets_score_candidates_by_more_rows():
    assert [num_validation_rows(60.0 * minutes) for minutes in (2, 20, 60, 120, 600)] == [8, 8, 24, 32, 32]


def test_the_better_half_goes_on_in_order_of_its_scores():
    assert survivors({"a": 1.0, "b": 1.4, "c": 1.2}) == ["b", "c"]
    assert survivors({"a": 1.0, "b": 1.0}) == ["a"]


def test_what_wins_more_for_its_cost_comes_first():
    measured = [
        Measured(name, usual_speedup=speedup, step_seconds=seconds)
        for name, speedup, seconds in (("dear", 2.0, 4.0), ("cheap", 1.8, 1.0), ("poor", 1.1, 1.0))
    ]
    assert by_gain_per_cost(measured) == ["cheap", "dear", "poor"]


def test_without_time_for_all_the_one_that_usually_saves_most_is_trained():
    costs = {"medusa": 1.2, "eagle": 1.5, "eagle3": 1.5, "block": 1.3, "mtp": 1.4, "draft_lm": 3.3, "assistant": 1.4}
    measured = [
        Measured(c.name, usual_speedup=predict_length([c.usual_acceptance], rounds)[1], step_seconds=10.0)
        for c in find_candidates()
        for rounds in [[RoundCost(1, costs[c.head.type] ** 0.3), RoundCost(4, costs[c.head.type])]]
    ]
    ranked, paces = by_gain_per_cost(measured), {name: Pace(10.0, 90.0) for name in costs}
    assert starting_candidates(ranked, paces, 340.0) == ["eagle3"]


def test_every_family_is_a_candidate_with_its_own_config_where_it_has_no_options(monkeypatch):
    assert {candidate.head.type for candidate in find_candidates()} == set(HEADS)
    monkeypatch.setattr(candidates, "shipped", lambda pattern: [])
    found = {candidate.name: candidate for candidate in find_candidates()}
    assert set(found) == set(HEADS) and not any(candidate.cuts_vocabulary for candidate in found.values())


def test_a_vocabulary_is_cut_only_where_the_engine_drafts_so():
    ours, vllm = (
        {c.head.type for c in find_candidates(engine) if c.cuts_vocabulary} for engine in ("headstart", "vllm")
    )
    assert {"eagle", "medusa", "mtp"} <= ours and vllm == {"eagle3", "block"}
    offered = {candidate.name: candidate.with_vocabulary(512).head.draft_vocab_size for candidate in find_candidates()}
    assert set(offered.values()) == {512, None}


@pytest.mark.parametrize(("device", "markov_rank"), [("cpu", 0), ("cuda", 64)])
def test_vllm_has_dspark_on_gpus_only_and_dflash_instead_without_one(device, markov_rank, monkeypatch):
    monkeypatch.setattr(candidates, "default_device", lambda: device)
    [block] = [candidate.head for candidate in find_candidates("vllm") if candidate.name == "block"]
    assert isinstance(block, BlockConfig)
    assert (block.markov_rank, block.sample_from_anchor) == (markov_rank, markov_rank > 0)


def test_engines_load_some_families(saved_target):
    served = {candidate.name for candidate in find_candidates() if is_served(candidate, "sglang", saved_target)}
    assert served and served < {candidate.name for candidate in find_candidates()}


@pytest.mark.parametrize(
    ("kind", "tensor", "is_loaded"),
    [
        ("qwen3_5", "lm_head", True),
        ("qwen2", "lm_head", True),
        ("llama", "lm_head", False),
        ("internvl", "lm_head", False),
        ("llama", "model.layers.9.eh_proj", True),  # it has modules of its own
    ],
)
def test_modules_are_a_candidate_where_engines_load_them_with_the_target(kind, tensor, is_loaded, tmp_path):
    config = (
        {"model_type": kind, "text_config": {"model_type": "qwen2"}} if kind == "internvl" else {"model_type": kind}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({f"{tensor}.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    [module] = [candidate for candidate in find_candidates("vllm") if candidate.head.type == "mtp"]
    assert is_served(module, "vllm", str(tmp_path)) == is_loaded and is_served(module, "headstart", str(tmp_path))


def test_loops_and_cut_answers_are_told():
    assert warnings_of(10, truncated=2, looping=2) == []
    assert [len(warnings_of(10, truncated=3, looping=0)), len(warnings_of(10, truncated=3, looping=3))] == [1, 2]


def test_what_is_held_out_is_never_asked_in_other_letters_or_behind_a_greeting_either(tmp_path):
    """A head would learn from its answer, which is nearly the same; look-ups leave that out too."""
    path = tmp_path / "prompts.jsonl"
    texts = [form.format(i) for i in range(15) for form in ("Question {}", "question  {}\n", "QUESTION {}")]
    greeted = [[{"role": "assistant", "content": "Hi!"}, {"role": "user", "content": text}] for text in texts]
    assert {first_question({"messages": asked}) for asked in greeted} == {f"question {i}" for i in range(15)}
    rows = [{"messages": asked} for asked in greeted] + [{"prompt": text, "category": "c"} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert split_prompts(str(path), tmp_path / "data", seed=0) == (5, 10)
    rows = read_jsonl(tmp_path / "data" / "held_out.jsonl")
    held_out = {row["messages"][0]["content"].split()[1] for row in rows}
    asked = {row["prompt"].split()[1] for row in read_jsonl(tmp_path / "data" / "prompts.jsonl")}
    assert len(held_out) == 5 and len(asked) == 10 and not held_out & asked
    assert all(row["category"] == "c" for row in rows)
    first = (tmp_path / "data" / "held_out.jsonl").read_text()
    split_prompts(str(path), tmp_path / "again", seed=0)
    assert (tmp_path / "again" / "held_out.jsonl").read_text() == first


def test_of_a_servers_log_the_questions_are_taken_with_what_the_template_was_told(tmp_path):
    path, told = tmp_path / "log.jsonl", {"chat_template_kwargs": {"enable_thinking": False}}
    asked = [{"messages": [{"role": "user", "content": f"Question {i}"}], **told} for i in range(12)]
    path.write_text("".join(json.dumps({"request": one, "response": {"choices": []}}) + "\n" for one in asked))
    assert split_prompts(str(path), tmp_path / "data", seed=0) == (4, 8)
    rows = read_jsonl(tmp_path / "data" / "held_out.jsonl")
    assert all(row in asked for row in rows) and len(rows) == 4
    again = iter_rows(str(tmp_path / "data" / "prompts.jsonl"))  # as `headstart data regenerate` reads them
    [(one, *_), *others] = [[*exchanges(row, SamplingConfig(), turns="all")] for row in again]
    assert one.variables == told["chat_template_kwargs"] and one.script[1:] == [None] and len(others) == 7


def test_too_few_prompts_are_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "one"}\n{"prompt": "two"}\n')
    with pytest.raises(BadInput, match="2 different prompts, at least 12 are needed"):
        split_prompts(str(path), tmp_path / "data", seed=0)


@pytest.mark.parametrize(
    ("number", "used", "again"), [(1, 100.0, True), (2, 100.0, False), (1, 295.0, False), (1, 301.0, False)]
)
def test_prompts_are_answered_again_where_heads_would_read_the_answers_more_than_six_times(number, used, again):
    """In 1,000 s, at 8 rows a second, 1,000 answers are read eight times, 2,000 four times."""
    machine = SimpleNamespace(able=[Measured("medusa", step_seconds=1.0)], begin_seconds=5.0)
    journal, clock = SimpleNamespace(split=Split(32, 1000), answers_until=300.0), SimpleNamespace(left=1000.0)
    run = run_of(machine=machine, journal=journal, clock=clock, left_until=lambda second: second - used)
    assert asks_again(run, number) == again
