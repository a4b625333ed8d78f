"""`headstart plan --served`: llama-server's rounds, our engine's acceptance; a script stands for the server."""

import json

import pytest
from headstart.eval.measurement.servers.llama_server import ServerFiles
from headstart.heads.families import served_families
from llama_server_files import write_llama_server

LINE = "plan --max-new-tokens 13 --repeats 1 --seconds 600 --output out --served served --server-bin llama-server"


@pytest.fixture
def plan(headstart, saved_target, head_folder, prompts, tmp_path, monkeypatch):
    """plan("--check all"): exit code, what was said, plan.json."""
    monkeypatch.chdir(tmp_path)
    write_llama_server(tmp_path)
    (tmp_path / "served").mkdir()
    for name in ("head.gguf", "target.gguf"):
        (tmp_path / "served" / name).touch()
    monkeypatch.setattr(ServerFiles, "served", (served_families()["eagle3"], "eagle3"))
    rows = [{"prompt": f"w{i} w5 w9"} for i in range(1, 6)]
    path = prompts(*rows)

    def call(line):
        code, out, err = headstart(f"{LINE} {line}", "--target", saved_target, "--head", head_folder, "--prompts", path)
        file = tmp_path / "out" / "plan.json"
        return code, out + err, json.loads(file.read_text()) if file.is_file() else None

    return call


def test_predictions_are_our_acceptance_at_the_servers_rounds_and_are_checked_there(plan):
    code, said, found = plan("--check all --num-draft-tokens 1 --num-draft-tokens 2 --num-draft-tokens 3")
    assert code == 0, said
    rounds = {time["setting"]: time["verify_ms"] for time in found["step_times"]}
    assert rounds == pytest.approx({None: 10.0, "K 1": 16.0, "K 2": 16.0, "K 3": 16.0})  # what the script answers
    accepted = {one["setting"]: one["acceptance_length"] for one in found["acceptance"]}
    for cell in found["cells"]:
        # 12 tokens behind the prefill's own, in rounds of 16 ms instead of steps of 10; the last round may be cut
        assert cell["predicted_speedup"] == pytest.approx(accepted[cell["setting"]] * 10 / 16, rel=0.1)
        assert cell["measured_speedup"] == pytest.approx(2 * 10 / 16) and cell["num_timed"] == 5
    assert found["engine"] == "llama-server" and found["check"]["num_cells"] == 3
    assert found["vllm_schedule"] == [] and found["sglang_flags"] is None
    assert found["recommendation"][0]["setting"] == "K 1", "of equals the one that drafts least"


def test_with_little_time_fewer_prompts_are_planned_for_and_all_of_them_are_measured(plan, monkeypatch):
    monkeypatch.setattr("headstart.eval.plan.served.answer_seconds", lambda scope: 1.0)
    code, said, found = plan("--check all --num-draft-tokens 1 --num-draft-tokens 2 --seconds 100")
    assert code == 0, said
    # 20 of 100 s are for timing K 1 and 2 with and without drafts, of which estimates may fill 0.8: 4 answers each
    assert found["num_prompts"] == 4 and {cell["num_timed"] for cell in found["cells"]} == {4}
    assert found["budget"]["num_prompts_given"] == 5 and found["budget"]["left_out"] == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--batch-size 4", "--served: plans chains at batch 1, greedily"),
        ("--temperature 0.7", "--served: plans chains at batch 1, greedily"),
        ("--machine epyc-1-thread-quickstart", "--served served: goes with --head, and without --machine"),
        ("--served nowhere", "--served nowhere: no head.gguf"),
    ],
)
def test_what_it_cannot_plan_is_refused_in_a_line(line, problem, plan):
    code, said, found = plan(line)
    assert code == 2 and found is None
    assert problem in said
