"""`headstart export` and `headstart check` from the command line; `headstart heads` says what there is at what cost."""

import json
import re
import time
from pathlib import Path

import pytest
import torch
import typer
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS, build_head, save_head
from headstart.heads.eagle3 import Eagle3Config
from headstart.scripts.export_command import check, export
from headstart.scripts.heads_command import to_begin_with
from headstart.scripts.push_command import push
from headstart.targets.target import Target
from transformers import LlamaConfig


@pytest.fixture
def run(saved_target, tmp_path):
    head = build_head(
        Eagle3Config(draft_vocab_size=4),
        Target.load(saved_target),
        draft_token_ids=torch.arange(4, 8),
    )
    save_head(head, tmp_path / "run" / "final")
    return tmp_path / "run"


def test_a_run_is_exported_checked_and_its_commands_told(run, tmp_path, saved_target, capsys):
    out = tmp_path / "served"
    export(run, out, to="vllm")
    said = capsys.readouterr()
    assert said.err == "" and f"written to {out}: eagle3 for vllm (eagle3)" in said.out
    assert f'vllm serve {saved_target} --speculative-config \'{{"method":"eagle3","model":"{out}"' in said.out
    assert f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {out}" in said.out
    check(out)
    assert capsys.readouterr().out == f"{out}: eagle3: fine\n"
    check(out, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"folder": str(out), "layout": "eagle3", "ok": True, "problems": []}
    with pytest.raises(BadInput, match="exists already"):
        export(run, out, to="sglang")


@pytest.mark.parametrize("to", ["vllm", "speculators", "llama.cpp"])
def test_a_head_passes_the_contract_of_what_it_is_exported_or_pushed_for(saved_target, tmp_path, capsys, to):
    """`norm_before_residual` is in all of them, as published heads have it; SGLang alone has no such layer."""
    config = Eagle3Config(type="eagle3", norm_before_residual=True, num_depths=3)
    run = save_head(build_head(config, Target.load(saved_target)), tmp_path / "head")
    export(run, tmp_path / "out", to=to)
    said = capsys.readouterr()
    assert said.err == "" and f"eagle3 for {to}" in said.out and "sglang" not in said.out
    push(run, "me/mine", base_model="org/base", to=to, dry_run=True)
    assert "model.safetensors" in capsys.readouterr().out


def test_problems_are_listed_and_exit_with_1(run, tmp_path, capsys):
    out = tmp_path / "served"
    export(run, out, to="vllm")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "attention_bias": True, "bias": True}))
    capsys.readouterr()
    for as_json in (False, True):
        with pytest.raises(typer.Exit) as caught:
            check(out, as_json=as_json)
        assert caught.value.exit_code == 1
    plain, _, listed = capsys.readouterr().out.partition("{")
    assert plain.count("\n") == 3 and plain.endswith("2 problems\n") and "vLLM takes it for a bias" in plain
    assert len(json.loads("{" + listed)["problems"]) == 2


def test_answers_are_exported_where_they_are_looked_up(saved_target, tmp_path, headstart):
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"input_ids": [4, 5, 6, 7], "prompt_length": 2}) + "\n")
    code, out, _ = headstart("export", answers, tmp_path / "out", "--to", "llama.cpp", "--target", saved_target)
    assert code == 0 and f"--spec-type ngram-cache --lookup-cache-dynamic {tmp_path}/out/answers.ngrams" in out
    assert (tmp_path / "out" / "answers.ngrams").stat().st_size > 0
    code, out, _ = headstart("export", answers, tmp_path / "sg", "--to", "sglang", "--target", saved_target)
    assert code == 0 and f"--speculative-ngram-external-corpus-path {tmp_path}/sg/corpus.jsonl" in out
    assert [json.loads(line) for line in (tmp_path / "sg" / "corpus.jsonl").read_text().splitlines()] == ["w6 w7"]
    for to, more, problem in [
        ("vllm", ["--target", saved_target], "vLLM's suffix decoding"),
        ("llama.cpp", [], "--target: name the target"),
        ("llama.cpp", ["--target", saved_target, "--outtype", "f16"], "have no --dtype"),
    ]:
        code, _, err = headstart("export", answers, tmp_path / "other", "--to", to, *more)
        assert code == 2 and problem in err and not (tmp_path / "other").exists()


