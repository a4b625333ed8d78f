"""What a server does with drafts is measured as it is, or it is said in one line why not. Against stand-ins."""

import asyncio
import os
import random
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pytest
from headstart.base.errors import BadInput
from headstart.engines.servers.address import Address
from headstart.engines.servers.registry import SERVER_ENGINES, engine_at
from headstart.eval.measurement.resume import BatchStore
from headstart.eval.report.served_page import cautions, sentences
from headstart.eval.served import text_check
from headstart.eval.served.blocks import ServedConfig, ServedDrafts, ServedSide, key_of, measure_in_servers
from headstart.eval.served.figures import Slo, record_of, side_figures, speedup
from headstart.eval.served.load import Asker, Load, run_block
from headstart.eval.served.questions import CHAT, PLAIN, Question, origins_of
from headstart.eval.served.served_result import DRAFTS_TOO
from served_blocks import ONE, QUESTIONS, measured
from serving_stand_in import StandIn, listening


@pytest.mark.timed
def test_figures_are_those_that_were_planted(tmp_path):
    """A forward takes 8 ms; with drafts it gives 3 tokens: 12 tokens in 5 forwards, the prefill among them."""
    plain, drafting = StandIn(step=0.008), StandIn(step=0.008, accepted=[2])
    [one, four] = measured(plain, drafting, tmp_path, loads=[ONE, Load(4)], slo=Slo(ttft=1.0, tpot=1.0))
    assert one.acceptance is not None and one.acceptance.acceptance_rate == [1.0, pytest.approx(0.75), 0.0, None]
    assert one.acceptance.acceptance_length == pytest.approx(1 + 7 / 4)
    assert one.speedup == pytest.approx(12 / 5, rel=0.4) and one.speedup_ci95[0] > 1 and one.pays
    assert one.drafted.ttft_ms.p50 == pytest.approx(8, abs=8) and one.drafted.tpot_ms.p50 == pytest.approx(
        32 / 11, rel=1.0
    )
    assert one.models == ["M", "M"] and (one.drafted.most_in_flight, four.drafted.most_in_flight) == (1, 4)
    assert (one.order, one.prompts.same, one.prompts.other, one.texts.report.identical) == ("ABBA", 6, 0, 6)
    assert four.baseline.num_answers == 2 * 18 and plain.most_at_once == drafting.most_at_once == 4
    assert four.baseline.tokens_per_second == pytest.approx(4 / 0.009, rel=0.5)
    assert four.baseline.user_tokens_per_second == pytest.approx(four.baseline.tokens_per_second / 4, rel=0.3)
    assert four.drafted.goodput and four.drafted.client_late_ms.p50 is not None


def test_both_sides_get_the_same_arrivals_and_no_question_profits_from_a_cache(tmp_path):
    """Of the other side, of a repeat, or of an earlier measurement."""
    plain, drafting = StandIn(), StandIn(accepted=[1])
    for folder in "ab":
        [result] = measured(plain, drafting, tmp_path / folder, loads=[Load(rate=400.0)])
    both = ([body["cache_salt"] for body in side.bodies] for side in (plain, drafting))
    first, second = (sorted(salt for salt in salts if not salt.startswith("warm")) for salts in both)
    assert first == second and len(set(first)) == len(first) == 24
    assert result.load.name == "400 a second" and result.speedup


class Balanced(StandIn):
    """Two processes behind one address: reads of /metrics meet them in turn."""

    def metrics(self):
        self.started = 3.0 - (self.started or 1.0)
        self.at[0] += 1000
        return super().metrics()


def test_counters_of_several_processes_give_no_acceptance(tmp_path):
    """As behind a load balancer: their differences are of nothing."""
    [result] = measured(StandIn(), Balanced(accepted=[2]), tmp_path)
    assert result.speedup and result.acceptance is None


@pytest.mark.timed
def test_tokens_are_counted_by_usage_where_there_are_no_ids(tmp_path):
    """A part of several tokens is not one token."""
    how = {"ids": False, "step": 0.003}
    [result] = measured(StandIn(**how), StandIn(**how, accepted=[2]), tmp_path, engine="openai")
    assert result.acceptance is None and result.prompts.unknown == 6 and result.doubts == []
    assert (result.texts.by_ids, result.texts.report.identical) == (0, 6)
    assert result.drafted.tokens_per_second > 1.5 * result.baseline.tokens_per_second


