"""`headstart refit` as a whole: what it makes, what it refuses, and that it goes on where it was killed."""

import json

import pytest
from headstart.configs.jsonl import read_jsonl
from headstart.scripts.unattended import comparing
from headstart.scripts.unattended.comparing import SHARES
from headstart.scripts.unattended.steps import CommandRunner


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
    others = [{**row, "domain": "others"} for row in served_by("others", 10, by="another")]
    rows = [{**row, "timestamp": 1770000000 + 604800 * (i % 2)} for i, row in enumerate([*new, *others])]
    code, said, found = refit(file_of("logs", [*rows, {"no": "row"}]), file_of("old", old))
    assert code == 0, said
    assert found["found"]["unread"] == {"no answer among the keys no": 1}
    lines = {int(origin.rpartition(":")[2]) for origin in found["foreign"]["origins"]}
    assert lines == set(range(len(new) + 1, len(rows) + 1)), "the answers of others are found, and no more"
    assert {part["week"] for part in found["drift"]} == {"all", "2026-W06", "2026-W07"}
    assert {(part["traffic"], part["domain"]) for part in found["drift"]} >= {("new", "all"), ("new", "new")}
    assert [words[0] for words in in_process] == ["train"] and found["steps"][0]["command"] in said
    train, held_out = (read_jsonl(tmp_path / "refit" / "data" / f"{name}.jsonl") for name in ("train", "held_out"))
    learnt = {row["messages"][0]["content"] for row in train}
    assert not learnt & {row["messages"][0]["content"] for row in held_out}, "held out is never learnt from"
    assert sum(row["category"] == "old" for row in train) == len(train) // 2, "half of what is learnt is old"
    assert [each["share"] for each in found["shares"]] == [0.0, *SHARES], "heads between the old and the trained one"
    config = json.loads((tmp_path / "refit" / "head" / "config.json").read_text())
    assert found["head"].endswith("/refit/head") and config["headstart"]["training"]["share"] in SHARES
    [whole] = [each for each in found["compared"] if (each["traffic"], each["domain"]) == ("new", "all")]
    assert whole["interval"][0] < whole["ratio"] < whole["interval"][1] and whole["conversations"] == 13
    assert found["decision"]["deploy"] == (whole["interval"][0] > comparing.LEAST_GAIN)
    page = (tmp_path / "refit" / "refit.html").read_text()
    assert found["decision"]["headline"] in page and "<script" not in page and found["decision"]["headline"] in said
    ran = len(in_process)
    code, said, again = refit(tmp_path / "logs.jsonl", tmp_path / "old.jsonl")
    assert (code, len(in_process), again) == (0, ran, found), "a finished run says its decision again, and does nothing"


def test_where_the_answers_are_anothers_nothing_is_learnt(refit, served_by, file_of, in_process):
    code, said, found = refit(file_of("logs", served_by("new", 20, by="another")))
    assert code == 0 and not in_process, said
    assert "are this target's: too few to learn from. Is it the target that served them?" in said
    assert found["decision"]["headline"] == comparing.STAYS and not found["decision"]["deploy"]


def test_too_little_traffic_is_refused_and_leaves_nothing(refit, served_by, file_of, tmp_path):
    code, said, found = refit(file_of("logs", served_by("new", 8)))
    assert code == 2 and "different conversations, at least 12 are needed" in said
    assert found is None and not (tmp_path / "refit").exists()


@pytest.mark.slow
def test_a_folder_of_other_traffic_is_refused(refit, served_by, file_of):
    rows = served_by("new", 20, by="another")
    assert refit(file_of("logs", rows))[0] == 0
    code, said, _ = refit(file_of("logs", rows[:-1]))
    assert code == 2 and "started with rows" in said and "give a new folder" in said


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_killed(refit, served_by, file_of, monkeypatch):
    """Killed behind the first batch that was read, in training, and behind the second head of the choice."""
    from headstart.scripts.unattended import reading
    from headstart.scripts.unattended import refit as stages

    logs = file_of("logs", served_by("new", 40))
    whole_keep, whole_run, calls = reading.append, CommandRunner.run, []

    def dies(path, readings):
        whole_keep(path, readings)
        calls.append(len(readings))
        raise SystemExit(137)

    monkeypatch.setattr(reading, "append", dies)
    assert refit(logs)[0] == 137
    monkeypatch.setattr(reading, "append", lambda path, rows: (calls.append(len(rows)), whole_keep(path, rows)))

    def dies_too(self, name, words, *, until=None):
        raise SystemExit(137)

    monkeypatch.setattr(CommandRunner, "run", dies_too)
    code, said, before = refit(logs)
    assert code == 137 and sum(calls) == before["foreign"]["read"], "no row is read twice"
    monkeypatch.setattr(CommandRunner, "run", whole_run)
    whole_share = stages.share_of

    def dies_again(share, readings):
        if share == SHARES[1]:
            raise SystemExit(137)
        return whole_share(share, readings)

    monkeypatch.setattr(stages, "share_of", dies_again)
    assert refit(logs)[0] == 137
    monkeypatch.setattr(stages, "share_of", whole_share)
    code, said, found = refit(logs)
    assert code == 0, said
    assert [each["share"] for each in found["shares"]] == [0.0, *SHARES]
    assert all(found[key] == before[key] for key in ("found", "own", "foreign", "drift", "plan"))
    assert found["decision"] is not None


def test_what_an_adapter_served_is_foreign_to_the_target_without_it(refit, served_by, file_of, lora, worded_target):
    logs = file_of("logs", served_by("new", 20, adapter=lora(worded_target, lora_alpha=64)))
    code, said, found = refit(logs)
    assert code == 0 and found["decision"]["headline"] == comparing.STAYS, said
    assert "are this target's: too few to learn from. Is it the target that served them?" in said


@pytest.mark.slow
def test_a_head_of_the_base_learns_on_from_what_an_adapter_served(
    refit, served_by, file_of, lora, worded_target, tmp_path
):
    adapter = lora(worded_target)
    logs = file_of("logs", served_by("new", 40, adapter=adapter))
    code, said, found = refit(logs, line=f"--budget 60s --max-length 64 --adapter {adapter}")
    assert code == 0 and found["foreign"]["origins"] == [], said
    written = (tmp_path / "refit" / "refit.yaml").read_text()
    assert f"adapter: {adapter}" in written
    record = json.loads((tmp_path / "refit" / "head" / "config.json").read_text())["headstart"]
    assert record["training"]["target_adapter"] == str(adapter)
    [whole] = [each for each in found["compared"] if (each["traffic"], each["domain"]) == ("new", "all")]
    assert whole["conversations"] == 13 and whole["ratio"] is not None
    if found["decision"]["deploy"]:
        assert any(f"--adapter {adapter}" in command for command in found["decision"]["commands"])
    code, said, _ = refit(logs, output="refit")
    assert code == 2 and "started with" in said, "another adapter is another run"
