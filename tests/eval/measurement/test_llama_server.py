"""A head in llama-server is measured as one in our engine is: in turns, with intervals, its texts compared; and its
plain decoding is timed beside ours. A small script stands for the server."""

import json
import os
from collections import Counter
from typing import Any

import gguf_files
import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.drafters.answers import Answers
from headstart.eval.drafters.llamacpp_cache import write_cache
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.measurement.config import MeasureConfig
from headstart.eval.measurement.resume import BatchStore
from headstart.eval.measurement.servers.beside import compare_llama_server
from headstart.eval.measurement.servers.llama_server import LlamaServer, ServerAnswer, ServerFiles
from headstart.eval.measurement.servers.served import measure_served, swept
from headstart.eval.report.document import build_report, read_report, write_report
from headstart.eval.report.page import render
from headstart.eval.suites.prompts import Suite
from headstart.scripts.eval_run import parse_yardstick
from llama_server_files import write_llama_server

SUITE = Suite("three", [[1, 5, 9], [1, 7, 8, 3], [1, 30]])
CONFIG = MeasureConfig(max_new_tokens=9, num_repeats=2)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """files("eagle3"): a stand-in for the server, a head of that architecture and a target; what it was asked goes to
    asked.jsonl."""
    binary, head, target = write_llama_server(tmp_path), tmp_path / "head.gguf", tmp_path / "target.gguf"
    gguf_files.write(target, *gguf_files.draft_model())
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "asked.jsonl"))

    def make(kind="eagle3", **values):
        made = {"eagle3": gguf_files.eagle3, "draft": gguf_files.draft_model, "mtp": gguf_files.with_modules}[kind]
        gguf_files.write(head, *made())
        return ServerFiles(binary, target, head, **values)

    return make


def asked(tmp_path):
    return [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]


def test_both_sides_take_turns_and_their_counts_become_figures(files, target, tmp_path):
    calls = []
    [two, three] = measure_served(target, files(), SUITE, CONFIG, [2, 3], on_prompt=lambda: calls.append(1))
    assert len(calls) == 6 and (two.engine, two.drafter, two.tree) == ("llama-server", "head.gguf", "chain")
    # 9 tokens: the prefill's, then 4 rounds of an accepted draft and one more token; 80 ms without drafts, 64 with
    assert (two.num_rounds, two.num_committed, two.acceptance_length) == (12, 24, 2.0)
    assert (two.speedup, two.tokens_per_second, two.baseline_tokens_per_second) == (1.25, 125.0, 100.0)
    assert two.speedup_ci95 == (1.25, 1.25) and two.ttft_ms == 6.0
    seen = [(one.prompts, one.num_rounds, one.num_committed, one.seconds) for one in two.observations]
    assert seen == [([i], 4, 8, pytest.approx(0.128)) for i in range(3)], "the best of several K is widened by them"
    assert two.end_to_end_speedup == round((0.48 + 0.036) / (0.384 + 0.036), 4)
    assert (two.num_draft_tokens, three.num_draft_tokens) == (2, 3)
    assert two.lossless.identical == two.lossless.checked == 3
    sides = [bool(row[0]) for row in asked(tmp_path)][2:14]  # behind the warm-up
    assert sides == [True, False, False, True, False, True, True, False, True, False, False, True]
    for _, request, *_ in asked(tmp_path):
        assert request["temperature"] == 0 and request["cache_prompt"] is False and request["n_predict"] == 9


def test_a_text_that_the_head_changes_is_unexplained(files, target, monkeypatch):
    monkeypatch.setenv("FAKE", "other")
    [result] = measure_served(target, files(), SUITE, CONFIG, [2])
    assert result.lossless.unexplained == 3 and result.lossless.divergences[0].position == 1


def test_a_servers_own_sampling_defaults_are_not_measured(files, target, monkeypatch):
    with LlamaServer(files().command(max_length=64)) as server:
        plain = server.answer([1, 5], max_new_tokens=5).token_ids
    monkeypatch.setenv("FAKE", "penalises")
    with LlamaServer(files().command(max_length=64)) as server:
        assert server.answer([1, 5], max_new_tokens=5).token_ids == plain
    monkeypatch.setenv("FAKE", "insists")
    with LlamaServer(files().command(max_length=64)) as server:
        problem = r"^llama-server: does not answer greedily as asked: .*repeat_penalty 1\.3"
        with pytest.raises(RuntimeError, match=problem):
            server.answer([1, 5], max_new_tokens=5)


def test_drafts_behind_the_end_of_a_text_are_not_counted(files, target, monkeypatch):
    """7 tokens in 2 rounds of K 3, whose last drafts reach beyond the end: 6 tokens came of 2 forwards."""
    monkeypatch.setenv("FAKE", "ends")
    [result] = measure_served(target, files(), SUITE, CONFIG, [3])
    assert (result.num_rounds, result.num_committed) == (6, 18)
    assert ServerAnswer([], 7, 1.0, 1.0, num_drafted=5, num_accepted=3).num_rounds(3) == 3