@pytest.mark.parametrize(("engine", "ids"), [("sglang", True), ("llama-server", False)])
def test_acceptance_is_what_a_server_says_itself(engine, ids, tmp_path):
    """SGLang in counters, llama-server in its answers: 12 tokens in 5 forwards, the first of which is the prefill."""
    plain, drafting = StandIn(style=engine, ids=ids), StandIn(style=engine, ids=ids, accepted=[2])
    for result in measured(plain, drafting, tmp_path, engine=engine, loads=[ONE, Load(4)]):
        assert result.acceptance is not None and result.acceptance.acceptance_length == pytest.approx(11 / 4)
        assert result.acceptance.acceptance_rate == [] and result.texts.report.identical == 6
        assert not result.is_flattered
        assert replace(result, drafter="ngram at K 4").is_flattered, "look-ups know the answers of earlier blocks"


def test_prompts_of_another_template_and_other_texts_are_said(tmp_path):
    [result] = measured(StandIn(), StandIn(accepted=[1], other_template=True, other_text=[-1]), tmp_path)
    assert (result.prompts.other, result.prompts.first_other) == (6, "p.jsonl:0")
    assert (result.texts.report.unexplained, result.texts.not_proved) == (6, 6), "no target to hold them against"


def test_an_answer_that_goes_wrong_late_is_seen(tmp_path):
    """One that is wrong in its last half block alone: 18 questions of each block, warmed up by 4."""
    drafting = StandIn(accepted=[1])
    drafting.fault = lambda number, body: drafting.other_text.add(-1) if number > 4 + 18 + 9 else None
    [result] = measured(StandIn(), drafting, tmp_path, loads=[Load(4)])
    assert result.texts.report.identical == 6 and result.texts.report.unexplained == 6


def test_a_text_that_differs_is_proved_behind_the_prompt_that_the_server_read(monkeypatch):
    """Here and there the template prints another day."""
    seen = list[Any]()
    monkeypatch.setattr(text_check, "first_not_own", lambda target, prompt, *_, **how: seen.append(prompt))
    plain, drafted = ({"texts": {"0": [[ids, "x"]]}} for ids in ([4, 5], [4, 6]))
    for prompts, read in (({0: [9, 5]}, [9, 5]), ({0: None}, [1, 5])):
        found = text_check.check_texts(QUESTIONS, [plain], [drafted], prompts, lambda: cast(Any, "a target"))
        assert (seen.pop(), found.num_wrong, found.report.proved) == (read, 0, 1)


@pytest.mark.parametrize("is_other", [False, True])
def test_where_the_server_computes_otherwise_no_text_is_called_wrong(is_other, monkeypatch):
    """Packed weights, a schema: then the texts without drafts are not the target's own either."""
    own = lambda target, prompt, new, **how: 1 if is_other or new == [4, 6] else None  # noqa: E731
    monkeypatch.setattr(text_check, "first_not_own", own)
    plain, drafted = ({"texts": {str(i): [[ids, "x"]] for i in range(4)}} for ids in ([4, 5], [4, 6]))
    prompts = dict.fromkeys(range(4), [9])
    found = text_check.check_texts(QUESTIONS, [plain], [drafted], prompts, lambda: cast(Any, "a target"))
    assert (found.num_wrong, found.not_proved, found.is_other) == ((0, 4, True) if is_other else (4, 0, False))


def test_servers_that_differ_by_more_than_drafts_are_doubted(tmp_path):
    [result] = measured(StandIn(accepted=[1]), StandIn(model="small"), tmp_path)
    assert [line.split(":")[0] for line in result.doubts] == [
        f"{DRAFTS_TOO}, so two ways of drafting are compared", "the servers name their models differently",
    ]  # fmt: skip
    assert "beside a server that drafts too" in sentences([result])[0]
    page = cautions([result])
    assert any("exchanged?" in line for line in page) and any("M and small" in line for line in page)


