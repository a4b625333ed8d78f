"""The two commands do their work, and every bad input is one line, exit code 2 and no folder."""

import json
import resource
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import typer
from drafted import untrained
from headstart.base.jsonl import read_jsonl
from headstart.engines.heads import head_class, save_head
from headstart.scripts import cli
from headstart.targets.target import Target


@pytest.mark.fast_only(head_type=["eagle3"])
def test_train_then_eval(head_type, headstart, run_config, saved_target, prompts, tmp_path):
    code, out, err = headstart("train", run_config(head_type), "train.max_steps=4")
    assert code == 0, err
    final = tmp_path / "run" / "final"
    assert sorted(p.name for p in final.iterdir()) == ["config.json", "model.safetensors"]
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 4
    file = prompts({"prompt": "w5 w9 w13"}, {"turns": ["w7", "w8"]}, {"input_ids": [1, 30, 31]}, {"prompt": "w1"})
    output = tmp_path / "out"
    line = f"eval --target {saved_target} --head {final} --prompts {file} --output {output} --max-new-tokens 12"
    code, out, err = headstart(line, "--repeats", 1, "--limit", 3, "--batch-size", 1, "--batch-size", 2)
    assert code == 0, err
    assert str(output / "report.html") in out and (output / "report.json").is_file()
    assert head_class(head_type).title in (output / "report.html").read_text()
    report = json.loads((output / "report.json").read_text())
    assert set(report) == {"schema_version", "environment", "target", "results"}
    assert report["environment"]["num_threads"] >= 1 and report["target"]["dtype"] == "float32"
    assert [entry["batch_size"] for entry in report["results"]] == [1, 2]
    for entry in report["results"]:
        assert (entry["drafter"], entry["suite"], entry["num_prompts"]) == (head_type, "prompts", 3)
        assert entry["trained"]["max_length"] == 256 and entry["draft_vocabulary"] is None
        assert entry["lossless"]["checked"] == entry["lossless"]["identical"] == 3
    assert len(read_jsonl(output / "rounds.jsonl")) == 2 * (3 + 2)


def test_drafters_without_training(headstart, head_folder, saved_target, prompts, tmp_path):
    file = prompts({"prompt": "w5 w9 w5 w9"}, {"prompt": "w7 w8"})
    line = f"eval --target {saved_target} --prompts {file} --max-new-tokens 12 --repeats 1 --num-draft-tokens 3"
    specs = ["ngram", "ngram:2@2", "suffix", f"draft-model:{saved_target}", f"head:{head_folder}"]
    options = [part for spec in specs for part in ("--drafter", spec)]
    code, _, err = headstart(line, *options, "--output", tmp_path / "out")
    assert code == 0, err
    results = json.loads((tmp_path / "out" / "report.json").read_text())["results"]
    assert [r["drafter"] for r in results] == ["ngram", "ngram:2", "suffix", "draft-model", "medusa"]
    assert results[3]["acceptance_length"] == 4.0
    for entry in results:
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == 2
        assert entry["speedup"] > 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_text_that_differs_is_exit_code_1(
    temperature, headstart, head_folder, saved_target, prompts, tmp_path, monkeypatch
):
    """A bonus token chosen behind a rejected draft: the report is written and the command fails."""
    from headstart.eval.decoding.verify import ACCEPT_RULES, AcceptRule, exact

    def one_too_far(drafted):
        accepted = exact(drafted)
        behind = (accepted.num_accepted + 1).clamp(max=drafted.depth)
        return replace(accepted, bonus=drafted.chosen().gather(1, behind[:, None]).squeeze(1))

    monkeypatch.setitem(ACCEPT_RULES, "exact", AcceptRule("exact", one_too_far))
    line = f"eval --target {saved_target} --head {head_folder} --prompts {prompts({'prompt': 'w5 w9'})} --repeats 3"
    code, out, err = headstart(line, "--output", tmp_path / "out", "--max-new-tokens", 40, "--temperature", temperature)
    assert code == 1
    [entry] = json.loads((tmp_path / "out" / "report.json").read_text())["results"]
    [said] = [line for line in err.splitlines() if line.startswith("headstart: ")]
    assert said.startswith("headstart: Medusa, 4 drafts, on prompts: ")
    assert entry["lossless"]["unexplained"] >= 1 and "UNEXPLAINED" in out
    first = entry["lossless"]["divergences"][0]["unproved"] + 1
    assert said.endswith(f"not proved to be the target's own, the first at token {first} behind prompt 0")


@pytest.mark.usefixtures("warming_up")
def test_a_target_that_the_engine_decodes_wrongly_is_one_line(headstart, saved_target, prompts, tmp_path, monkeypatch):
    """Behind a prompt longer than the check at load, each token believes to be one further on; drafts would have been
    measured all the same."""
    from headstart.targets.check import SHORT

    read = Target.read_slots

    def one_further(self, input_ids, positions, *rest, **how):
        is_behind = positions.shape[1] == 1 and int(positions.min()) > SHORT
        return read(self, input_ids, positions + is_behind, *rest, **how)

    monkeypatch.setattr(Target, "read_slots", one_further)
    rows = prompts({"prompt": "w5 w9 " * SHORT})
    line = f"eval --target {saved_target} --drafter ngram --prompts {rows} --output"
    result = headstart(line, tmp_path / "out")
    refused(result, "the engine's text differs from the model's own at token ", outputs=[tmp_path / "out"])
    assert result[2].endswith(" behind prompts.jsonl:1: it cannot be measured\n")


