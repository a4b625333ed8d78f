"""`headstart auto` as a whole: what it makes, what it refuses, and that it goes on where it was killed."""

import json

import pytest
from headstart.base.jsonl import read_jsonl
from headstart.eval.decoding import generate
from headstart.scripts.unattended.answers import TEMPERATURE
from headstart.scripts.unattended.running.journal import Score
from headstart.scripts.unattended.running.steps import CommandRunner
from headstart.scripts.unattended.training import TIME_IS_UP, Learner
from headstart.targets.chat.answers import answer_text
from headstart.targets.chat.prompts import plain_ids
from headstart.targets.target import Target


def says(said, found):
    """Whether the decision is said, in however many lines."""
    return " ".join(found["decision"]["headline"].split()) in " ".join(said.split())


def journal_of(folder):
    return json.loads((folder / "auto.json").read_text())


@pytest.fixture
def auto(headstart, chat_target, traffic, in_process, tmp_path):
    """auto("--budget 6s"): exit code, what was said, and auto.json, None where there is none."""
    path = traffic(40)

    def call(line="--budget 6s --max-new-tokens 12"):
        folder = tmp_path / "auto"
        code, out, err = headstart(f"auto {line}", "--target", chat_target, "--prompts", path, "--output", folder)
        return code, out + err, journal_of(folder) if (folder / "auto.json").exists() else None

    return call


@pytest.mark.slow
def test_one_command_goes_from_prompts_to_a_decision(auto, machine_is, in_process, tmp_path):
    machine_is(medusa=1.2, mtp=1.3, eagle=2.5)
    code, said, found = auto("--budget 20s --max-new-tokens 12 --verbose")
    assert code == 0, said
    assert (found["split"]["held_out"], found["split"]["asked"], found["answers"]["written"]) == (13, 27, 27)
    data = tmp_path / "auto" / "data"
    learnt, judged = (read_jsonl(data / f"{name}.jsonl") for name in ("train", "validation"))
    assert found["answers"]["sampled"] == len(learnt) - 27 + len(judged) > 0, "prompts are answered again, sampled"
    asked = [[message["content"] for message in row["messages"][:-1]] for row in (*learnt, *judged)]
    assert all(question not in asked[: len(learnt)] for question in asked[len(learnt) :])
    ways = json.loads((data / "manifest.json").read_text())["settings"]["sampling"].values()
    assert {way["temperature"] for way in ways} == {0.0, TEMPERATURE}
    [rung] = found["rungs"]
    assert rung["plan"].keys() == {"medusa", "mtp"}, "what cannot pay is not trained"
    scores = {score["name"]: score["predicted_speedup"] for score in rung["scores"]}
    assert rung["kept"] == [max(scores, key=scores.__getitem__)] == [found["chosen"]["name"]]
    assert 10 < found["trained"]["score"]["steps"] <= found["chosen"]["max_steps"]
    assert found["evaluation"]["num_prompts"] == 13
    report = json.loads((tmp_path / "auto" / "eval" / "report.json").read_text())
    assert {result["drafter"] for result in report["results"]} == {
        found["chosen"]["name"],
        f"hybrid+{found['chosen']['name']}+answers",
        "suffix+answers",
    }
    assert says(said, found)
    page = (tmp_path / "auto" / "auto.html").read_text()
    assert (
        " ".join(found["decision"]["headline"].split()) in " ".join(page.split())
        and "even with" not in page
        and "<script" not in page
    )
    for step in found["steps"]:
        assert step["command"].startswith("headstart ") and step["command"] in said, "--verbose tells each step"
    ran = len(in_process)
    code, said, again = auto("--budget 20s --max-new-tokens 12")
    assert (code, len(in_process), again) == (0, ran, found), "a finished run says its decision again, and does nothing"
    assert says(said, found)


@pytest.mark.slow
def test_a_run_goes_on_behind_the_last_finished_step_whenever_it_was_killed(auto, machine_is, monkeypatch, tmp_path):
    machine_is(medusa=1.2, mtp=1.3)
    whole = CommandRunner.run
    finished, alive = [], [0]

    def dies(self, name, words, **limits):
        if alive[0] == 0:
            raise SystemExit(137)
        alive[0] -= 1
        record = whole(self, name, words, **limits)
        finished.append(tuple(word for word in words if not word.startswith("train.stop_after")))
        return record

    monkeypatch.setattr(CommandRunner, "run", dies)
    plans = []
    for _ in range(12):
        alive[0] = 1
        code, said, found = auto("--budget 20s --max-new-tokens 12")
        plans.append([rung["plan"] for rung in found["rungs"]])
        if code != 137:
            break
    assert code == 0, said
    assert len(finished) == len(set(finished)) == len(found["steps"]), "no step is done twice"
    planned = [plan for plan in plans if plan]
    assert all(plan == planned[0] for plan in planned), "what was decided stays"
    assert found["decision"] is not None