def test_a_running_engine_is_known_by_what_it_says():
    for style, counts in (("vllm", True), ("sglang", True), ("llama-server", False), ("openai", False)):
        stand_in = StandIn(style=style, accepted=[1], counters=counts)
        with listening(stand_in) as url:
            assert engine_at(Address.of(url, where="--server")).name == style


def test_what_a_server_can_do_is_passed_on(tmp_path):
    asked = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function"}],
        "response_format": {"type": "json_object"},
    }
    plain = StandIn()
    measured(plain, StandIn(accepted=[1]), tmp_path, questions=[Question("p:0", CHAT, asked, None)])
    assert all(plain.bodies[1][key] == value for key, value in asked.items())


# ---------------------------------------------------------------------------------------------------------------------
# Faults


def once(reply, *, at=3):
    return lambda number, body: reply if number == at else None


FAILING = {
    "busy": (429, '{"error": "busy"}', ["Retry-After: 0"]),
    "broken": (500, '{"error": "out of luck"}'),
    "dropped": "drop",
    "hanging": "hang",
    "aborted": (200, 'data: {"choices": [{"text": "3 ", "finish_reason": "abort"}]}\n\ndata: [DONE]\n\n'),
}


@pytest.mark.parametrize("reply", FAILING.values(), ids=FAILING)
def test_a_question_that_fails_once_is_asked_again_and_counted(reply, tmp_path):
    patience = 0.5 if reply == "hang" else 60.0
    [result] = measured(StandIn(fault=once(reply)), StandIn(accepted=[1]), tmp_path, patience=patience)
    assert (result.baseline.num_repeated, result.baseline.num_failed, result.drafted.num_repeated) == (1, 0, 0)
    waited = {"hanging": 500, "broken": 250, "aborted": 250}.get(
        next(name for name, one in FAILING.items() if one == reply), 0
    )
    assert result.baseline.ttft_ms.p99 > waited, "whoever asked has waited so long"
    assert any("1 questions had to be repeated" in line for line in cautions([result]))


def test_a_question_that_fails_always_is_named_and_left_out_on_both_sides(tmp_path):
    bad = lambda number, body: (400, '{"error": "no 7 here"}') if body["prompt"] == [1, 7] else None  # noqa: E731
    [result] = measured(StandIn(fault=bad), StandIn(accepted=[1]), tmp_path)
    [failed] = result.failed
    assert (
        (failed.row, result.baseline.num_failed) == ("p.jsonl:2", 2) and "no 7 here" in failed.reason and result.speedup
    )


def test_a_key_that_a_server_refuses_is_left_out(tmp_path):
    refuses = lambda number, body: (400, "return_token_ids: extra field") if "return_token_ids" in body else None  # noqa: E731
    [result] = measured(StandIn(fault=refuses), StandIn(accepted=[1]), tmp_path)
    assert result.baseline.num_failed == result.baseline.num_repeated == 0 and result.texts.by_ids == 0


@pytest.mark.parametrize(
    ("drafting", "engine", "problem"),
    [
        (StandIn(key="s3cret"), "vllm", "401: it refuses the key in HEADSTART_API_KEY, none is set"),
        (StandIn(fault=lambda *_: (404, "no such model")), "vllm", "404: no such model"),
        (StandIn(fault=lambda *_: (400, "no")), "vllm", "400: no"),
        # a gateway without usage: its parts hold several tokens each, more of them with drafts
        (StandIn(ids=False, usage=False), "openai", "tells neither ids nor usage with its answers"),
    ],
    ids=["wrong key", "not found", "always", "not counted"],
)
def test_a_server_that_cannot_answer_is_one_line(drafting, engine, problem, tmp_path):
    with pytest.raises(BadInput, match=problem):
        measured(StandIn(), drafting, tmp_path, engine=engine)


def test_another_model_s_name_is_one_line(tmp_path):
    with pytest.raises(BadInput, match="serves other, not mine"):
        measured(StandIn(model="other"), StandIn(), tmp_path, name="mine")


def test_the_key_is_sent_and_never_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_API_KEY", "s3cret")
    [result] = measured(StandIn(key="s3cret"), StandIn(key="s3cret", accepted=[1]), tmp_path)
    assert result.speedup
    says = lambda number, body: (400, "you sent s3cret") if number > 1 else None  # noqa: E731
    with pytest.raises(BadInput, match=r"you sent \*\*\*") as told:
        measured(StandIn(key="s3cret", fault=says), StandIn(key="s3cret"), tmp_path / "b")
    assert "s3cret" not in str(told.value)
    for path in tmp_path.rglob("*.jsonl"):
        assert "s3cret" not in path.read_text()


