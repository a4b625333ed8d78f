"""What would make a server's figures better than they are, or those of other work, is left out of them or said."""

from dataclasses import replace
from typing import Any, cast

import pytest
from headstart.engines.servers.registry import SERVER_ENGINES
from headstart.eval.figures.repetition import Repetition, WithoutLoops
from headstart.eval.proof.own_forward import own_logits, rounding
from headstart.eval.report.served_page import ServedReport, cautions, render_served, sentences
from headstart.eval.served import text_check
from headstart.eval.served.blocks import ServedConfig, ServedDrafts, ServedSide, key_of, result_of
from headstart.eval.served.figures import Slo, side_figures
from headstart.eval.served.load import Load
from headstart.eval.served.questions import PLAIN, Question
from headstart.eval.served.served_result import deployable, lower_end_among
from headstart.eval.served.text_check import PromptCheck
from headstart.targets.target import Target
from scipy.special import stdtrit
from served_blocks import ONE, QUESTIONS, SIDE, measured, served
from serving_stand_in import StandIn


@pytest.mark.parametrize(("others", "num_other"), [((True, False), 0), ((False, True), 6), ((True, True), 6)])
def test_prompts_that_the_two_servers_read_otherwise_are_doubted(others, num_other, tmp_path):
    """Another chat template or another default of its variables: the two do other work."""
    plain, drafting = (StandIn(other_template=other) for other in others)
    drafting.accepted = [1]
    [result] = measured(plain, drafting, tmp_path)
    assert result.prompts.other == num_other
    doubted = "6 prompts (p.jsonl:0 first) are other ids in the two servers"
    assert [doubt.startswith(doubted) for doubt in result.doubts] == [True] * (others[0] != others[1])


@pytest.mark.timed
@pytest.mark.parametrize("ids", [True, False])
def test_a_gain_is_measured_without_the_texts_that_loop_too(ids, tmp_path):
    """Two of six questions are answered in a loop; drafts are wrong on the others here, so only loops are faster."""
    plain, drafting = (StandIn(ids=ids, looping=(5, 6), step=0.003) for _ in range(2))
    drafting.fault = lambda number, body: setattr(drafting, "accepted", [7] if body["prompt"][-1] in (5, 6) else [0])
    engine, loads = "vllm" if ids else "openai", [ONE, Load(rate=30.0)]
    for result in measured(plain, drafting, tmp_path, loads=loads, engine=engine):
        assert result.repetition.num_looping == 2 and len(result.repetition.texts) == 6
        left = result.repetition.without_loops
        assert left is not None and left.num_timed == (4 if result.load.is_single else 2)
        if result.load.is_single:
            assert left.speedup is not None and result.speedup > 1.1 * left.speedup
        assert any("2 of 6 texts repeat more than half of their 4-grams" in line for line in cautions([result]))


def test_a_gain_that_rests_on_loops_is_none():
    result = served("head:H at K 4", 1, 1.5)
    for low, rests in ((0.9, True), (None, True), (1.1, False)):
        left = replace(result, repetition=Repetition([], WithoutLoops(4, None, 1.2, (low, 1.5))))
        assert (left.rests_on_loops(1), deployable([left])) == (rests, [] if rests else [left])
        assert ("texts that loop: do not deploy" in sentences([left])[0]) == rests
    for low, is_proved in ((1.01, False), (1.19, True)):  # as the best of three
        left = replace(result, repetition=Repetition([], WithoutLoops(4, None, 1.2, (low, 1.5))))
        three = [left, *(served("head:H at K 4", size, 0.9) for size in (8, 16))]
        assert deployable(three) == [left] * is_proved
        assert ("1 at a time: 1.70 times as fast [1.50, 1.90];" in sentences(three)[0]) == is_proved


@pytest.mark.parametrize(
    ("other", "doubt"),
    [
        ({"style": "sglang"}, "the servers have other engines: sglang and vllm"),
        ({"version": "0.31"}, "the servers have other versions: 0.31 and 0.32"),
        ({"cards": [{"id": "M", "max_model_len": 512}]}, "the servers have other longest contexts: 512 and 1024"),
        ({}, ""),
    ],
)
def test_servers_of_other_engines_versions_or_lengths_are_doubted(other, doubt, tmp_path):
    same: dict[str, Any] = {"version": "0.32", "cards": [{"id": "M", "max_model_len": 1024}]}
    [result] = measured(StandIn(**same | other), StandIn(**same, accepted=[1]), tmp_path)
    assert result.doubts == [doubt] * bool(doubt)


