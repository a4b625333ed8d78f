"""`headstart refit` as a whole: what it makes, what it refuses, and that it goes on where it was killed."""

import json
from pathlib import Path

import pytest
from headstart.base.jsonl import read_jsonl
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.rows.sources import Row
from headstart.scripts.unattended import comparing
from headstart.scripts.unattended.running.steps import CommandRunner
from headstart.targets.target import Target


def journal_of(folder):
    return json.loads((folder / "refit.json").read_text())


@pytest.fixture
def refit(headstart, worded_target, head_folder, in_process, tmp_path):
    """refit(traffic, replay): exit code, what was said, and refit.json, None where there is none."""

    def call(traffic, replay=None, line="--budget 60s --max-length 64", output="refit"):
        folder = tmp_path / output
        files = ["--traffic", traffic, *([] if replay is None else ["--replay", replay]), "--output", folder]
        code, out, err = headstart(f"refit {line}", "--target", worded_target, "--head", head_folder, *files)
        return code, out + err, journal_of(folder) if (folder / "refit.json").exists() else None

    return call


@pytest.mark.slow
def test_from_served_traffic_to_a_decision(refit, served_by, file_of, in_process, tmp_path):
    old, new = served_by("old", 30), served_by("new", 40)
    code, said, found = refit(file_of("logs", [*new, {"no": "row"}]), file_of("old", old))
    assert code == 0, said
    assert found["found"]["unread"] == {"no answer among the keys no": 1}
    assert [words[0] for words in in_process] == ["train"] and found["steps"][0]["command"] not in said
    train, held_out = (read_jsonl(tmp_path / "refit" / "data" / f"{name}.jsonl") for name in ("train", "held_out"))
    learnt = {row["messages"][0]["content"] for row in train}
    assert not learnt & {row["messages"][0]["content"] for row in held_out}, "held out is never learnt from"
    assert sum(row["category"] == "old" for row in train) == len(train) // 2, "half of what is learnt is old"
    parts = {(each["traffic"], each["domain"]): each for each in found["compared"]}
    whole = parts["new", "all"]
    assert {("old", "all"), ("new", "new"), ("old", "old")} < set(parts)
    assert whole["interval"][0] <= whole["ratio"] <= whole["interval"][1] and whole["conversations"] == 13
    assert found["decision"]["deploy"] == (whole["interval"][0] > comparing.LEAST_GAIN)
    page = (tmp_path / "refit" / "refit.html").read_text()
    assert found["decision"]["headline"] in page and "<script" not in page and found["decision"]["headline"] in said
    ran = len(in_process)
    code, said, again = refit(tmp_path / "logs.jsonl", tmp_path / "old.jsonl")
    assert (code, len(in_process), again) == (0, ran, found), "a finished run says its decision again, and does nothing"


@pytest.mark.slow
@pytest.mark.parametrize("is_adapted", [False, True])
def test_where_the_server_has_the_target_no_process_of_ours_holds_a_layer(
    is_adapted, refit, served_by, file_of, python, lora, worded_target, in_process, monkeypatch, tmp_path
):
    """The heads read, and learn from, the states that vLLM gives, of an adapter too, from a head of the base on."""
    adapter = lora(worded_target) if is_adapted else None
    logs = file_of("logs", served_by("new", 40, adapter=adapter))
    line = f"--budget 60s --max-length 64{f' --adapter {adapter}' if is_adapted else ''}"

    def refuses(*_, **__):
        raise AssertionError("a target is loaded with its layers")

    code, said, ours = refit(logs, line=line, output="ours")
    assert code == 0, said
    record = json.loads((Path(ours["trained"]) / "config.json").read_text())["headstart"]
    assert record["training"]["target_adapter"] == (None if adapter is None else str(adapter))
    assert not is_adapted or refit(logs, output="ours")[0] == 2, "without the adapter it is another run"
    monkeypatch.setattr(Target, "load", refuses)
    code, said, found = refit(logs, line=f"{line} --engine vllm --engine-python {python}")
    assert code == 0 and "starting vLLM's server for the states" in said and not found["stateless"], said
    [training] = [words for words in in_process if words[0] == "train" and "engine.name=vllm" in words]
    assert any(word.startswith("engine.server=") for word in training)
    before = [
        [each[key] for key in ("conversations", "before")] for each in (found["compared"][0], ours["compared"][0])
    ]
    assert before[0] == before[1], "the states are the target's"
    assert "vLLM with" in " ".join(found["decision"]["reasons"])
    assert not (tmp_path / "refit" / "states").exists()


@pytest.mark.slow
def test_a_target_without_a_chat_template_learns_continuations_of_prompts(
    refit, served_by, file_of, worded_target, tmp_path
):
    """Rows of `prompt` and `response` are read one behind the other, with nothing in between."""
    rows = served_by("new", 40)
    (worded_target / "chat_template.jinja").unlink()
    texts = [[message["content"] for message in row["messages"]] for row in rows]
    code, said, found = refit(file_of("logs", [{"prompt": asked, "response": text} for asked, text in texts]))
    assert code == 0 and found["decision"] is not None, said
    target, train = Target.load(worded_target), read_jsonl(tmp_path / "refit" / "data" / "train.jsonl")
    assert len(train) > 10 and target.tokenizer.chat_template is None
    plain = {target.tokenizer.decode(target.tokenizer(f"{asked} {text}")["input_ids"]) for asked, text in texts}
    for row in train:
        [sample] = encode_row(Row(row, "train"), target.tokenizer, DataConfig(train=""), target.vocab_size)
        assert target.tokenizer.decode(sample.input_ids.tolist(), skip_special_tokens=True) in plain


def test_too_little_traffic_is_refused_and_leaves_nothing(refit, served_by, file_of, tmp_path):
    code, said, found = refit(file_of("logs", served_by("new", 8)))
    assert code == 2 and "different conversations, at least 12 are needed" in said
    assert found is None and not (tmp_path / "refit").exists()


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_killed(refit, served_by, file_of, monkeypatch):
    """Killed in training, and in the comparison; then other traffic is refused in its folder."""
    from headstart.scripts.unattended import refit as stages

    rows = served_by("new", 40)
    logs, journals = file_of("logs", rows), []

    def dies(*arguments, **options):
        raise SystemExit(137)

    for place, name in ((CommandRunner, "run"), (stages, "compare_by_domain")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, dies)
            code, said, found = refit(logs)
            assert code == 137, said
            journals.append(found)
    code, said, found = refit(logs)
    assert code == 0 and found["decision"] is not None, said
    assert all(found[key] == before[key] for before in journals for key in ("found", "plan"))
    assert journals[1]["trained"] == found["trained"] and len(found["steps"]) == 1, "trained once"
    code, said, _ = refit(file_of("logs", rows[:-1]))
    assert code == 2 and "started with rows" in said and "give a new folder" in said