def test_a_server_that_ends_keeps_what_was_measured_and_the_same_command_goes_on(tmp_path):
    plain, drafting = StandIn(), StandIn(accepted=[2])
    config = ServedConfig([ONE], max_new_tokens=12, num_repeats=2)
    with listening(plain) as first, listening(drafting) as second, BatchStore(tmp_path) as store:
        drafts = ServedDrafts("head", 4, (ServedSide(first), ServedSide(second)))
        drafting.fault = lambda number, body: drafting.stop() or "drop" if number == 4 else None  # in its first block
        with pytest.raises(BadInput, match="cannot be reached"):
            measure_in_servers(SERVER_ENGINES["vllm"], drafts, QUESTIONS, config, store=store)
        assert len(store) == 1
    port = int(second.rpartition(":")[2])
    before = len(plain.bodies)
    with (
        listening(plain, port=int(first.rpartition(":")[2])),
        listening(StandIn(accepted=[2]), port=port),
        BatchStore(tmp_path) as store,
    ):
        [result] = measure_in_servers(SERVER_ENGINES["vllm"], drafts, QUESTIONS, config, store=store)
    assert result.speedup and len(plain.bodies) - before == 7, "one warm-up, and the block that was missing"


def test_a_running_server_that_was_started_anew_is_doubted(tmp_path):
    """It may draft with another head, or another K."""
    config, port = ServedConfig([ONE], max_new_tokens=12, num_repeats=2), 0
    with listening(StandIn(started=1.0)) as first, BatchStore(tmp_path) as store:
        for started, dies in ((2.0, True), (3.0, False)):
            drafting = StandIn(accepted=[2], started=started)
            drafting.fault = lambda number, body, dies=dies: (404, "gone") if dies and number == 12 else None
            with listening(drafting, port=port) as second:
                port, sides = int(second.rpartition(":")[2]), (ServedSide(first), ServedSide(second))
                with suppress(BadInput):
                    results = measure_in_servers(
                        SERVER_ENGINES["vllm"], ServedDrafts("head", 4, sides), QUESTIONS, config, store=store
                    )
    assert [line.split(" was started anew")[0] for line in results[0].doubts] == [second]


@pytest.mark.timed
@pytest.mark.parametrize("at_once", [True, False])
def test_servers_of_our_own_are_started_and_ended(at_once, python, tmp_path):
    engine = SERVER_ENGINES["vllm"]
    plain = engine.command(python, "M", [], ["--step", "0.002"])
    drafting = [*plain, "--speculative-config", "{}"]
    drafts = ServedDrafts("head", 4, (ServedSide(None, plain), ServedSide(None, drafting)))
    config = ServedConfig([ONE, Load(2)], max_new_tokens=12, num_repeats=2, at_once=at_once)
    with BatchStore(tmp_path / "out") as store:
        results = measure_in_servers(engine, drafts, QUESTIONS, config, store=store)
    assert all(result.speedup > 1 and result.acceptance for result in results)
    keys = {key_of(engine, drafts, QUESTIONS, config, ONE)}
    for day in (1, 2):
        os.utime(python, (day, day))
        keys.add(key_of(engine, drafts, QUESTIONS, config, ONE))
    assert len(keys) == 3, "what a file that a command names held before it was changed is measured anew"
    broken = ServedSide(None, ["sh", "-c", "echo 'ValueError: no such model'; exit 1", "--"])
    with (
        BatchStore(tmp_path / "b") as store,
        pytest.raises(BadInput, match="vLLM ended with code 1: ValueError: no such model"),
    ):
        measure_in_servers(engine, ServedDrafts("head", 4, (broken, broken)), QUESTIONS, config, store=store)


# ---------------------------------------------------------------------------------------------------------------------
# Intervals and the client


def planted(source, seconds, num=4):
    """Blocks whose speeds differ by 5 % at random."""
    return [{"full": seconds * source.gauss(1, 0.05), "tokens": 100.0} for _ in range(num)]