@pytest.mark.slow
def test_without_time_to_score_any_candidate_the_most_promising_one_is_trained(auto, machine_is, monkeypatch):
    machine_is(medusa=1.2, mtp=1.3)
    whole = Learner.score

    def late(self, output, record, *, steps_before):
        if output.parent.name == "candidates":
            return Score(output.name, seconds=record.seconds, problem=TIME_IS_UP)
        return whole(self, output, record, steps_before=steps_before)

    monkeypatch.setattr(Learner, "score", late)
    code, said, found = auto("--budget 20s --max-new-tokens 12")
    assert code == 0, said
    [rung] = found["rungs"]
    assert rung["kept"] == [next(iter(rung["plan"]))] == [found["chosen"]["name"]]
    assert found["trained"]["score"]["acceptance_length"] > 1 and found["decision"] is not None


@pytest.mark.slow
def test_a_target_without_a_chat_template_continues_prompts_as_they_are(auto, machine_is, chat_target, tmp_path):
    """To a decision, with rows that are the target's plain continuations."""
    machine_is(medusa=1.2)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        path = chat_target / name
        text = json.loads(path.read_text()) if name.endswith("json") else {}
        path.unlink()
        if text:
            path.write_text(json.dumps({key: value for key, value in text.items() if key != "chat_template"}))
    code, said, found = auto("--budget 20s --max-new-tokens 12")
    assert code == 0 and says(said, found), said
    target, data = Target.load(chat_target), tmp_path / "auto" / "data"
    assert not target.tokenizer.chat_template
    for row in read_jsonl(data / "validation.jsonl"):
        [tokens] = generate(target, None, plain_ids(target.tokenizer, row["prompt"]), max_new_tokens=12).token_ids
        assert row["response"] == answer_text(tokens, target.tokenizer, target.eos_token_ids)
    assert all(set(row) == {"prompt"} for row in read_jsonl(data / "held_out.jsonl"))


@pytest.mark.slow
def test_where_no_candidate_can_pay_nothing_is_trained(auto, machine_is, in_process):
    machine_is(medusa=2.5, mtp=3.0)
    code, said, found = auto()
    assert code == 0, said
    assert [words[0] for words in in_process] == ["eval"] and "suffix" in in_process[0]
    assert found["chosen"] is None and found["answers"] is None
    assert "No head was trained" in said and found["decision"]["drafter"] in ("", "suffix")


def test_an_engine_is_given_no_drafter_that_it_does_not_have(auto, machine_is, in_process):
    """And fewer prompts than an interval needs batches of are said."""
    machine_is(medusa=2.5)
    code, said, found = auto("--budget 6s --engine vllm --batch-size 4")
    assert "warning: --batch-size 4: 13 prompts are held out, fewer than the 4 batches" in said
    assert code == 0 and not in_process, said
    assert not found["decision"]["deploy"] and "none can pay" in said


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--budget 20", "--budget 20: expected a time such as 90s, 20m or 2h"),
        ("--budget 0.5s", "--budget 0.5s: too short to train anything; the minimum is 1s"),
        ("--budget 6s --engine tgi", "--engine: name 'tgi': expected headstart or llama.cpp or sglang or vllm"),
        ("--budget 2s", "--budget: too short for this target here; the least that makes sense is 1m"),
    ],
)
def test_what_can_be_mended_is_told_in_one_line(auto, machine_is, line, problem, tmp_path):
    machine_is(medusa=1.2)
    code, said, found = auto(line)
    last = [line for line in said.splitlines() if line.startswith("headstart: ")]
    assert code == 2 and len(last) == 1 and problem in last[0], said
    assert found is None and not (tmp_path / "auto").exists(), "nothing is left behind"


def test_a_folder_of_other_settings_is_refused(auto, machine_is):
    machine_is(medusa=2.5)
    line = "--max-new-tokens 12 --engine vllm"  # of which nothing is measured here
    assert auto(f"--budget 6s {line}")[0] == 0
    code, said, _ = auto(f"--budget 7s {line}")
    assert code == 2 and "started with budget 6.0, now 7.0; give a new folder" in said
