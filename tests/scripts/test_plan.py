"""`headstart plan`: the document it writes, for heads, other drafters, synthetic rates and other machines."""

import json

import pytest
from headstart.eval.measurement import step_times

SMALL = "--max-new-tokens 12 --num-draft-tokens 1 --num-draft-tokens 3 --batch-size 1 --batch-size 2 --repeats 1"


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


def test_a_head_is_planned_checked_and_told_to_engines(plan, head_folder, tmp_path):
    code, said, found = plan(f"{SMALL} --head {head_folder} --tree static:3 --context 20 --check all")
    assert code == 0
    cells = {(one["setting"], one["batch_size"], one["load"]): one for one in found["cells"]}
    settings = {"K 1", "K 3", "static:3"}
    assert set(cells) == {(name, size, load) for name in settings for size in (1, 2) for load in ("prompts", "steady")}
    for (_, _, load), one in cells.items():
        assert one["predicted_speedup"] > 0
        assert (one["measured_speedup"] is not None) == (load == "prompts")
        assert one["context"] == (20 if load == "steady" else 10)
    assert found["check"]["num_cells"] == 6 and found["check"]["median_error"] >= 0
    assert {one["setting"] for one in found["step_times"]} == {None, *settings}
    assert {(one["batch_size"], one["context"]) for one in found["recommendation"]} == {
        (1, 10),
        (2, 10),
        (1, 20),
        (2, 20),
    }
    low, high = found["vllm_schedule"][0][0], found["vllm_schedule"][-1][1]
    assert (low, high) == (1, 2) and "batch 2, 10 tokens of context" in said
    assert found["sglang_flags"] is None, "SGLang has no Medusa"
    machine = json.loads((tmp_path / "plan" / "machine.json").read_text())
    assert machine["fixed_ms"] >= 0 and machine["target"] == found["target"]["name"]


def test_batches_are_as_large_as_they_are_called(plan):
    """Three prompts repeat until four rows run, where steps are timed and where they are measured."""
    line = "--max-new-tokens 8 --num-draft-tokens 2 --batch-size 4 --repeats 1 --drafter ngram"
    code, said, found = plan(f"{line} --check all")
    assert code == 0 and {one["batch_size"] for one in found["step_times"]} == {4}
    [cell] = found["cells"]
    assert cell["batch_size"] == 4 and cell["num_timed"] == 1 and cell["measured_ci95"] == [None, None]
    assert "not proved: 1 batch timed, 4 are needed" in " ".join(said.split())


@pytest.mark.slow
def test_what_is_recommended_was_measured(plan):
    code, _, found = plan(f"{SMALL} --drafter ngram")
    assert code == 0
    for one in found["recommendation"]:
        measured = [c for c in found["cells"] if c["batch_size"] == one["batch_size"] and c["measured_speedup"]]
        fastest = max(c["measured_speedup"] for c in measured)
        assert one["measured_speedup"] >= 0.99 * fastest and one["off"] == (fastest <= 1)
    assert all(one["tree"] == "chain" for one in found["cells"]), "n-grams draft chains only"


def test_without_prompts_a_few_general_ones_are_taken(headstart, saved_target, head_folder, tmp_path):
    line = f"plan {SMALL} --limit 2 --tree none --check none --head {head_folder} --output {tmp_path / 'plan'}"
    code, _, err = headstart(line, "--target", saved_target)
    assert code == 0 and "planned on a few general prompts; give --prompts" in err
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert (found["suite"], found["num_prompts"]) == ("general", 2)


def test_synthetic_rates_come_out_and_another_machine_is_predicted(plan, tmp_path):
    code, said, found = plan(f"{SMALL} --synthetic-acceptance 1.0 --machine h100-llama-3.1-8b-vllm")
    assert code == 0, said
    lengths = {one["setting"]: one["acceptance_length"] for one in found["acceptance"]}
    assert lengths["K 1"] == pytest.approx(2, abs=0.4) and lengths["K 3"] > 2.5
    assert found["machine"] == "h100-llama-3.1-8b-vllm" and found["step_times"] == []
    assert found["check"]["num_cells"] == 0 and not (tmp_path / "plan" / "machine.json").exists()
    assert found["vllm_schedule"] == [[1, 256, 3]], "free and certain drafts always pay"
    assert "num_speculative_tokens_per_batch_size" in said


@pytest.mark.slow
def test_synthetic_rates_at_the_cost_of_an_untrained_head(plan):
    code, _, found = plan(f"{SMALL} --synthetic-acceptance 0.9,0.5 --head-type eagle3 --check all")
    assert code == 0 and found["drafter"] == "synthetic 0.9,0.5 like eagle3"
    draft_ms = {one["setting"]: one["draft_ms"] for one in found["step_times"] if one["batch_size"] == 1}
    assert draft_ms["K 3"] > draft_ms["K 1"] > 0
    assert found["check"]["num_cells"] == 4


@pytest.mark.slow
def test_a_profile_that_was_written_can_be_planned_with(plan, tmp_path):
    assert plan(f"{SMALL} --drafter ngram --check none")[0] == 0
    profile = (tmp_path / "plan" / "machine.json").rename(tmp_path / "mine.json")
    code, _, found = plan(f"{SMALL} --drafter ngram --machine {profile} --overwrite")
    assert code == 0 and found["machine"] == "plan"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "give one of --head, --drafter and --synthetic-acceptance"),
        ("--drafter ngram --synthetic-acceptance 0.5", "give one of --head, --drafter and --synthetic-acceptance"),
        ("--synthetic-acceptance high", "--synthetic-acceptance high: expected numbers"),
        ("--synthetic-acceptance 1.5", "acceptance rates [1.5]: expected one or more between 0 and 1"),
        ("--synthetic-acceptance 0.5 --head-type egle", "--head-type egle: expected one of"),
        ("--drafter ngram --head-type eagle3", "--head-type eagle3: goes with --synthetic-acceptance"),
        ("--drafter ngram --suite mt-bench", "give --prompts or --suite, not both"),
        ("--drafter ngram --check some", "check some: expected one of advice, all, none"),
        ("--drafter ngram --tree static:4", "NgramDrafter drafts chains only"),
        ("--drafter ngram --machine nowhere", "--machine nowhere: no such profile"),
        ("--drafter ngram --context 250", "context 250: with"),
        ("--drafter ngrm", "drafter 'ngrm': expected one of"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(line, problem, plan, tmp_path):
    code, said, found = plan(f"{SMALL} {line}")
    assert code == 2 and found is None and not (tmp_path / "plan").exists()
    assert problem in said and len([one for one in said.splitlines() if one.startswith("headstart: ")]) == 1
