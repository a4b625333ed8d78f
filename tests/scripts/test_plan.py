"""`headstart plan`: the document it writes, for heads and other drafters."""

import json

import pytest
from headstart.eval.measurement import step_times

SMALL = "--max-new-tokens 8 --batch-size 1 --num-draft-tokens 1"


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    """As few rounds as still go through all of it."""
    monkeypatch.setattr(step_times, "NUM_ROUNDS", 3)
    monkeypatch.setattr(step_times, "NUM_PASSES", 1)


@pytest.fixture
def plan(headstart, saved_target, prompts, tmp_path):
    """plan("--drafter ngram ..."): exit code, what was said, plan.json."""
    rows = [{"prompt": "w1 w5 w9"}, {"prompt": "w1 w7 w8 w3 w22"}, {"prompt": "w1 w30"}]
    path = prompts(*rows)

    def call(line):
        output = tmp_path / "plan"
        code, out, err = headstart(f"plan {line}", "--target", saved_target, "--prompts", path, "--output", output)
        file = output / "plan.json"
        return code, out + err, json.loads(file.read_text()) if file.is_file() else None

    return call


def test_a_head_is_planned_measured_by_its_confidence_too_and_told_to_engines(plan, head_folder):
    code, said, found = plan(f"{SMALL} --head {head_folder} --num-draft-tokens 3 --tree dynamic:3 --batch-size 2")
    assert code == 0
    cells = {(one["setting"], one["verify_cost"] is None, one["batch_size"]): one for one in found["cells"]}
    settings = {"K 1", "K 3", "dynamic:3"}
    assert {key for key in cells if key[1]} == {(name, True, size) for name in settings for size in (1, 2)}
    for (_, is_fixed, _), one in cells.items():
        assert one["predicted_speedup"] > 0 if is_fixed else one["measured_speedup"] > 0
        assert one["context"] == 8
    assert found["check"]["num_cells"] >= 2 and found["check"]["median_error"] >= 0
    assert {one["setting"] for one in found["step_times"]} == {None, *settings}
    assert [(one["batch_size"], one["context"]) for one in found["recommendation"]] == [(1, 8), (2, 8)]
    low, high = found["vllm_schedule"][0][0], found["vllm_schedule"][-1][1]
    assert (low, high) == (1, 2) and "2 at a time: " in said and "trained on" not in said
    assert found["sglang_flags"] is None, "SGLang has no Medusa"
    sure = [(setting, size) for setting, is_fixed, size in cells if not is_fixed]
    assert sure == [("K 3", 1), ("K 3", 2)] and "3 drafts by confidence" in said, "it estimates what is accepted"


def test_batches_are_as_large_as_they_are_called(plan):
    """Three prompts repeat until four rows run, where steps are timed and where they are measured."""
    code, said, found = plan("--max-new-tokens 8 --num-draft-tokens 2 --batch-size 4 --drafter ngram")
    assert code == 0 and {one["batch_size"] for one in found["step_times"]} == {4}
    [cell] = found["cells"]
    assert cell["tree"] == "chain", "n-grams draft chains only"
    assert cell["batch_size"] == 4 and cell["num_timed"] == 1 and cell["measured_ci95"] == [None, None]
    assert "not proved: 1 batch timed, 4 are needed" in " ".join(said.split())


def test_a_plan_on_prompts_of_the_heads_training_says_so(plan, headstart, run_config, tmp_path):
    """One of the three prompts is that of a training row."""
    assert headstart("train", str(run_config()))[0] == 0
    head = tmp_path / "run" / "final"
    code, said, _ = plan(f"{SMALL} --tree none --head {head}")
    assert code == 0 and "33% of the prompts are prompts that the head was trained on" in " ".join(said.split())


def test_without_prompts_a_few_general_ones_are_taken(headstart, saved_target, head_folder, tmp_path):
    how = "--max-new-tokens 8 --num-draft-tokens 1 --batch-size 1 --limit 2 --tree none"
    line = f"plan {how} --head {head_folder} --output {tmp_path / 'plan'}"
    code, _, err = headstart(line, "--target", saved_target)
    assert code == 0 and "planned on a few general prompts; give --prompts" in err
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert (found["suite"], found["num_prompts"]) == ("general", 2)