@pytest.mark.parametrize("command", ["", "train", "eval"])
def test_help_names_every_option(command, headstart):
    code, out, _ = headstart(f"{command} --help")
    assert code == 0
    root = typer.main.get_command(cli.app)
    known = root.commands[command] if command else root  # pyright: ignore
    for parameter in known.params:
        for name in parameter.opts if parameter.param_type_name == "option" else [parameter.metavar]:
            assert name in out
    if not command:
        assert "train" in out and "eval" in out


def test_every_option_of_eval_is_in_a_panel_of_the_help():
    """Target, output and the decoding in between, in that order; what is common comes first in each."""
    panels = {"Target": "target", "Drafts": "head", "Prompts": "prompts", "Decoding": "max_new_tokens"}
    panels |= {"Measuring": "batch_size", "Engine": "engine", "Servers": "server", "Output": "output"}
    root = typer.main.get_command(cli.app)
    options = [option for option in root.commands["eval"].params if option.name != "help"]  # pyright: ignore
    found = list(dict.fromkeys(option.rich_help_panel for option in options))
    assert found == list(panels)
    firsts = [next(option.name for option in options if option.rich_help_panel == panel) for panel in found]
    assert firsts == list(panels.values())


# Bad input


def refused(result, problem, *, outputs=()):
    code, out, err = result
    assert code == 2, err
    [said] = [line for line in err.splitlines(keepends=True) if line.startswith("headstart: ")]
    assert problem in said and err.endswith(said) and said.endswith("\n"), "behind what was going on"
    assert out == "" and not any(path.exists() for path in outputs)


@pytest.mark.parametrize("limit", [1, 5000])
def test_a_full_disk_is_one_line_that_names_the_file(limit, headstart, run_config, tmp_path):
    """No file of more bytes can be written, as on a disk that is full: at the first row of metrics, and at the head."""
    run, allowed = run_config(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, allowed[1]))
    try:
        code, _, err = headstart("train", run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    line = err.splitlines()[-1]
    assert code == 2 and "Traceback" not in err
    assert line.startswith("headstart: ") and f" {tmp_path}/" in line and line.endswith("File too large")
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize(
    ("changes", "rows", "problem"),
    [
        ({"--head": "{damaged}"}, [{"prompt": "w5"}], "{damaged}/model.safetensors: "),
        ({"--head": "{other}"}, [{"prompt": "w5"}], "head {other}: trained on target tiny-qwen3"),
        ({}, [], "prompts.jsonl: empty file"),
        ({"--num-draft-tokens": "9"}, [{"prompt": "w5"}], "num_draft_tokens 9: this drafter drafts 1 to 4 tokens"),
        ({"--dtype": "int8"}, [{"prompt": "w5"}], "dtype 'int8': expected one of auto"),
        ({"--device": "abacus"}, [{"prompt": "w5"}], "device abacus: "),
        ({"--output": "{file}"}, [{"prompt": "w5"}], "{file}"),
        ({"--drafter": "draft-model:{mute}"}, [{"prompt": "w5"}], "drafter draft-model:{mute}: "),
        ({"--steps": "fast"}, [{"prompt": "w5"}], "steps 'fast': expected one of eager, graph, compile"),
    ],
)
def test_eval_refuses_in_one_line(
    changes, rows, problem, headstart, head_folder, saved_target, prompts, tiny_target, tmp_path
):
    names = {name: tmp_path / name for name in ("damaged", "other", "file")}
    if changes.get("--drafter") == "draft-model:{mute}":  # the same model without its tokenizer
        names["mute"] = shutil.copytree(saved_target, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    names["damaged"].mkdir()
    names["file"].write_text("a file where the folder should be")
    (names["damaged"] / "config.json").write_text((head_folder / "config.json").read_text())
    (names["damaged"] / "model.safetensors").write_bytes((head_folder / "model.safetensors").read_bytes()[:99])
    if changes.get("--head") == "{other}":
        save_head(untrained("medusa", tiny_target("qwen3")), names["other"])
    options = {
        "--target": saved_target,
        "--head": head_folder,
        "--prompts": prompts(*rows),
        "--output": tmp_path / "out",
    }
    options |= {"--max-new-tokens": "8", "--repeats": "1"} | changes
    arguments = [str(part).format(**names) for pair in options.items() for part in pair]
    refused(headstart("eval", *arguments), problem.format(**names), outputs=[tmp_path / "out"])
    assert names["file"].is_file()


@pytest.mark.slow
def test_the_module_for_many_devices_refuses_alike(run_config):
    command = [sys.executable, "-m", "headstart.train", str(run_config()), "train.max_step=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (
        2,
        "headstart: train.max_step: unknown key; did you mean train.max_steps?\n",
    )