def test_the_baseline_against_itself_proves_nothing_and_a_tenth_is_found_where_noise_allows():
    source = random.Random(7)
    same = [speedup(Load(8), planted(source, 1.0), planted(source, 1.0), [])[1] for _ in range(400)]
    holds = sum(low < 1 < high for low, high in same)
    assert holds >= 0.95 * 400 - 9, f"{holds} of 400"
    faster = [speedup(Load(8), planted(source, 1.1, 16), planted(source, 1.0, 16), [])[1] for _ in range(100)]
    assert sum(low > 1 for low, _ in faster) >= 95


def single(seconds, num=8):
    """A block of one question at a time: 10 tokens each."""
    answers = [[number, number * seconds, seconds / 10, seconds, 10] for number in range(num)]
    return {"answers": answers, "tokens": 10.0 * num, "full": seconds * num}


def test_a_slow_moment_of_the_machine_is_in_the_interval_of_one_at_a_time():
    """It meets a whole block, and so every question alike."""
    blocks, rows = [single(1.0)] * 6, [f"a:{i}" for i in range(8)]
    slowed, faster = [single(1.3), *blocks[1:]], [single(0.8)] * 6
    ratio, (low, high) = speedup(ONE, slowed, blocks, rows)
    assert ratio == pytest.approx(1.05) and low < 1 < high
    assert speedup(ONE, blocks, faster, rows)[1][0] > 1


def test_turns_of_one_chat_are_one_observation():
    blocks = [single(1.0)] * 4, [single(0.5)] * 4
    assert speedup(ONE, *blocks, ["a:1"] * 8)[1] == (None, None)
    same = Question("p.jsonl:7", PLAIN, QUESTIONS[0].body, None)
    turn = replace(QUESTIONS[1], row="c.jsonl:1, turn 2", body={"prompt": [3]})
    assert origins_of([*QUESTIONS[:2], same, turn]) == ["p.jsonl:0", "p.jsonl:1", "p.jsonl:0", "c.jsonl:1"]


def test_goodput_at_a_rate_is_of_the_arrivals_and_parts_that_came_at_once_are_not_fluent():
    answers = [[0, 0.0, 0.2, 1.0, 9], [1, 2.0, 0.2, 6.0, 9], [2, 4.0, 1.0, 1.0, 9]]
    record = {"answers": answers, "full": 8.0, "arriving": 4.0, "tokens": 27.0, "failures": [], "num_repeated": 0}
    record |= {"lags": [], "num_lags": 0, "late": [], "cpu": 0.0}
    figures = side_figures([record], Load(rate=0.5), Slo(ttft=2.0, tpot=1.0))
    assert figures.goodput == 2 / 4 and figures.tpot_ms.p99 == pytest.approx(5800 / 8)


@pytest.mark.slow
def test_many_at_a_time_are_timed_by_the_server_and_not_by_our_client(tmp_path):
    """64 at a time beside 5,000 tokens a second in all, for a minute: in a process of its own, since a stand-in takes
    time too."""
    code = "from serving_stand_in import Steady, listening; import sys\n"
    code += "with listening(Steady(step=64 / 5000, num_tokens=300)) as url: print(url, flush=True); sys.stdin.read()"
    place = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    server = subprocess.Popen([sys.executable, "-c", code], cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().decode().strip()
        asker = Asker(
            Address.of(url, where="x").serving(), {"max_tokens": 300, "stream": True}, {"return_token_ids": True}
        )
        many = [Question(f"p:{i}", PLAIN, {"prompt": [1, 5 + i]}, None) for i in range(1000)]
        block = asyncio.run(run_block(asker, many, Load(64), seed=0, salt="s"))
    finally:
        server.kill()
        server.wait()
    figures = side_figures([record_of(block)], Load(64), None)
    assert (figures.num_answers, figures.num_failed, figures.num_repeated) == (1000, 0, 0)
    assert block.full > 50 and figures.client_cpu < 0.5, figures
    assert figures.tokens_per_second is not None and figures.tokens_per_second > 4500, figures
    assert figures.client_late_ms.p99 is not None and figures.client_late_ms.p99 < 50, figures
