"""Unattended runs decide by the engine's own server where one can be started, and say so where not."""

import json
import urllib.request
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.base.jsonl import read_jsonl
from headstart.engines.servers import setting
from headstart.engines.servers.setting import EngineSetting
from headstart.eval.report.served_page import ServedReport, read_served, write_served
from headstart.scripts.unattended import auto as auto_module
from headstart.scripts.unattended import in_server, target_server
from headstart.scripts.unattended.in_server import (
    decide_served,
    measure_in_server,
    plan_served,
    served_seconds,
    try_server,
)
from headstart.scripts.unattended.running.journal import Decision, ServerTrial, Trained
from headstart.scripts.unattended.running.session import Stage
from headstart.scripts.unattended_commands import asked_engine
from headstart.targets.target import Target
from served_blocks import SIDE, served
from transformers import AutoTokenizer


@pytest.fixture
def auto(headstart, chat_target, traffic, in_process, tmp_path):
    """auto("--budget 20s ..."): what was said, and auto.json."""

    def call(line, num_prompts=40):
        files = ["--target", chat_target, "--prompts", traffic(num_prompts), "--output", (folder := tmp_path / "auto")]
        code, out, err = headstart(f"auto {line}", *files)
        assert code == 0, out + err
        return out + err, json.loads((folder / "auto.json").read_text())

    return call


@pytest.mark.timed
def test_where_no_head_can_pay_look_ups_are_decided_on_in_the_server(auto, machine_is, python, in_process, tmp_path):
    machine_is(medusa=2.5)
    words = "--engine vllm --concurrency 1 --engine-args '--step 0.004'"
    said, found = auto(f"--budget 20s --max-new-tokens 12 {words} --engine-python {python}", num_prompts=12)
    assert [words[words.index("--engine") + 1] for words in in_process] == ["vllm", "vllm"], "tried, then measured"
    assert found["serving"]["problem"] == "" and found["serving"]["tokens_per_second"][0] > 0
    decision = found["decision"]
    assert decision["deploy"] and decision["drafter"] == "suffix" and decision["speedup"] > 1.5
    assert "Deploy look-ups, K 3, in vLLM" in said and '"method": "ngram"' in decision["commands"][0]
    command = decision["commands"][0]
    assert command.startswith("vllm serve ") and command.endswith(" --step 0.004"), "it is served with a prefix cache"
    assert "prefix-caching" not in command
    page = (tmp_path / "auto" / "auto.html").read_text()
    assert "vLLM with look-ups, 3 drafts: 1 at a time:" in page and "eval_served/report.html" in page


@pytest.mark.slow
@pytest.mark.parametrize("is_adapted", [False, True])
def test_no_process_of_ours_holds_a_layer_of_a_target_that_the_server_has(
    is_adapted, auto, python, chat_target, lora, in_process, monkeypatch, tmp_path
):
    """Candidates are measured by the server's rates and the first steps from its states, and trained from these; under
    an adapter, by whose name alone the stand-in answers."""
    adapter = lora(chat_target) if is_adapted else None

    def refuses(*_, **__):
        raise AssertionError("a target is loaded with its layers")

    monkeypatch.setattr(Target, "load", refuses)
    words = "--engine vllm --concurrency 1 --engine-args '--step 0.01'"
    words += f" --adapter {adapter}" if is_adapted else ""
    said, found = auto(f"--budget 60s --max-new-tokens 12 {words} --engine-python {python}")
    measured = {one["name"]: one for one in found["machine"]["candidates"]}
    assert measured["draft_lm"]["out"] == "it reads the target's layers, which are in the server"
    step = found["serving"]["tokens_per_second"][0]
    assert found["machine"]["baseline_ms"] == pytest.approx(1000 / step, abs=1e-3)
    able = [one for one in measured.values() if not one["out"]]
    assert able and all(one["step_seconds"] > 0 and one["token_seconds"] > 0 for one in able), said
    assert found["trained"]["score"]["acceptance_length"] >= 1 and found["decision"]["deploy"], said
    report = json.loads((tmp_path / "auto" / "eval_served" / "report.json").read_text())
    assert report["served"][0]["drafter"].startswith("head:")
    urls = {word for words in in_process for word in words if word.startswith("engine.server=")}
    assert len(urls) == 1 and all(urls <= set(words) for words in in_process if words[0] == "train"), "one server"
    assert not (tmp_path / "auto" / "states").exists() and not (tmp_path / "auto" / "eval").exists()
    asked = [words for words in in_process if words[0] in ("eval", "data")]
    assert all(any(str(adapter) in word for word in words) == is_adapted for words in asked) and len(asked) > 2
    flags = f"--enable-lora --lora-modules {adapter.name}={adapter}" if adapter else ""
    assert flags in found["decision"]["commands"][0], found["decision"]


