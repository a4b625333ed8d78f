"""`headstart eval --engine llama-server`, and `--compare llama-server:PATH`; a script stands for the server."""

import json

import gguf_files
import pytest
from llama_server_files import write_llama_server


@pytest.fixture
def world(tmp_path, saved_target, monkeypatch):
    """A folder with llama-server, T.gguf, whose dequantised folder is the saved target, HEAD.gguf and two prompts."""
    write_llama_server(tmp_path)
    gguf_files.write(tmp_path / "T.gguf", *gguf_files.draft_model())
    gguf_files.write(tmp_path / "HEAD.gguf", *gguf_files.eagle3())
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w5 w6"}\n{"prompt": "w7 w8 w9"}\n')
    monkeypatch.setattr("headstart.heads.loading.gguf_folder", lambda path: saved_target)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SERVED = "eval --engine llama-server --prompts prompts.jsonl --max-new-tokens 6 --repeats 1 --output out"
FILES = "--server-bin llama-server --target T.gguf --head HEAD.gguf"


def test_k_is_swept_and_the_report_written(headstart, world):
    code, _, err = headstart(f"{SERVED} {FILES}")
    assert code == 0, err
    results = json.loads((world / "out" / "report.json").read_text())["results"]
    assert [entry["num_draft_tokens"] for entry in results] == [1, 2, 3, 4, 5, 6, 7]
    assert {entry["engine"] for entry in results} == {"llama-server"}
    assert (world / "out" / "report.html").is_file() and not (world / "out" / "measured.jsonl").exists()


def test_the_table_has_columns_for_what_differs_and_lines_for_what_was_measured(headstart, world):
    code, out, err = headstart(f"{SERVED} {FILES} --num-draft-tokens 2")
    assert code == 0, err
    assert "llama-server: HEAD.gguf, prompts, chain" in out
    assert not any(word in out for word in ("by medians", "rate by position", "of a copy's"))  # a server tells none


def test_a_text_that_differs_exits_with_1(headstart, world, monkeypatch):
    monkeypatch.setenv("FAKE", "other")
    code, out, _ = headstart(f"{SERVED} {FILES} --num-draft-tokens 2")
    assert code == 1 and "2 UNEXPLAINED" in out


def test_llama_cpp_is_timed_beside_our_engine(headstart, world):
    line = "eval --target T.gguf --drafter ngram --prompts prompts.jsonl --max-new-tokens 6 --repeats 1 --output out"
    code, out, err = headstart(f"{line} --compare llama-server:llama-server --dtype float32 --steps eager")
    assert code == 0, err
    entries = json.loads((world / "out" / "report.json").read_text())["results"]
    assert [(entry["engine"], entry["drafter"]) for entry in entries] == [
        ("headstart", "ngram"),
        ("llama.cpp", "no drafts"),
        ("llama.cpp", "ours with ngram"),
    ]
    assert all(entry["ours_over_theirs"] > 0 for entry in entries[1:])


def test_a_yardstick_that_is_not_built_for_this_machine_is_told(headstart, world, monkeypatch):
    monkeypatch.syspath_prepend(world)
    (world / "xllamacpp.py").touch()  # there, and not the package: it does not come up
    line = "eval --target T.gguf --drafter ngram --prompts prompts.jsonl --max-new-tokens 6 --repeats 1 --output out"
    code, _, err = headstart(f"{line} --compare llama-server:xllamacpp --dtype float32 --steps eager")
    assert code == 2 and "xllamacpp is built for any CPU of its kind" in err and "ended with code 1" in err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--target T.gguf --head HEAD.gguf", "name its binary with --server-bin or in LLAMA_SERVER"),
        ("--server-bin nowhere --target T.gguf --head HEAD.gguf", "--server-bin nowhere: no such file"),
        ("--server-bin llama-server --target T.gguf --head runs/a", "takes --target TARGET.gguf and one --head"),
        ("--server-bin llama-server --target MODEL --head HEAD.gguf", "takes --target TARGET.gguf and one --head"),
        (f"{FILES} --tree static", "drafts chains of that head at batch 1, alone"),
        (f"{FILES} --drafter ngram", "drafts chains of that head at batch 1, alone"),
        (f"{FILES} --temperature 1", "is measured greedily"),
        (f"{FILES} --engine sglang", "--engine sglang: expected headstart or llama-server"),
        (f"{FILES} --engine headstart --server-args '-t 2'", "--server-args: goes with --engine llama-server"),
    ],
)
def test_what_it_cannot_be_asked_for_is_refused(headstart, world, options, problem, monkeypatch):
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    code, _, err = headstart(f"{SERVED} {options}")
    assert code == 2 and problem in err
