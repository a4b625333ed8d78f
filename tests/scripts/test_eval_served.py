"""`headstart eval` in servers: what a user reads of it, as a page, as figures and as an exit code."""

import json
import os
import shutil
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.engines.heads import build_head, head_class, save_head
from headstart.engines.servers import setting
from headstart.engines.servers.setting import EngineSetting
from headstart.eval.figures.recorded_training import LearntPrompts
from headstart.eval.report.results.drafter_words import served_words
from headstart.eval.report.served_page import measured_schedule
from headstart.eval.served.load import Load
from headstart.eval.served.questions import Question, Questions
from headstart.eval.suites.prompts import DEFAULT_CHAT, ChatOptions
from headstart.scripts.evaluating.eval_served import (
    WantedMeasurement,
    WantedServers,
    drafts_of,
    questions_in,
    size_words,
)
from headstart.scripts.evaluating.evaluate import evaluate
from headstart.targets.adapters import WEIGHTS
from headstart.targets.target import Target
from safetensors.torch import load_file, save_file
from serving_stand_in import StandIn, listening
from transformers import AutoTokenizer


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [1, 5 + i]}) + "\n" for i in range(6)))
    return str(path)


def report_of(output):
    page = (output / "report.html").read_text()
    return json.loads((output / "report.json").read_text()), page


@pytest.mark.timed
def test_a_running_server_s_figures_are_a_page_with_the_sentence_first(rows, saved_target, tmp_path, capsys):
    with (tmp_path / "rows.jsonl").open("a") as file:
        picture = {"type": "image", "image": "none.png"}
        file.write(json.dumps({"messages": [{"role": "user", "content": [picture]}]}) + "\n")
    how = {"target": str(saved_target), "prompts": [rows], "max_new_tokens": 12, "repeats": 1, "concurrency": [1, 3]}
    with listening(StandIn(step=0.005)) as plain, listening(StandIn(step=0.005, accepted=[2])) as drafting:
        how |= {"server": drafting, "baseline_server": plain, "slo": "ttft=1,tpot=500ms"}
        evaluate(**how, output=tmp_path / "out")
    report, page = report_of(tmp_path / "out")
    one, three = report["served"]
    assert one["speedup"] > 1.5 and one["acceptance"]["acceptance_length"] == pytest.approx(2.75)
    assert (one["order"], three["load"]["concurrency"]) == ("ABBA", 3) and one["drafted"]["goodput"] > 0
    assert [result["drafter"] for result in report["served"]] == ["its own drafts"] * 2
    assert [result["unreadable"] for result in report["served"]] == [one["unreadable"]] * 2
    assert f"rows are left out, as a picture is missing or broken; the first: {one['unreadable'][0]}" in page
    said = "with its own drafts: 1 at a time: "
    assert f"vLLM {said}" in page and "times as fast [" in page and "<svg" in page
    assert said in capsys.readouterr().out
    assert not (tmp_path / "out" / "measured.jsonl").exists()


def test_thinking_that_the_template_does_not_read_is_said_of_servers_too(saved_target, tmp_path, capsys):
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "w5"}]}\n')
    how: dict[str, Any] = {"prompts": [str(tmp_path / "chats.jsonl")], "max_new_tokens": 8}
    questions_in(WantedMeasurement(target=str(saved_target), chat=ChatOptions(thinking=True), **how))
    assert "does not read enable_thinking: --thinking changes nothing" in capsys.readouterr().err


@pytest.fixture
def python(tmp_path):
    """In the place of an environment with vLLM, which notes how it was started."""
    script, place = tmp_path / "python", os.path.dirname(os.path.dirname(__file__))
    line = f'echo "$@" >> {tmp_path}/started\nexec {sys.executable} {place}/serving_stand_in.py "$@"'
    script.write_text(f"#!/bin/sh\n{line}\n")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def in_vllm(rows, saved_target, python, tmp_path):
    """in_vllm(drafter=...): the result of each drafter, and the page."""

    def measured(**how):
        output, few = tmp_path / "out", {"max_new_tokens": 8, "repeats": 1}
        evaluate(target=str(saved_target), prompts=[rows], engine="vllm", engine_python=python, output=output,
                 **few, **how)  # fmt: skip
        report, page = report_of(output)
        return report["served"], page

    return measured