def test_without_a_server_our_engine_decides_and_says_so(auto, machine_is):
    machine_is(medusa=2.5)
    said, found = auto("--budget 6s --max-new-tokens 12 --engine vllm")
    assert "vLLM is not in this Python; --engine-python names one that has it: decided by our own engine" in said
    assert found["serving"]["problem"] and not found["decision"]["deploy"]


# ---------------------------------------------------------------------------------------------------------------------
# Answers by the server


@pytest.fixture
def answered(headstart, chat_target, traffic, in_process, machine_is, python, monkeypatch, tmp_path):
    """answered(serving): what a run that ends with its answers said, its auto.json and its rows."""
    machine_is(medusa=1.2)
    path, folder = traffic(40), tmp_path / "auto"
    all_stages = auto_module.stages
    end = Stage[Any]("decision", lambda run: Decision(False, "Nothing is trained here", [], []))
    monkeypatch.setattr(target_server, "PATIENCE", 1)
    monkeypatch.setattr(target_server.TargetServer, "gives_states", False)  # nothing is trained

    def call(serving=QUICK, line="", code=0):
        tried = Stage[Any]("serving", lambda run: serving)

        def stages(server):
            found = {stage.field: stage for stage in all_stages(server)}
            return [
                *(found[name] for name in ("split", "machine", "least_budget")),
                tried,
                *(found[name] for name in ("answers_until", "answers")),
                end,
            ]

        monkeypatch.setattr(auto_module, "stages", stages)
        told = ["--target", chat_target, "--prompts", path, "--output", folder, "--engine-python", python]
        found, out, err = headstart(f"auto --budget 20s --max-new-tokens 12 --engine vllm {line}", *told)
        assert found == code, out + err
        rows = read_jsonl(folder / "data" / "train.jsonl") if code == 0 else []
        return out + err, json.loads((folder / "auto.json").read_text()), rows

    return call


QUICK = ServerTrial("", 0.1, [100.0])  # started in 0.1 s, at 100 tokens/s


def asked_of(in_process):
    """The folders that `data regenerate` wrote, in order."""
    outputs = [next(word for word in words if word.startswith("output=")) for words in in_process]
    return [output.rpartition("/")[2] for output in outputs]


def test_the_server_answers_greedily_and_then_sampled_and_ends_with_the_stage(answered, in_process, chat_target):
    said, found, rows = answered()
    assert "starting vLLM's server for the answers (about 0:00)" in said and "our own engine" not in said
    assert asked_of(in_process) == ["answers", "answers-2", "answers-3", "answers-4"]
    assert all("engine.name=vllm" in words for words in in_process)
    assert "client.concurrency=10" in in_process[0], "5 s of 100 tokens/s are four rounds of ten answers of 12 tokens"
    [url] = {word for words in in_process for word in words if word.startswith("engine.server=")}
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url.removeprefix('engine.server=')}/health")
    counts = found["answers"]
    assert (counts["written"], counts["sampled"]) == (27, 3 * (27 - counts["validation"])) and counts["complete"]
    tokenizer = AutoTokenizer.from_pretrained(chat_target)
    for row in rows:
        [sequence] = row["written_ids"]["sequences"]
        question = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True)["input_ids"]
        [(_, start, end)] = sequence["turns"]
        assert sequence["input_ids"][:start] == question and end - start == 12 and row["truncated"]


def test_a_run_whose_server_ended_goes_on_with_a_new_one(answered, in_process):
    line = "--engine-args '--answers 60'"
    answered(line=line, code=2)
    _, found, _ = answered(line=line)
    assert asked_of(in_process) == ["answers", "answers-2", *["answers-3"] * 2, "answers-4"], "none twice but the rest"
    assert found["answers"]["written"] == 27 and found["answers"]["complete"]
    first, last = (next(word for word in words if "server=" in word) for words in (in_process[0], in_process[-1]))
    assert first != last


