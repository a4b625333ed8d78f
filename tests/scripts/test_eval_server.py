"""`headstart eval --engine llama-server`; a script stands for the server."""

import json
import sys
from pathlib import Path

import gguf_files
import pytest

STAND_IN = Path(__file__).parents[1] / "serving_stand_in.py"


@pytest.fixture
def world(tmp_path, saved_target, monkeypatch):
    """A folder with llama-server, which notes how it was started, T.gguf, whose dequantised folder is the saved target,
    HEAD.gguf, answers to look up, two prompts and a chat."""
    for name, does in (
        ("llama-server", f'echo "$@" >> {tmp_path}/started\nexec {sys.executable} {STAND_IN} "$@"'),
        ("broken", "echo \"error: unknown model architecture: 'eagle9'\"; exit 3"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    gguf_files.write(tmp_path / "T.gguf", *gguf_files.draft_model())
    gguf_files.write(tmp_path / "HEAD.gguf", *gguf_files.eagle3())
    (tmp_path / "answers.ngrams").touch()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w5 w6"}\n{"prompt": "w7 w8 w9"}\n')
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "w5"}]}\n')
    monkeypatch.setattr("headstart.targets.loading.gguf_folder", lambda path: saved_target)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SERVED = "eval --engine llama-server --prompts prompts.jsonl --max-new-tokens 6 --repeats 1 --output out"
FILES = "--server-bin llama-server --target T.gguf"


def served_in(world):
    return json.loads((world / "out" / "report.json").read_text())["served"]


def test_without_a_load_one_question_is_asked_at_a_time(headstart, world):
    """A head's drafts and look-ups, beside the server without; that look-ups know the prompts' answers is said."""
    code, out, err = headstart(f"{SERVED} {FILES} --head HEAD.gguf --head answers.ngrams --prompts chats.jsonl")
    assert code == 0, err
    served = served_in(world)
    assert [(one["num_draft_tokens"], one["load"]["concurrency"]) for one in served] == [(4, 1), (8, 1)]
    assert all(one["texts"]["report"]["identical"] == 3 and one["speedup"] for one in served)
    plain, drafting, _, looking_up = (world / "started").read_text().splitlines()
    assert "--spec-type" not in plain and " -md HEAD.gguf --spec-type draft-eagle3 --spec-draft-n-max 4 " in drafting
    assert " --spec-type ngram-cache --lookup-cache-dynamic answers.ngrams " in looking_up
    assert "head answers.ngrams, 8 drafts, 1 at a time: its look-ups keep earlier answers" in out
    assert "head HEAD.gguf, 4 drafts, 1 at a time: its look-ups" not in out


def test_under_a_load_it_is_measured_as_other_servers_are(headstart, world):
    """With room for all questions at once, and a K of each head's own."""
    heads = "--engine-args '-t 2' --drafter head:HEAD.gguf@2 --drafter head:HEAD.gguf@3"
    code, out, err = headstart(f"{SERVED} {FILES} {heads} --concurrency 1 --concurrency 3")
    assert code == 0, err
    served = served_in(world)
    assert [(one["num_draft_tokens"], one["load"]["concurrency"]) for one in served] == [(2, 1), (2, 3), (3, 1), (3, 3)]
    assert all(one["acceptance"]["acceptance_length"] > 2 and one["engine"] == "llama-server" for one in served)
    plain, drafting, _, deeper = (world / "started").read_text().splitlines()
    assert "--spec-type" not in plain and "--spec-draft-n-max 2" in drafting and "--spec-draft-n-max 3" in deeper
    assert all("-m T.gguf" in line and "-np 3 -c " in line and "-t 2" in line for line in (plain, drafting))
    assert "llama-server with head HEAD.gguf, 2 drafts: 1 at a time:" in out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--target T.gguf --head HEAD.gguf", "name its binary with --server-bin or in LLAMA_SERVER"),
        ("--server-bin nowhere --target T.gguf --head HEAD.gguf", "--server-bin nowhere: no such file"),
        ("--server-bin broken --target T.gguf --head HEAD.gguf", "ended with code 3: error: unknown model"),
        ("--server-bin llama-server --target MODEL --head HEAD.gguf", "MODEL: llama-server serves TARGET.gguf"),
        (f"{FILES} --head runs/a", "--head runs/a: llama-server takes HEAD.gguf, or answers.ngrams to look up"),
        (f"{FILES} --head no.gguf", "--head no.gguf: no such file"),
        (f"{FILES} --head answers.ngrams --num-draft-tokens 3", "looks up at most 8 tokens, as it decides"),
        (f"{FILES} --head HEAD.gguf --tree dynamic", "--tree: is not for servers"),
        (f"{FILES} --head HEAD.gguf --steps eager", "--steps: is not for servers"),
        (f"{FILES} --drafter ngram", "looks up in a file of answers: --head answers.ngrams"),
        (f"{FILES} --engine triton", "--engine: name 'triton': expected headstart or vllm or sglang or llama-server"),
        (f"{FILES} --engine headstart --engine-args '-t 2'", "--engine: args: goes with another engine"),
    ],
)
def test_what_it_cannot_be_asked_for_is_refused(headstart, world, options, problem, monkeypatch):
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    code, _, err = headstart(f"{SERVED} {options}")
    assert code == 2 and problem in err