def test_a_head_is_exported_and_served_at_every_k(in_vllm, saved_target, tmp_path):
    target = Target.load(saved_target)
    head = build_head(head_class("eagle3").config_class(type="eagle3"), target)
    save_head(head, tmp_path / "head")
    heads = [f"head:{tmp_path / 'head'}@2", f"head:{tmp_path / 'head'}@3", "ngram:8@5"]
    results, _ = in_vllm(drafter=heads, engine_args="--max-model-len 64")
    assert [result["num_draft_tokens"] for result in results] == [2, 3, 5]
    started = (tmp_path / "started").read_text()
    assert started.count("--max-model-len 64") == 6 and started.count("--no-enable-prefix-caching") == 6
    assert all(f'"num_speculative_tokens": {k}' in started for k in (2, 3, 5))
    assert '"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 8' in started
    assert not (tmp_path / "out" / "served_heads").exists()


def test_prompts_and_a_target_that_a_head_was_not_made_for_are_said(in_vllm, rows, saved_target, tmp_path, capsys):
    """Two of the six prompts are those of its training, and the served target has other weights."""
    decode = AutoTokenizer.from_pretrained(saved_target).decode
    learnt = LearntPrompts.of([decode([1, 5]), decode([1, 6])], num_rows=2)
    weights = load_file(saved_target / "model.safetensors")
    for moved in (0.0, 1.0):
        target = shutil.copytree(saved_target, tmp_path / f"target{moved}")
        save_file(
            {name: one + moved for name, one in weights.items()},
            target / "model.safetensors",
            metadata={"format": "pt"},
        )
        head = build_head(head_class("eagle3").config_class(type="eagle3"), Target.load(target))
        save_head(head, (run := tmp_path / f"run{moved}") / "final", training={"prompts": asdict(learnt)})
        [result], page = in_vllm(head=[str(run)], overwrite=True)
        assert result["learnt"] == pytest.approx(2 / 6, abs=1e-3)
        assert "33% of the prompts are prompts that the head was trained on" in page
        assert ("other weights than those that the head was trained on" in capsys.readouterr().err) == bool(moved)


def test_a_head_that_adapts_its_target_is_not_measured_on_the_bare_one(in_vllm, saved_target, tmp_path):
    """Medusa-2: its adapter is merged into the target that it drafts for."""
    save_head(
        build_head(head_class("medusa").config_class(type="medusa"), Target.load(saved_target)), tmp_path / "head"
    )
    for name in (WEIGHTS, "adapter_config.json"):
        (tmp_path / "head" / name).touch()
    with pytest.raises(BadInput, match="drafts for the target with its adapter"):
        in_vllm(head=[str(tmp_path / "head")])


@pytest.mark.parametrize("what", ["head", "head with a window", "draft-model", "baseline"])
def test_blocks_of_a_drafter_that_was_trained_anew_are_not_kept(what, saved_target, python, tmp_path):
    """Its folder and the command are the same as those of the killed measurement; a window is in the export alone."""
    wanted, found, drafter = WantedServers(EngineSetting(name="vllm", python=python)), list[Any](), tmp_path / "drafter"
    if is_head := what.startswith("head"):
        head = build_head(head_class("eagle3").config_class(type="eagle3"), Target.load(saved_target))
        save_head(head, drafter)
    else:
        shutil.copytree(saved_target, drafter)
    spec = f"{'head' if is_head else 'draft-model'}:{drafter}@3"
    how: dict[str, Any] = {"drafters": [spec]}
    how = {"drafters": ["ngram@2"], "baseline": spec} if what == "baseline" else how
    asked = WantedMeasurement(target=str(saved_target), prompts=[], chat=DEFAULT_CHAT, max_new_tokens=8, **how)
    for moved in (0.0, 0.0, 1.0):
        if moved and what == "head with a window":
            asked = replace(asked, window="64")
        else:
            weights = load_file(drafter / "model.safetensors")
            save_file({name: one + moved for name, one in weights.items()}, drafter / "model.safetensors")
        found += drafts_of(wanted.served_by, wanted, asked, tmp_path / "heads", longest=64)
    assert found[0] == found[1] and found[1].sides == found[2].sides
    assert found[1].weights[0] == found[2].weights[0] and found[1].weights != found[2].weights
    if asked.window:
        assert served_words(found[2].drafter) == "head drafter, window 64, 3 drafts"


