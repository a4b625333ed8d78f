"""`headstart eval` on suites by name: what it reads, what it says of prompts that fail, and how it goes on."""

import json

import pytest
from drafted import untrained
from headstart.engines.heads import save_head
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.proof.runner import Runner
from headstart.eval.suites.prompts import load_suite
from headstart.scripts.evaluating.eval_drafts import WantedDrafts, own_length
from headstart.targets.target import Target

GROUPS = ["writing", "math", "rag", "qa"]


@pytest.fixture
def asked(headstart, chat_target, tmp_path, monkeypatch):
    """asked("--suite x"): `headstart eval` of n-grams, few tokens each; exit code, stderr, report or None, stdout."""
    (tmp_path / "suites").mkdir()
    rows = [{"category": one, "turns": [f"w{5 + i} w6 w{5 + i}", "w7"]} for i, one in enumerate(GROUPS)]
    (tmp_path / "suites" / "spec_bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)

    def call(line):
        how = "--drafter ngram --output out --max-new-tokens 8 --repeats 1"
        code, out, err = headstart(f"eval --target {chat_target} {how} {line}")
        found = tmp_path / "out" / "report.json"
        return code, err, json.loads(found.read_text()) if found.exists() else None, out

    return call


def test_every_turn_is_measured_in_batches_as_large_as_the_report_says(asked, tmp_path):
    """The turns of four chats repeat until batches are full; figures have each once, intervals no such batch."""
    (tmp_path / "mine.jsonl").write_text(json.dumps({"turns": ["w5 w6"]}) + "\n")
    _, _, report, _ = asked("--prompts mine.jsonl --suite spec-bench --batch-size 1 --batch-size 3 --batch-size 16")
    single, entries = report["results"][0], report["results"][3:]
    for entry in entries:
        assert (entry["num_chats"], entry["num_prompts"], entry["lossless"]["checked"]) == (4, 8, 8)
        assert len(entry["repetition"]["texts"]) == 8 and entry["by_domain"]["mt_bench"]["num_prompts"] == 4
    alone, threes, sixteen = entries
    assert (alone["num_timed"], threes["num_timed"], sixteen["num_timed"]) == (4, 1, 1) and single["num_chats"] == 1
    assert alone["observations"][0]["prompts"] == [0, 1], "a chat is one observation"
    assert threes["suite_digest"] == sixteen["suite_digest"]
    assert "8, the turns of 4" in (tmp_path / "out" / "report.html").read_text()
    rounds = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    assert all(len(one["num_committed"]) == row["batch_size"] for row in rounds for one in row["rounds"])


def test_a_target_without_a_chat_template_is_measured_on_plain_continuations(asked, chat_target, tmp_path):
    """Of rows of `prompt`, without a word about templates; chats are refused in a line."""
    (chat_target / "chat_template.jinja").unlink()
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"prompt": f"w{5 + i} w6 w9"}) + "\n" for i in range(4)))
    code, err, report, _ = asked("--prompts mine.jsonl")
    [entry] = report["results"]
    assert code == 0 and entry["lossless"] | {"divergences": []} == {
        "checked": 4, "identical": 4, "proved": 0, "unexplained": 0, "divergences": []
    }  # fmt: skip
    assert "template" not in err and entry["rendering"]["template_hash"] is None
    target = Target.load(chat_target)
    suite = load_suite(tmp_path / "mine.jsonl", target, max_new_tokens=8)
    assert suite.prompts == [target.tokenizer(f"w{5 + i} w6 w9")["input_ids"] for i in range(4)]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "w5"}]}) + "\n")
    code, err, _, _ = asked("--prompts chats.jsonl --overwrite")
    assert code == 2 and "template" in err.splitlines()[-1]


@pytest.mark.fast_only(where=["HEADSTART_SUITES"])
@pytest.mark.parametrize("where", ["", "--suites-dir elsewhere", "HEADSTART_SUITES"])
def test_a_suite_is_found_by_its_name(where, asked, tmp_path, monkeypatch):
    if where:
        (tmp_path / "suites").rename(tmp_path / "elsewhere")
    if where == "HEADSTART_SUITES":
        monkeypatch.setenv(where, "elsewhere")
        where = ""
    code, _, report, _ = asked(f"--suite spec-bench --system w30 {where}")
    [entry] = report["results"]
    assert code == 0 and (entry["suite"], entry["num_prompts"]) == ("spec-bench", 8)
    assert list(entry["by_domain"]) == ["mt_bench", "rag", "qa"] and entry["by_domain"]["mt_bench"]["num_prompts"] == 4
    assert entry["rendering"]["system"] == "w30" and len(entry["rendering"]["template_hash"]) == 16
    assert "Domains of spec-bench" in (tmp_path / "out" / "report.html").read_text()
    assert not (tmp_path / "out" / "measured.jsonl").exists()


