"""`headstart eval --adapter`, `--checkpoint`: the same head and prompts under each, and what is refused."""

import json
import re

import pytest
import torch
from headstart.scripts.evaluating.eval_drafts import states_in
from headstart.targets.target import Target
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

HOW = "--drafter ngram --max-new-tokens 24 --repeats 1"


@pytest.fixture
def words(prompts):
    return prompts({"prompt": "w5 w6 w7"}, {"prompt": "w9 w3 w5"}, {"prompt": "w1 w7 w8 w3"}, {"prompt": "w44 w3"})


def merged(folder, adapter, output):
    """The target as peft itself merges it, with its tokenizer."""
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter).merge_and_unload().save_pretrained(
        output
    )
    AutoTokenizer.from_pretrained(folder).save_pretrained(output)
    return output


@pytest.mark.slow
def test_each_adapter_has_the_figures_of_the_target_that_it_is_merged_into(
    headstart, saved_target, head_folder, lora, words, tmp_path
):
    adapters = [lora(saved_target, seed=1), lora(saved_target, seed=2)]
    given = [word for adapter in adapters for word in ("--adapter", adapter)]
    files = ["--target", saved_target, "--head", head_folder, "--prompts", words]
    assert headstart(f"eval {HOW}", *files, *given, "--output", tmp_path / "all")[0] == 0
    report = json.loads((tmp_path / "all" / "report.json").read_text())
    assert len(report["results"]) == 6, "the head is measured under each as well, though trained without"
    plain, *results = [entry for entry in report["results"] if entry["drafter"] == "ngram"]
    assert report["target"]["adapter"] is None is plain["adapter"]
    rounds = [json.loads(line) for line in (tmp_path / "all" / "rounds.jsonl").read_text().splitlines()]
    assert {row["suite"] for row in rounds} == {"prompts", *(entry["suite"] for entry in results)}
    for adapter, entry in zip(adapters, results, strict=True):
        assert (entry["suite"], entry["adapter"]["path"]) == (f"prompts under {adapter.name}", str(adapter))
        folder = merged(saved_target, adapter, tmp_path / f"merged-{adapter.name}")
        alone = ["--target", folder, "--prompts", words, "--output", tmp_path / f"alone-{adapter.name}"]
        assert headstart(f"eval {HOW}", *alone)[0] == 0
        [same] = json.loads((tmp_path / f"alone-{adapter.name}" / "report.json").read_text())["results"]
        for key in ("num_rounds", "acceptance_length", "repetition"):
            assert entry[key] == same[key], (adapter, key)


def test_an_adapter_that_is_given_twice_is_refused(headstart, saved_target, lora, words, tmp_path):
    adapter = lora(saved_target)
    line = f"eval {HOW} --target no-such-target --adapter {adapter} --adapter {adapter}"
    code, out, err = headstart(line, "--prompts", words, "--output", tmp_path / "out")
    assert code == 2 and f"--adapter {adapter}: is given twice" in err and err.count("\n") == 1 and not out, err


def test_an_adapter_of_another_target_is_refused(headstart, saved_target, tiny_model, lora, words, tmp_path):
    tiny_model("llama", hidden_size=64).save_pretrained(tmp_path / "wide")
    adapter = lora(tmp_path / "wide")
    for command in (f"eval {HOW} --prompts", "plan --drafter ngram --seconds 5 --prompts"):
        given = [words, "--target", saved_target, "--adapter", adapter, "--output", tmp_path / "out"]
        code, _, err = headstart(command, *given)
        assert code == 2 and "adapter_config.json: base_model_name_or_path" in err
        assert "has other weights than target" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_plan_is_made_for_an_adapter(headstart, saved_target, lora, words, tmp_path):
    files = ["--target", saved_target, "--adapter", lora(saved_target), "--prompts", words]
    line = "plan --drafter ngram --seconds 5 --num-draft-tokens 2 --batch-size 1"
    assert headstart(line, *files, "--output", tmp_path / "out")[0] == 0
    target = json.loads((tmp_path / "out" / "plan.json").read_text())["target"]
    assert target["adapter"]["base"] == str(saved_target)
    assert target["fingerprint"] != Target.load(saved_target).fingerprint


@pytest.fixture
def checkpoints(saved_target, tiny_model, tmp_path):
    """A folder of two checkpoints of the target in training, that of fewer steps last by its name."""
    for step, moved in ((9, 0.02), (10, 0.2)):
        model = AutoModelForCausalLM.from_pretrained(saved_target)
        with torch.no_grad():
            source = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.add_(moved * torch.randn(parameter.shape, generator=source))
        model.save_pretrained(tmp_path / "policy" / f"checkpoint-{step}")
    return tmp_path / "policy"


def test_a_folder_in_the_home_folder_is_found(checkpoints, monkeypatch):
    monkeypatch.setenv("HOME", str(checkpoints.parent))
    assert states_in("~/policy") == [str(checkpoints / f"checkpoint-{step}") for step in (9, 10)]
    assert states_in("~/policy/checkpoint-9") == [str(checkpoints / "checkpoint-9")]


def test_one_head_is_measured_under_every_checkpoint_of_a_folder(
    headstart, saved_target, head_folder, checkpoints, words, tmp_path
):
    files = ["--target", saved_target, "--head", head_folder, "--prompts", words, "--checkpoint", checkpoints]
    line = "eval --num-draft-tokens 2 --max-new-tokens 8 --repeats 1"
    code, out, err = headstart(line, *files, "--output", tmp_path / "out")
    assert code == 0, err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    names = ["prompts", "prompts under checkpoint-9", "prompts under checkpoint-10"]
    assert [entry["suite"] for entry in report["results"]] == names
    assert len({entry["suite_digest"] for entry in report["results"]}) == 1, "the same prompts"
    said = [entry["adapter"] for entry in report["results"][1:]]
    assert [one["path"] for one in said] == [str(checkpoints / f"checkpoint-{step}") for step in (9, 10)]
    own = Target.load(checkpoints / "checkpoint-9").fingerprint
    assert said[0]["fingerprint"] == own and all(one["base"] == str(saved_target) for one in said)
    for entry in report["results"]:
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == 4, "each held against its own weights"
    first = report["results"][0]["acceptance_length"]
    assert re.search(rf"{first:.2f}\s\[\d\.\d\d,\s\d\.\d\d\]", out), "with its interval"
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("Acceptance length on prompts by checkpoint") and "step of the target&#39;s training" in page


def test_a_checkpoint_of_another_model_is_refused(headstart, saved_target, tiny_model, words, tmp_path):
    tiny_model("llama", num_hidden_layers=2).save_pretrained(tmp_path / "step_1")
    given = ["--target", saved_target, "--prompts", words, "--checkpoint", tmp_path / "step_1"]
    code, _, err = headstart(f"eval {HOW}", *given, "--output", tmp_path / "out")
    assert code == 2 and "step_1/config.json: num_hidden_layers 2, the target has 4" in err.splitlines()[-1]
