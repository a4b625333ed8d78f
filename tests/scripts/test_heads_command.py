"""`headstart heads` says what there is and what it costs, from a config alone; `train` refuses misfits at once."""

import json
import time

import pytest
from headstart.heads.registry import HEADS
from headstart.heads.target import Target
from transformers import LlamaConfig

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
    code, out, _ = headstart(f"heads --target {tmp_path}")
    assert code == 0 and f"{eagle3['parameters']:,}" in out


def test_a_family_that_does_not_fit_is_said_in_its_row(headstart, tiny_model, tmp_path):
    tiny_model("gpt_neox", num_hidden_layers=1).config.save_pretrained(tmp_path)
    code, out, _ = headstart(f"heads --target {tmp_path} --json")
    problems = {row["name"]: row["problem"] for row in json.loads(out)}
    assert code == 0 and "head.num_layers 2: expected 1 to 1" in problems["draft_lm"]
    assert problems["medusa"] is None
    assert headstart(f"heads --target {tmp_path}")[0] == 0


def test_a_target_that_is_none_is_refused(headstart, tmp_path):
    code, out, err = headstart(f"heads --target {tmp_path / 'gone'}")
    assert (code, out) == (2, "") and err == f"headstart: target {tmp_path / 'gone'}: no such folder\n"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("head.feature_layers=[1,2,9]", "feature layer 9: "),
        ("head.draft_vocab_size=100", "draft vocabulary of 100 tokens: should be between 1 and the target's 61"),
    ],
)
def test_train_refuses_a_misfit_before_it_loads_the_target(
    override, problem, headstart, run_config, tmp_path, monkeypatch
):
    def load(*args, **kwargs):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", load)
    code, out, err = headstart("train", run_config("eagle3"), override)
    assert (code, out) == (2, "") and problem in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()