def test_suites_and_prompt_files_are_measured_in_one_run(asked, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "w5 w6", "domain": "own"}\n')
    code, err, report, _ = asked("--suite spec-bench --prompts mine.jsonl --thinking off --limit 3")
    assert code == 2 and "mine.jsonl:1: a system prompt, thinking or recorded turns need a" in err and report is None
    code, err, report, _ = asked("--suite spec-bench --prompts mine.jsonl --limit 1")
    assert [one["suite"] for one in report["results"]] == ["mine", "spec-bench, first 1"]
    assert "mine: rows of `prompt` are continued as plain text" in err and "spec-bench: rows" not in err
    code, err, _, _ = asked("--suite spec-bench --thinking off --limit 1 --overwrite")
    assert code == 0 and "does not read enable_thinking: --thinking changes nothing" in err


def test_prompts_that_fail_are_said_and_the_others_measured(asked, tmp_path):
    rows = [{"prompt": "w5"}, {"prompt": "w5 " * 300}, {"prompt": "w6"}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "long.jsonl").write_text(json.dumps(rows[1]) + "\n")
    code, err, report, _ = asked("--prompts mine.jsonl --prompts long.jsonl")
    assert code == 0 and [one["num_prompts"] for one in report["results"]] == [2, 0]
    failed = "n-gram look-ups on mine: 1 of 3 prompts failed and are in no figure, the first mine.jsonl:2: 300 prompt"
    assert failed in err
    assert "Prompts that failed, 2 of 2" in (tmp_path / "out" / "report.html").read_text()


def test_where_nothing_is_left_the_command_refuses(asked, tmp_path, monkeypatch):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "w5 " * 300}) + "\n")
    code, err, report, _ = asked("--prompts long.jsonl")
    assert code == 2 and "headstart: no prompt of long can be asked: long.jsonl:1: 300" in err and not report

    def broken(*_, **__):
        raise RuntimeError("planted")

    monkeypatch.setattr(Runner, "begin", broken)
    (tmp_path / "mine.jsonl").write_text('{"turns": ["w5 w6"]}\n')
    code, err, report, _ = asked("--prompts mine.jsonl")
    assert code == 2 and err.endswith("nothing could be measured: mine.jsonl:1: RuntimeError: planted\n")
    assert report is None and not (tmp_path / "out").exists()


def test_the_same_command_goes_on_after_a_kill(asked, tmp_path, monkeypatch, warming_up):
    begin, calls = Runner.begin, []

    def stopping(*arguments):
        calls.append(1)
        if len(calls) == 8:  # two for the warm-up, two for each batch
            raise KeyboardInterrupt
        return begin(*arguments)

    monkeypatch.setattr(Runner, "begin", stopping)
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"turns": [f"w{i} w6"]}) + "\n" for i in range(5, 13)))
    code, err, *_ = asked("--prompts mine.jsonl")
    assert code == 130 and "the same command goes on" in err.splitlines()[-1]
    assert len((tmp_path / "out" / "measured.jsonl").read_text().splitlines()) == 2
    calls[:] = [1] * 100
    code, err, report, _ = asked("--prompts mine.jsonl")
    assert code == 0 and "measured.jsonl: 2 batches of an unfinished measurement" in err
    assert report["results"][0]["num_prompts"] == 8 and len(calls) == 100 + 2 + 2 * 6


def test_a_head_is_measured_with_a_window_and_told_how_to_serve_it(headstart, saved_target, prompts, tmp_path):
    folder = save_head(untrained("eagle3", Target.load(saved_target)), tmp_path / "head")
    path = prompts({"prompt": "w1 w3 w9 w4"})
    asked = f"eval --max-new-tokens 8 --repeats 1 --target {saved_target} --prompts {path} --output {tmp_path / 'out'}"
    code, _, err = headstart(f"{asked} --head {folder} --draft-window 3:1")
    assert code == 0, err
    [result] = json.loads((tmp_path / "out" / "report.json").read_text())["results"]
    assert result["drafter"] == "eagle3:window 3:1"
    assert "EAGLE-3 (window 3:1)" in (tmp_path / "out" / "report.html").read_text()
    for asks, reason in (("--head {} --draft-window 3:x", "expected N or N:SINK"), ("--drafter ngram", "with a head")):
        more = asks.format(folder) if "{}" in asks else f"{asks} --draft-window 3"
        code, _, err = headstart(f"{asked}2 {more}")
        assert code == 2 and reason in err


def test_a_drafter_may_have_a_k_of_its_own(saved_target):
    drafts = WantedDrafts(["suffix@7", "ngram", "ngram:2@1"], ["chain"], 8, temperature=0.0)
    assert drafts.specs == ("suffix", "ngram", "ngram:2") and drafts.lengths == (7, None, 1)
    drafters = drafts.load(Target.load(saved_target))
    lengths = [each.setting(MeasureConfig(setting=chain(4))).num_draft_tokens for each in drafters]
    assert lengths == [7, 4, 1]
    assert own_length("head:OWNER@HUB") == ("head:OWNER@HUB", None) and own_length("suffix@0")[1] is None