def test_a_prompt_that_it_refuses_is_named_and_the_others_measured(files, target, monkeypatch):
    monkeypatch.setenv("FAKE", "fails")
    [result] = measure_served(target, files(), SUITE, CONFIG, [2])
    assert result.num_prompts == 2 and "no nine" in result.failed[0].reason
    [nothing] = measure_served(target, files(), SUITE.subset([0]), CONFIG, [2])
    assert nothing.num_prompts == 0 and nothing.speedup is None


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("eagle3", "-md HEAD --spec-type draft-eagle3 --spec-draft-n-max 4 --spec-draft-p-min 0"),
        ("draft", "-md HEAD --spec-type draft-simple --spec-draft-n-max 4 --spec-draft-p-min 0"),
        ("mtp", "--spec-type draft-mtp --spec-draft-n-max 4 --spec-draft-p-min 0 -md HEAD"),
    ],
)
def test_the_head_s_file_says_how_it_is_served(files, kind, flags):
    found = files(kind, args="-t 2")
    line = " ".join(found.command(max_length=99, num_draft_tokens=4))
    assert line == f"{found.binary} -m {found.target} -c 99 -np 1 -t 2 {flags.replace('HEAD', str(found.head))}"
    assert "--spec" not in " ".join(found.command(max_length=99))


def test_answers_take_a_heads_place_and_their_drafts_have_no_fixed_length(files, target, tmp_path):
    write_cache(Answers([([1, 2], [3, 4, 5])]), tmp_path)
    wanted = files()
    found = ServerFiles(wanted.binary, wanted.target, tmp_path / "answers.ngrams")
    line = " ".join(found.command(max_length=99, num_draft_tokens=8))
    also = f"--lookup-cache-static {tmp_path}/bigrams.ngrams"
    assert line.endswith(f"-np 1 --spec-type ngram-cache --lookup-cache-dynamic {found.head} {also}")
    assert list(swept(found)) == [8] and len(swept(wanted)) > 1
    [result] = measure_served(target, found, SUITE, CONFIG, [8])
    assert (result.drafter, result.num_draft_tokens) == ("answers.ngrams", 8)
    used = Counter(process for _, _, line, process in asked(tmp_path) if "ngram-cache" in line)
    assert set(used.values()) == {2} and len(used) == len(SUITE.prompts) * CONFIG.num_repeats + 1, "one for each answer"
    with pytest.raises(BadInput, match="looks up at most 8 tokens"):
        measure_served(target, found, SUITE, CONFIG, [3])


def test_a_server_that_does_not_come_up_says_why_and_no_process_stays(files, target, monkeypatch):
    monkeypatch.setenv("FAKE", "crash")
    with pytest.raises(BadInput, match="ended with code 3: error: unknown model architecture: 'eagle9'"):
        measure_served(target, files(), SUITE, CONFIG, [2])
    monkeypatch.setenv("FAKE", "")
    with LlamaServer(files().command(max_length=9)) as server:
        assert server.process is not None
        number = server.process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_an_interrupted_measurement_goes_on(files, target, tmp_path):
    with BatchStore(tmp_path / "out") as store:
        wanted = files()
        first = measure_served(target, wanted, SUITE, CONFIG, [2], store=store)
        before = len(asked(tmp_path))
        assert measure_served(target, wanted, SUITE, CONFIG, [2], store=store) == first
    assert len(asked(tmp_path)) == before


def test_its_report_and_page_are_those_of_our_engine(files, target, tmp_path):
    results = measure_served(target, files(), Suite("six", [*SUITE.prompts, [1, 2], [1, 3], [1, 4]]), CONFIG, [1, 2])
    report = build_report(target, results)
    write_report(tmp_path, report, [])
    assert read_report(tmp_path / "report.json").results == results and report.ours == results
    page = render(report)
    assert "Deploy llama-server" in page and "12 of 12 texts equal the baseline" in page


def test_settings_that_it_is_not_measured_with_are_refused(files, target):
    refused: list[dict[str, Any]] = [{"temperature": 1.0}, {"stop_strings": ("x",)}, {"batch_size": 2}]
    for values in refused:
        with pytest.raises(BadInput, match="--engine llama-server: is measured greedily, at batch 1"):
            measure_served(target, files(), SUITE, MeasureConfig(**values), [2])


def test_its_plain_decoding_is_timed_beside_ours(files, target, tmp_path):
    config = MeasureConfig(setting=chain(3), max_new_tokens=6, num_repeats=1)
    for drafter, name in ((None, "no drafts"), (NgramDrafter(), "ours with ngram")):
        result = compare_llama_server(target, drafter, SUITE, config, files(), name=name)
        assert (result.engine, result.drafter, result.num_tokens) == ("llama.cpp", name, 18)
        assert result.ours_over_theirs is not None and result.is_beside
        assert result.lossless.checked == 3 and not result.lossless.unexplained, "texts of ours that differ are proved"
    arguments = asked(tmp_path)[-1][2]
    assert arguments[arguments.index("-t") + 1] == str(torch.get_num_threads()), "as many threads as ours"


def test_the_yardstick_names_its_binary_and_the_target_s_file(tmp_path):
    binary, file = tmp_path / "llama-server", tmp_path / "t.gguf"
    binary.touch()
    file.touch()
    wanted = ServerFiles(binary, file)
    assert parse_yardstick(f"llama-server:{binary}:{file}", "MODEL") == wanted
    assert parse_yardstick(f"llama-server:{binary}", str(file)) == wanted
    assert parse_yardstick("transformers", "MODEL") is None
    for spec, problem in (
        (f"llama-server:{binary}", "name the target's GGUF file behind it"),
        ("llama-server", "expected transformers or llama-server:PATH"),
        ("vllm", "expected transformers or llama-server:PATH"),
        (f"llama-server:{tmp_path / 'x'}:{file}", "no such file"),
    ):
        with pytest.raises(BadInput, match=problem):
            parse_yardstick(spec, "MODEL")