def test_a_server_that_was_not_to_be_had_leaves_the_answers_to_our_engine(answered, in_process):
    answered(ServerTrial("too slow"))
    assert asked_of(in_process)[-1] == "answers-4" and not any("engine.name=vllm" in words for words in in_process)


def test_a_server_that_starts_no_more_ends_the_run_in_a_line(answered):
    said, *_ = answered(line="--engine-args '--answers none'", code=2)
    assert said.splitlines()[-1].startswith("headstart: vLLM ended with code 1: ValueError: invalid literal")


# ---------------------------------------------------------------------------------------------------------------------
# From figures alone


@pytest.mark.parametrize(
    ("engine", "dtype", "args"),
    [
        ("vllm", "float16", "--dtype float16 --x 1"),
        ("vllm", "", "--x 1"),
        ("sglang", "auto", "--x 1"),
        ("llama.cpp", "float16", "--x 1"),
    ],
)
def test_servers_are_told_the_dtype_that_was_asked_for_before_the_users_flags(engine, dtype, args):
    how = {"concurrency": None, "dtype": dtype, "device": ""}
    assert asked_engine(engine, "python", "--x 1", (engine,), **how).args == args


def test_two_servers_are_up_together_where_each_has_half_of_a_gpu(tmp_path, monkeypatch):
    shares = {"": False, "--gpu-memory-utilization 0.9": False, "--gpu-memory-utilization=0.45": True}
    shares["--mem-fraction-static 0.4"] = True
    for gpu, expected in ((tmp_path, shares), (tmp_path / "none", dict.fromkeys(shares, True))):
        monkeypatch.setattr(setting, "GPU", gpu)
        assert {args: EngineSetting(name="vllm", args=args).has_room_for_two for args in shares} == expected


def run_of(tmp_path, *, fails=False, is_late=False, **settings) -> Any:
    """A run whose steps fail, or are stopped as their time is up."""

    def step(*_, **__):
        if fails:
            raise BadInput("eval_served: vLLM ended with code 1: ValueError: no such model")
        return SimpleNamespace(last_line="-", stopped=is_late, seconds=5.0)

    told = {"engine": EngineSetting(name="vllm", python="python"), "concurrency": [1, 8], "target": "T", "adapter": ""}
    journal, clock = SimpleNamespace(serving=None), SimpleNamespace(used=0.0)
    said: list[str] = []
    whole = SimpleNamespace(**{"budget": 100.0, **told, **settings})
    return SimpleNamespace(
        settings=whole,
        folder=tmp_path,
        data=tmp_path,
        journal=journal,
        clock=clock,
        step=step,
        said=said,
        say=said.append,
    )


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"fails": True}, "vLLM ended with code 1: ValueError: no such model"),
        ({"is_late": True}, "it had no answer in the 15% of the budget that are for trying it"),
        ({"engine": EngineSetting(name="llama.cpp")}, "no server of llama.cpp is started here"),
    ],
)
def test_a_server_that_does_not_start_is_a_line_before_training(how, problem, tmp_path):
    """Though an earlier start of the run, perhaps on another machine, had figures."""
    run = run_of(tmp_path, **how)
    (tmp_path / "server_trial").mkdir()
    write_served(tmp_path / "server_trial", ServedReport.of("T", [served("ngram at K 4", 1, 0.9)]))
    assert problem in try_server(run, most=16).problem
    assert problem in run.said[0] and run.said[0].endswith("decided by our own engine")


def test_a_head_that_the_server_cannot_measure_is_not_deployed(tmp_path):
    run = run_of(tmp_path, fails=True)
    assert measure_in_server(run, ServerTrial("", 10.0, [30.0, 100.0]), ["ngram@4"], [], seconds=1.0) == ""
    assert "no such model" in run.journal.serving.problem and run.journal.serving.start_seconds == 10.0
    run.journal.report, run.journal.trained = "", Trained("HEAD", None)
    run.machine = SimpleNamespace(able=[True])
    decision = auto_module.decide(run)
    assert not decision.deploy and "no such model" in decision.reasons[0]


