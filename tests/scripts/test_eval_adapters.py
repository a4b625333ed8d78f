"""`headstart eval --adapter`: the same head and prompts under each adapter of the target, and what is refused."""

import json

import pytest
from headstart.heads.target import Target
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
def test_each_adapter_has_a_result_beside_the_target(headstart, saved_target, head_folder, lora, words, tmp_path):
    adapters = [lora(saved_target, seed=1), lora(saved_target, seed=2)]
    given = [word for adapter in adapters for word in ("--adapter", adapter)]
    files = ["--target", saved_target, "--head", head_folder, "--prompts", words]
    code, out, _ = headstart(f"eval {HOW}", *files, *given, "--output", tmp_path / "all")
    report = json.loads((tmp_path / "all" / "report.json").read_text())
    results = [entry for entry in report["results"] if entry["drafter"] == "ngram"]
    names = ["prompts", *(f"prompts under {adapter.name}" for adapter in adapters)]
    assert code == 0 and [entry["suite"] for entry in results] == names
    assert len(report["results"]) == 6, "the head is measured under each as well, though trained without"
    assert report["target"]["fingerprint"] == Target.load(saved_target).fingerprint
    assert report["target"]["adapter"] is None is results[0]["adapter"]
    said = [entry["adapter"] for entry in results[1:]]
    assert [(entry["path"], entry["base"]) for entry in said] == [(str(path), str(saved_target)) for path in adapters]
    assert said[0]["fingerprint"] != said[1]["fingerprint"]
    for entry in report["results"]:
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == 4, "each held against its own target"
    page = (tmp_path / "all" / "report.html").read_text()
    assert all(name in page and name in " ".join(out.split()) for name in names)
    rounds = [json.loads(line) for line in (tmp_path / "all" / "rounds.jsonl").read_text().splitlines()]
    assert {row["suite"] for row in rounds} == set(names)
    for adapter, entry in zip(adapters, results[1:], strict=True):
        folder = merged(saved_target, adapter, tmp_path / f"merged-{adapter.name}")
        alone = ["--target", folder, "--prompts", words, "--output", tmp_path / f"alone-{adapter.name}"]
        assert headstart(f"eval {HOW}", *alone)[0] == 0
        [same] = json.loads((tmp_path / f"alone-{adapter.name}" / "report.json").read_text())["results"]
        for key in ("num_rounds", "num_committed", "acceptance_length", "repetition"):
            assert entry[key] == same[key], (adapter, key)


def test_what_cannot_be_measured_is_refused_before_a_target_is_loaded(headstart, saved_target, lora, words, tmp_path):
    adapter = lora(saved_target)
    for name in ("x", "x.gguf"):
        (tmp_path / name).touch()
    files = ["--prompts", words, "--output", tmp_path / "out"]
    for line, problem in (
        ("--adapter gone", "adapter gone: no such folder"),
        (f"--adapter {adapter} --adapter {adapter}", f"--adapter {adapter}: is given twice"),
        (
            f"--adapter {adapter} --compare llama-server:{tmp_path}/x:{tmp_path}/x.gguf",
            "llama-server computes without it",
        ),
    ):
        code, out, err = headstart(f"eval {HOW} --target no-such-target {line}", *files)
        assert code == 2 and problem in err and err.count("\n") == 1 and not out, err
        assert not (tmp_path / "out").exists()


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
    line = "plan --drafter ngram --seconds 5 --num-draft-tokens 2 --batch-size 1 --check none"
    assert headstart(line, *files, "--output", tmp_path / "out")[0] == 0
    target = json.loads((tmp_path / "out" / "plan.json").read_text())["target"]
    assert target["adapter"]["base"] == str(saved_target)
    assert target["fingerprint"] != Target.load(saved_target).fingerprint
