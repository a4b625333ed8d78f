"""`headstart export` and `headstart check` from the command line."""

import json

import pytest
import torch
import typer
from headstart.configs.errors import BadInput
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.registry import build_head, save_head
from headstart.heads.target import Target
from headstart.scripts.export_command import check, export


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


def test_problems_are_listed_and_exit_with_1(run, tmp_path, capsys):
    out = tmp_path / "served"
    export(run, out, to="vllm")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "norm_before_residual": True, "bias": True}))
    capsys.readouterr()
    for as_json in (False, True):
        with pytest.raises(typer.Exit) as caught:
            check(out, as_json=as_json)
        assert caught.value.exit_code == 1
    plain, _, listed = capsys.readouterr().out.partition("{")
    assert plain.count("\n") == 3 and plain.endswith("2 problems\n") and "vLLM takes it for a bias" in plain
    assert len(json.loads("{" + listed)["problems"]) == 2


def test_what_is_no_head_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="no config.json in it"):
        check(tmp_path)


def test_answers_are_exported_for_llama_cpp_alone(saved_target, tmp_path, headstart):
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"input_ids": [4, 5, 6, 7], "prompt_length": 2}) + "\n")
    code, out, _ = headstart("export", answers, tmp_path / "out", "--to", "llama.cpp", "--target", saved_target)
    assert code == 0 and f"--spec-type ngram-cache --lookup-cache-dynamic {tmp_path}/out/answers.ngrams" in out
    assert (tmp_path / "out" / "answers.ngrams").stat().st_size > 0
    for to, more, problem in [
        ("vllm", ["--target", saved_target], "vLLM's suffix decoding"),
        ("llama.cpp", [], "--target: name the target"),
        ("llama.cpp", ["--target", saved_target, "--outtype", "f16"], "have no --dtype"),
    ]:
        code, _, err = headstart("export", answers, tmp_path / "other", "--to", to, *more)
        assert code == 2 and problem in err and not (tmp_path / "other").exists()