def test_as_much_is_measured_in_the_server_as_there_is_time_for(tmp_path):
    run, serving = run_of(tmp_path), ServerTrial("", 10.0, [30.0, 100.0])
    least, most = (served_seconds(run, serving, num_prompts=count, most=96) for count in (4, 12))
    # 12 prompts: 8 blocks of 12 answers one at a time, and of 36 answers 8 at a time
    assert most == pytest.approx(20 + 8 * (12 * 96 / 30 + 36 * 96 / 100))

    def planned(seconds):
        plan = plan_served(run, serving, num_drafters=2, most=96, held_out=12, seconds=seconds)
        return plan.num_drafters, plan.num_prompts

    assert planned(3 * most) == (2, 12)
    assert (2, 4) <= planned(1.8 * most) < (2, 12)
    assert planned(1.4 * least)[0] == 1, "both drafters take more than there is, of however few prompts"
    assert planned(1.0) == (1, 4), "fewer have no interval"


@pytest.mark.parametrize(("budget", "is_tried"), [(600.0, True), (250.0, False)])
def test_a_server_too_slow_for_the_budget_is_known_before_training(budget, is_tried, tmp_path, monkeypatch):
    """A trial of 100 s, of which asking took 40: two starts of 30 s. Four prompts take 60 + 8 * 4 * 96 / 32 s."""
    run = run_of(tmp_path, budget=budget, concurrency=[1])

    def served_report(run, *_, **__):
        run.clock.used = 100.0
        return tmp_path / "report.json"

    monkeypatch.setattr(in_server, "served_report", served_report)
    side = replace(SIDE, num_answers=20, tokens_per_second=32.0)
    tried = replace(served("ngram at K 4", 1, 0.9), baseline=side, drafted=side)
    monkeypatch.setattr(in_server, "read_served", lambda _: SimpleNamespace(results=[tried]))
    serving = try_server(run, most=96)
    if is_tried:
        assert serving == ServerTrial("", 30.0, [32.0]) and not run.said
    else:
        assert serving.problem.startswith("measuring in it takes 2:36 at least")
        assert run.said == [f"{serving.problem}: decided by our own engine"]


@pytest.mark.parametrize(
    ("results", "headline", "cautions"),
    [
        (
            [served("head:H at K 4", 1, 1.5), served("head:H at K 4", 8, 0.8), served("ngram at K 4", 1, 1.2)],
            "Deploy the head, K 4, in vLLM",
            ["its lower end is 1.40", 'tokens_per_batch_size": [[1, 7, 4], [8, 8, 0]]'],
        ),
        ([served("head:H at K 4", 1, 1.1), served("ngram at K 4", 1, 1.2)], "Deploy look-ups, K 4, in vLLM", []),
        (
            [served("head:H at K 4", 1, 1.5), served("head:H at K 4", 8, 0.5)],
            "Deploy the head, K 4, in vLLM",
            ["8 at a time: 0.70 times as fast [0.50, 0.90], leave drafts off"],
        ),
        # one of six intervals lies above 1 by luck now and then
        (
            [served("head:H at K 4", 2**i, low) for i, low in enumerate((1.01, 0.8, 0.8, 0.8, 0.8, 0.8))],
            "Do not deploy: no measured setting is proved to be faster",
            [],
        ),
        ([served("head:H at K 4", 1, 0.9)], "Do not deploy: no measured setting is proved to be faster", []),
        ([served("head:H at K 4", 1, 1.5, unexplained=2)], "Do not deploy: no", ["are not the target's own"]),
        ([replace(served("head:H at K 4", 1, 1.5), drafted=replace(SIDE, num_failed=3))], "Do not deploy: no", []),
    ],
)  # fmt: skip
def test_what_is_proved_in_the_server_is_deployed_and_nothing_else(results, headline, cautions, tmp_path):
    write_served(tmp_path, ServedReport.of("T", results))
    assert read_served(tmp_path / "report.json").results == results
    decision, best = decide_served(str(tmp_path / "report.json"), lookup="suffix")
    assert decision.headline.startswith(headline) and decision.deploy == (best is not None)
    assert any("vLLM with head H, 4 drafts: 1 at a time:" in reason for reason in decision.reasons)
    for caution in cautions:
        assert any(caution in said for said in (*decision.reasons, *decision.cautions)), decision


def test_a_report_of_our_engine_is_none_of_a_server(tmp_path):
    (tmp_path / "report.json").write_text('{"schema_version": 3, "results": []}')
    with pytest.raises(BadInput, match="report.json: no report of a server"):
        read_served(tmp_path / "report.json")