@pytest.mark.parametrize(
    ("engine", "drafter", "caution"),
    [
        ("vllm", "suffix at K 4", "its look-ups keep earlier answers"),
        ("vllm", "ngram at K 4", ""),
        ("sglang", "ngram at K 4", "its look-ups keep earlier answers"),
        ("vllm", "its own drafts", "if it looks up earlier answers, these figures flatter"),
        ("vllm", "head:H at K 4", ""),
    ],
)
def test_look_ups_that_have_answered_these_prompts_before_are_said(engine, drafter, caution):
    """vLLM's suffix decoding too, and whatever a running server drafts with where nothing names it."""
    result = replace(served(drafter, 1, 1.5), engine=engine)
    assert result.is_flattered == caution.startswith("its look-ups")
    assert [line for line in cautions([result]) if "answers" in line and (not caution or caution not in line)] == []
    assert any(caution in line for line in cautions([result]))


def test_sampled_answers_are_drawn_anew_in_every_block(tmp_path):
    """With one seed all blocks would hold the same texts, and vLLM draws for a question with a seed by itself."""
    plain = StandIn()
    measured(plain, StandIn(accepted=[1]), tmp_path, temperature=0.7, seed=5)
    assert plain.bodies and not any("seed" in body for body in plain.bodies)
    drafts = ServedDrafts("head", 4, (ServedSide("a"), ServedSide("b")))
    configs = [ServedConfig([ONE], seed=seed) for seed in (5, 6)]
    keys = {key_of(SERVER_ENGINES["vllm"], drafts, QUESTIONS, config, ONE) for config in configs}
    assert len(keys) == 2, "the seed is that of the arrivals"


def test_of_several_results_the_best_is_shown_with_what_choosing_it_costs():
    """One of six intervals lies above 1 by luck now and then: no page is green for it."""
    lucky = [served("head:H at K 4", 2**i, low) for i, low in enumerate((1.01, 0.8, 0.8, 0.8, 0.8, 0.8))]
    assert sentences(lucky)[0].startswith("vLLM with head H, 4 drafts: 1 at a time: 1.21 times as fast [1.01, 1.41], ")
    assert "so no difference is proved among 6 results" in sentences(lucky)[0]
    for results, is_green in ((lucky, False), (lucky[:1], True)):
        page = render_served(ServedReport.of("T", results), "headstart eval")
        assert ('class="recommendation deploy"' in page) == is_green
    two = cautions([served("head:H at K 4", 1, 1.5), served("head:H at K 4", 8, 0.8)])
    assert any("1 at a time: it is the best of 2 results: with that allowed for" in line for line in two)