@pytest.mark.parametrize(("has_gpu", "starts"), [(True, 7), (False, 2)])
def test_how_much_is_measured_is_said_before(has_gpu, starts, python, tmp_path, monkeypatch):
    monkeypatch.setattr(setting, "GPU", tmp_path if has_gpu else tmp_path / "none")
    wanted = WantedServers(EngineSetting(name="vllm", python=python), concurrency=[1, 8])
    how: dict[str, Any] = {"target": "T", "prompts": [], "chat": DEFAULT_CHAT, "max_new_tokens": 8}
    asked = WantedMeasurement(**how, drafters=["ngram@2", "ngram@4", "ngram@6"])
    said = size_words(wanted, asked, Questions([Question("a:1", "", {}, None)] * 30))
    product = "drafters 3 x loads 2 x blocks 12 x questions 30 of up to 8 tokens"
    assert said == f"to measure: {product}; server starts for each drafter: {starts}"


def test_a_head_is_measured_beside_another_drafter(in_vllm, capsys):
    """Both servers draft, and the page says which is which."""
    [result], page = in_vllm(drafter=["ngram@5"], baseline_drafter="ngram@2")
    assert '_tokens": 2' in result["commands"][0] and '_tokens": 5' in result["commands"][1]
    assert "vLLM with look-ups, 5 drafts, beside look-ups, 2 drafts: 1 at a time:" in page
    assert "leave drafts off" not in capsys.readouterr().out


def test_under_an_adapter_both_sides_serve_it_and_are_asked_by_its_name(in_vllm, saved_target, lora):
    adapter = lora(saved_target)
    [result], _ = in_vllm(drafter=["ngram@2"], adapter=[str(adapter)])
    assert all(f"--lora-modules {adapter.name}={adapter}" in command for command in result["commands"])
    assert result["failed"] == [] and result["speedup"] is not None, "the stand-in answers under that name alone"


def test_k_by_batch_size_is_what_was_proved_at_each_load():
    """The fastest K whose interval proves a gain, up to the next load; 0 where none does; of one drafter alone."""
    table = {  # speedup and whether it is proved, by K and requests at a time
        ("head", 2): {1: (1.5, True), 4: (1.3, True), 16: (0.9, False)},
        ("head", 4): {1: (2.0, True), 4: (1.4, False), 16: (1.1, False)},
        ("ngram", 4): {1: (1.2, True), 4: (1.6, True), 16: (1.5, True)},
    }
    results: list[Any] = [
        SimpleNamespace(
            drafter=f"{name} at K {k}",
            num_draft_tokens=k,
            load=Load(size),
            order="ABBA" * 2,
            num_questions=12,
            speedup=speedup,
            speedup_ci95=(0.95 * speedup if pays else 0.5 * speedup, 1.1 * speedup),
            pays=pays,
            is_right=True,
            is_flattered=False,
            rests_on_loops=lambda _: False,
        )
        for (name, k), by_load in table.items()
        for size, (speedup, pays) in by_load.items()
    ]
    assert measured_schedule(results) == [[1, 3, 4], [4, 15, 2], [16, 16, 0]]
    assert measured_schedule([result for result in results if result.load.concurrency == 1]) == [[1, 1, 4]]
    assert measured_schedule([result for result in results if not result.pays]) == []
    few: list[Any] = [SimpleNamespace(**{**vars(result), "order": "ABBA"}) for result in results]
    assert measured_schedule(few) == [[1, 1, 4]], "two pairs of blocks decide nothing"
