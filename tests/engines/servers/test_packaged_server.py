"""llama.cpp's server in a Python package takes a binary's place, with the same flags. A stand-in for the package: its
server ends where it is asked for bad.gguf."""

import importlib
import os
import sys
from pathlib import Path

import pytest
from headstart.base.errors import BadInput
from headstart.benchmarks.plain_decoding import LlamaServer
from headstart.engines.llamacpp import SPEC_TYPES as TYPES_BY_METHOD
from headstart.engines.servers.llama_server import LlamaServerEngine
from headstart.engines.servers.xllamacpp_server import FIELDS, parameters

SPEC_TYPES = sorted(TYPES_BY_METHOD.values())
KINDS = {kind: f"COMMON_SPECULATIVE_TYPE_{kind.upper().replace('-', '_')}" for kind in (*SPEC_TYPES, "none")}
PACKAGE = f"""
import enum
from types import SimpleNamespace as Fields

common_speculative_type = enum.IntEnum("common_speculative_type", {list(KINDS.values())})

def CommonParams():
    draft = Fields(mparams=Fields())
    return Fields(model=Fields(), cpuparams=Fields(), speculative=Fields(draft=draft, ngram_cache=Fields()))

class Server:
    def __init__(self, params):
        print("error loading model: " + params.model.path, flush=True)
        raise RuntimeError("Failed to init server, please check the input params.")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The stand-in, which Python finds here and in processes started from here. t.gguf and bad.gguf are there too."""
    (tmp_path / "xllamacpp.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("t.gguf", "bad.gguf"):
        Path(name).touch()
    yield importlib.import_module("xllamacpp")
    del sys.modules["xllamacpp"]


@pytest.mark.parametrize("kind", SPEC_TYPES)
def test_the_package_is_told_what_the_binary_is_told(package, kind):
    line = f"-m t.gguf -c 99 -np 1 -t 2 -md h.gguf --spec-type {kind} --spec-draft-n-max 4 --spec-draft-p-min 0"
    told = parameters(package, [*line.split(), "--host", "127.0.0.1", "--port", "7"])
    assert (told.model.path, told.n_ctx, told.n_parallel, told.cpuparams.n_threads) == ("t.gguf", 99, 1, 2)
    assert [each.name for each in told.speculative.types] == [KINDS[kind]]
    draft = told.speculative.draft
    assert (draft.mparams.path, draft.n_max, draft.p_min) == ("h.gguf", 4, 0.0)
    assert (told.hostnames, told.port) == (["127.0.0.1"], 7)
    plain = parameters(package, ["-m", "t.gguf"])
    assert [each.name for each in plain.speculative.types] == [KINDS["none"]] and not hasattr(plain, "n_ctx")


def test_it_is_named_in_a_binarys_place(package):
    _, dash, module, *flags = LlamaServerEngine().command("xllamacpp", "t.gguf", [], ["-t", "2"])
    assert (dash, importlib.import_module(module).FIELDS) == ("-m", FIELDS)
    assert flags == "-m t.gguf -t 2".split()


@pytest.mark.parametrize(
    ("target", "args", "problem"),
    [
        ("bad.gguf", [], "ended with code 1: error loading model: bad.gguf"),
        ("t.gguf", ["-ngl", "99"], "ended with code 2: xllamacpp: error: unrecognized arguments: -ngl 99"),
    ],
)
def test_its_own_words_say_why_it_does_not_come_up(package, target, args, problem):
    command = LlamaServerEngine().command("xllamacpp", target, [], args)
    with pytest.raises(BadInput, match=problem), LlamaServer(command):
        pass


def test_without_the_package_the_user_is_told_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="--server-bin xllamacpp: not installed; pip install xllamacpp"):
        LlamaServerEngine().command("xllamacpp", "t.gguf", [], [])