@pytest.mark.parametrize(("words", "num_wrong"), [(["vllm"], 0), (["vllm", "--dtype", "float32"], 1)])
def test_texts_of_a_server_in_half_precision_are_judged_by_its_rounding(words, num_wrong, saved_target):
    """Where the target is held in fp32 here, a tie in 16 bits is none: the second best token of a near tie is proved
    unless both servers were told fp32. vLLM takes fp16 for a checkpoint in fp32 by itself."""
    target = Target.load(saved_target)
    for number in range(600):
        logits = own_logits(target, prompt := [1, number % 60, number // 60], [0])[0]
        best, second = logits.topk(2).indices.tolist()
        gap, full = float(logits[best] - logits[second]), float(rounding(target, logits[None]))
        if 2 * full < gap < 0.5 * float(rounding(target, logits[None], is_narrow=True)):
            break
    else:
        pytest.fail("no near tie")
    plain, drafted = (
        {"answers": [[0, 0.0, 0.1, 0.2, 1]], "tokens": 1.0, "full": 1.0, "texts": {"0": [[[token], "x"]]},
         "prompts": {"0": prompt}, "counters": None, "failures": [], "num_repeated": 0, "late": [], "lags": [],
         "num_lags": 0, "cpu": 0.0, "arriving": 0.0, "model": "M"}
        for token in (best, second)
    )  # fmt: skip
    drafts = ServedDrafts("head", 4, (ServedSide(None, words), ServedSide(None, words)))
    how = SERVER_ENGINES["vllm"], drafts, [Question("p:0", PLAIN, {"prompt": prompt}, prompt)], ServedConfig([ONE])
    result = result_of(*how, ONE, [plain], [drafted], load_target=lambda: target)
    assert result.texts is not None and (result.texts.num_wrong, result.texts.not_proved) == (num_wrong, 0)


def test_of_few_texts_none_is_called_wrong_where_one_without_drafts_is_not_the_targets_own(monkeypatch):
    """Of two that part, one shows that the server computes otherwise."""
    own = lambda target, prompt, new, **how: 1 if new in ([4, 7], [4, 6]) else None  # noqa: E731
    monkeypatch.setattr(text_check, "first_not_own", own)
    plain = {"texts": {"0": [[[4, 5], "x"]], "1": [[[4, 7], "x"]]}}
    drafted = {"texts": {"0": [[[4, 6], "y"]], "1": [[[4, 8], "y"]]}}
    found = text_check.check_texts(QUESTIONS, [plain], [drafted], {0: [9], 1: [9]}, lambda: cast(Any, "a target"))
    assert (found.num_wrong, found.not_proved, found.is_other) == (0, 2, True)


SERVER = {"engine": "vllm", "version": None, "max_model_len": None}


def arrived(seconds, *, queue=0.0, num=24) -> dict[str, Any]:
    """A block of arrivals, one each 0.1 s, whose answers take so long, and by so much longer from one to the next."""
    answers = [[number, number / 10, 0.01, seconds + number * queue, 10] for number in range(num)]
    record = {"answers": answers, "tokens": 10.0 * num, "full": num / 10, "arriving": num / 10, "texts": {}}
    record |= {"prompts": {}, "counters": None, "failures": [], "num_repeated": 0, "late": [], "lags": []}
    return record | {"num_lags": 0, "cpu": 0.0, "model": "M", "started": None, "server": SERVER}


@pytest.mark.parametrize(("queue", "late"), [((0, 0), ""), ((0.2, 0), "baseline"), ((0.2, 0.1), "baseline and with")])
def test_at_a_rate_that_a_side_cannot_keep_there_is_no_speedup(queue, late):
    """Twice the arrivals would make it twice as large: it is the length of a queue."""
    plain, drafted = ([arrived(seconds, queue=by)] * 4 for seconds, by in zip((1.0, 0.5), queue, strict=True))
    drafts, load = ServedDrafts("head", 4, (ServedSide("a"), ServedSide("b"))), Load(rate=10.0)
    how = SERVER_ENGINES["vllm"], drafts, [Question(f"p:{i}", PLAIN, {}, None) for i in range(24)], ServedConfig([load])
    result = result_of(*how, load, plain, drafted, load_target=lambda: None)
    assert result.speedup == (None if late else 2.0)
    assert (f"the server cannot keep this rate ({late}" in sentences([result])[0]) == bool(late)


@pytest.mark.parametrize(
    ("order", "num_questions", "freedom"), [("ABBA" * 2, 50, 3), ("ABBA", 50, 49), ("AB" * 9, 5, 4)]
)
def test_the_best_of_several_is_widened_by_the_fewest_that_its_interval_is_over(order, num_questions, freedom):
    """One at a time the interval holds that over pairs of blocks, which are fewer than questions."""
    result = replace(served("head:H at K 4", 1, 1.5), order=order, num_questions=num_questions)
    wider = stdtrit(freedom, 1 - 0.025 / 6) / stdtrit(freedom, 0.975)
    assert lower_end_among(result, 6) == pytest.approx(1.7 * (1.5 / 1.7) ** wider)


@pytest.mark.parametrize(
    ("load", "p99", "goodput"), [(Load(2), 200, 4 / 2), (ONE, 900, 4 / 2 / 2), (Load(rate=2.0), 900, 2)]
)
def test_questions_that_all_places_ask_at_the_start_are_in_no_wait(load, p99, goodput):
    """Four of two places, the first two of which share a prefill; all of one place, or of arrivals, count."""
    waits = [0.9, 0.9, 0.2, 0.2]
    answers = [[number, number // 2, wait, 1.0, 10] for number, wait in enumerate(waits)]
    record = arrived(1.0) | {"answers": answers, "full": 2.0, "arriving": 1.0}
    side = side_figures([record], load, Slo(ttft=0.5))
    assert (side.ttft_ms.p99, side.goodput) == (p99, goodput)


def test_more_arrivals_than_a_server_has_slots_for_and_prompts_without_ids_are_said():
    side = replace(SIDE, most_in_flight=20)
    told = {"commands": ["llama-server -np 16 -c 4096"] * 2, "prompts": PromptCheck(unknown=12)}
    result = replace(served("head:H at K 4", 1, 1.5), load=Load(rate=2.0), baseline=side, **told)
    page = cautions([result])
    assert any("20 questions were in flight, of which 16 have a slot" in line for line in page)
    assert any("12 prompts have no ids here or there" in line for line in page)
    assert not any("a slot" in line for line in cautions([replace(result, baseline=SIDE)]))


def test_a_text_is_held_against_the_one_of_the_same_ids():
    """Of two texts without drafts; a token may be written in other characters in a stream."""
    plain = {"texts": {"0": [[[4, 5], "x"], [[4, 6], "y"]]}}
    found = text_check.check_texts(QUESTIONS, [plain], [{"texts": {"0": [[[4, 6], "y "]]}}], {}, lambda: None)
    assert (found.report.identical, found.by_ids, found.not_proved) == (1, 1, 0)