KEYS = {"name", "idea", "reads", "parameters", "memory_bytes", "serving_bytes", "problem"}


def test_the_families_and_what_they_read(headstart):
    code, out, _ = headstart("heads --json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0 and list(rows) == list(HEADS)
    assert all(set(row) == KEYS and row["idea"].endswith(".") for row in rows.values())
    assert all(row["parameters"] is row["memory_bytes"] is row["serving_bytes"] is None for row in rows.values())
    assert rows["medusa"]["reads"] == {"feature_layers": [], "post_norm": True}
    assert rows["eagle3"]["reads"] == {"feature_layers": None, "post_norm": False}
    assert rows["draft_lm"]["reads"] == {"feature_layers": [], "post_norm": False}
    code, out, _ = headstart("heads")
    assert code == 0 and all(name in out for name in HEADS)


def test_what_they_cost_on_a_target_of_70b(headstart, tmp_path):
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    started = time.perf_counter()
    code, out, err = headstart(f"heads --target {tmp_path} --json")
    assert code == 0 and time.perf_counter() - started < 20, err
    rows = {row["name"]: row for row in json.loads(out)}
    eagle3 = rows["eagle3"]
    assert eagle3["reads"]["feature_layers"] == [2, 40, 77]
    assert eagle3["memory_bytes"] == 16 * eagle3["parameters"] and eagle3["serving_bytes"] == 2 * eagle3["parameters"]
    fc, layer = 3 * 8192**2, 2 * (64 + 8) * 128 * 2 * 8192 - 64 * 128 * 8192 + 3 * 8192 * 28672
    assert eagle3["parameters"] == fc + layer + 4 * 8192 + 128256 * 8192
    code, out, _ = headstart(f"heads --target {tmp_path} --engine vllm")
    assert code == 0 and f"{eagle3['parameters']:,}" in out
    begin, why = out.splitlines()[-2:]
    assert begin.startswith("Begin with eagle3: runs/eagle3.yaml.") and why.startswith("Why: of the heads that vllm")
    assert "--engine abacus: expected headstart or vllm" in headstart(f"heads --target {tmp_path} --engine abacus")[2]


@pytest.mark.parametrize(
    ("fitting", "engine", "on_gpu", "num_modules", "begin", "why"),
    [
        (list(HEADS), "headstart", False, 0, "eagle3", "saved most"),
        (list(HEADS), "headstart", True, 0, "block", "one pass"),
        (list(HEADS), "vllm", True, 0, "eagle3", "saved most"),
        (list(HEADS), "vllm", True, 1, "mtp", "module that was trained with it"),
        (["medusa"], "vllm", False, 1, "medusa", "vllm drafts with it"),
        ([], "sglang", False, 0, "look-ups", "no family"),
    ],
)
def test_the_family_to_begin_with_follows_target_engine_and_hardware(fitting, engine, on_gpu, num_modules, begin, why):
    first, second = to_begin_with(fitting, engine=engine, on_gpu=on_gpu, num_modules=num_modules)
    assert first.startswith(f"Begin with {begin}:") and why in second
    assert all(Path("configs", run).is_file() for run in re.findall(r"runs/\w+\.yaml", first))


def test_a_family_that_does_not_fit_is_said_in_its_row(headstart, tiny_model, tmp_path):
    tiny_model("gpt_neox", num_hidden_layers=1).config.save_pretrained(tmp_path)
    code, out, _ = headstart(f"heads --target {tmp_path} --json")
    problems = {row["name"]: row["problem"] for row in json.loads(out)}
    assert code == 0 and "head.num_layers 2: expected 1 to 1" in problems["draft_lm"]
    assert problems["medusa"] is None
    assert headstart(f"heads --target {tmp_path}")[0] == 0
