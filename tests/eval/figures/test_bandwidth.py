"""Bytes of a decode step as counted by hand on the tiny targets, and a copy that tells the machine's bandwidth."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafted import untrained
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.decoding.loop import Generation, Round
from headstart.eval.figures import environment
from headstart.eval.figures.bandwidth import (
    Bandwidth,
    baseline_bandwidth,
    cache_bytes,
    copy_bandwidth,
    experts_per_token,
    weight_bytes,
)
from headstart.eval.measurement.measure import measure
from headstart.eval.measurement.result import Result
from headstart.eval.measurement.summary import unmeasured
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.report.results.document import build_report
from headstart.eval.suites.prompts import Suite
from headstart.targets.loading import TargetConfig
from headstart.targets.skeleton import load_skeleton
from headstart.targets.target import Target
from transformers import AutoModelForCausalLM, BambaConfig


@pytest.fixture(scope="session")
def tiny_target(tiny_target):
    """Of four layers, two of which may be windows."""
    return lambda family: tiny_target(family, num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(tiny_target):
    """Not that of the other files, which has two layers."""
    return tiny_target("llama")


def result(used: Bandwidth) -> Result:
    suite, config = Suite("one", [[1]]), MeasureConfig()
    empty = unmeasured(suite, config, chain(3), drafter="ngram")
    return replace(empty, baseline_bandwidth=used)


SIZES = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads".split()
LLAMA = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32 + 61 * 32  # layers, final norm, output layer
QWEN2 = LLAMA + 4 * (32 + 2 * 16)  # biases of queries, keys, values; its tied table is the output layer
EXPERT = 3 * 32 * 24
QWEN3_MOE = 4 * (2 * 32 * 64 + 2 * 32 * 32 + 2 * 16 + 2 * 32 + 4 * 32) + 32 + 61 * 32  # no experts, but the router


@pytest.mark.parametrize(
    ("family", "num_parameters"),
    [("llama", LLAMA), ("qwen2", QWEN2), ("qwen3_moe", QWEN3_MOE + 4 * 2 * EXPERT)],
)
def test_weights_are_all_but_what_a_step_leaves_unread(family, num_parameters, tiny_target):
    assert weight_bytes(tiny_target(family)) == 4 * num_parameters


def test_tokens_read_the_experts_that_any_of_them_picks(tiny_target):
    """2 of 4 for one token, 3 expected for two, 3.5 for three; a dense target reads the same for any number."""
    target = tiny_target("qwen3_moe")
    for num_tokens, experts in ((1, 2), (2, 3), (3, 3.5)):
        assert weight_bytes(target, num_tokens=num_tokens) == 4 * (QWEN3_MOE + 4 * experts * EXPERT)
    assert weight_bytes(tiny_target("llama"), num_tokens=7) == 4 * LLAMA


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, 0.25),
        ({"num_experts": 8, "top_k_experts": 4}, 0.5),  # Gemma 4
        ({"moe_num_experts": 8, "moe_topk": 2}, 0.25),  # Aria
        ({"num_experts": 8, "num_experts_per_tok": [2, 4]}, 0.375),  # Hunyuan, by layer
        ({"ffn_config": SimpleNamespace(moe_num_experts=8, moe_top_k=2)}, 0.25),  # DBRX
        ({"num_experts": 8}, 1),
        ({"num_experts": None, "top_k_experts": None}, 1),
    ],
)
def test_the_experts_that_a_token_picks_are_known_in_the_words_of_each_config(said, share):
    assert experts_per_token(SimpleNamespace(**said)) == share


def test_a_skeleton_reads_as_much(tiny_target, tmp_path):
    target = tiny_target("qwen3_moe")
    target.model.save_pretrained(tmp_path)
    skeleton = load_skeleton(TargetConfig(path=str(tmp_path)))
    assert weight_bytes(skeleton, num_tokens=3) == weight_bytes(target, num_tokens=3)


@pytest.mark.parametrize(
    ("family", "token_layers", "heads", "head_dim"),
    [
        ("llama", 4 * 20, 2, 8),
        ("qwen3_moe", 4 * 20, 2, 16),
        ("gpt_neox", 4 * 20, 4, 8),  # a key head per query head
        ("mistral", 4 * 8, 1, 8),  # a window of 8 in every layer
        ("gemma3", 2 * 8 + 2 * 20, 2, 16),  # and in every other one
    ],
)
def test_keys_and_values_of_20_tokens(family, token_layers, heads, head_dim, tiny_target):
    assert cache_bytes(tiny_target(family), 20) == 4 * 2 * token_layers * heads * head_dim


def test_a_recurrent_layer_is_read_whole_whatever_the_context(tiny_target):
    """Mamba-2 in layers 0 and 2: a window of 4 tokens in 64 + 2 * 8 channels, and 8 heads of 8 x 8; attention in 1."""
    mamba: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    sizes = {key: value for key, value in tiny_target("llama").config.to_dict().items() if key in SIZES}
    config = BambaConfig(**{**sizes, "num_hidden_layers": 3}, **mamba, mamba_chunk_size=8, attn_layer_indices=[1])
    target = Target.of(AutoModelForCausalLM.from_config(config), name="hybrid", fingerprint="")
    states = 2 * (80 * 4 + 8 * 8 * 8)
    for context in (20, 40):
        assert cache_bytes(target, context) == 4 * (states + 2 * context * 2 * 8)


def test_half_the_dtype_is_half_the_bytes(tiny_target):
    target = tiny_target("llama")
    target.model.bfloat16()
    assert weight_bytes(target) == 2 * LLAMA and cache_bytes(target, 20) == 20 * 256


def test_the_baselines_bytes_over_its_decoding_time(target):
    """Rows of 3 and 1 tokens, three rounds behind the prefill; the second row ends after the first of them."""
    rounds = [Round(9.0, 0, [0, 0], [1, 1], [1, 1])]
    rounds += [Round(0.001, 0, [0, 0], [1, num], [1, num]) for num in (1, 0, 0)]
    run = Generation([[5, 5, 5, 5], [5, 5]], rounds)
    tokens = (4 + 2) + (5 + 3) + (6 + 3)
    read = 3 * 4 * LLAMA + 512 * tokens
    prompts = [[1, 2, 3], [1]]
    used = baseline_bandwidth(target, [(prompts, [run, run])])
    assert used.gigabytes_per_second == pytest.approx(read / 0.003 / 1e9, abs=1e-4) and used.share_of_copy is None
    share = result(used).with_share(10.0).baseline_bandwidth.share_of_copy
    assert share == pytest.approx(0.0136, abs=1e-4)
    used = baseline_bandwidth(target, [([[1]], [Generation([[2]], [Round(1.0, 0, [0], [1], [1])])])])
    assert used == Bandwidth(None, None), "nothing was decoded"
    assert result(used).with_share(10.0).baseline_bandwidth == used


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch):
    """Under a clock that says 0.1, 0.4, 0.2, 0.3 seconds: the first copy, which touches fresh pages, is left out."""
    times = iter([0.0, 0.1, 1.0, 1.4, 2.0, 2.2, 3.0, 3.3])
    monkeypatch.setattr("headstart.eval.decoding.loop.time.perf_counter", lambda: next(times))
    monkeypatch.setattr("headstart.eval.figures.bandwidth.COPY_BYTES", {"cpu": 1000})
    assert copy_bandwidth(torch.device("cpu")) == pytest.approx(2 * 1000 / 0.3)


def test_a_report_measures_the_machine_once_and_says_what_share_is_used(target, monkeypatch):
    calls = []
    monkeypatch.setattr(environment, "copy_bandwidth", lambda device: calls.append(device) or 4e9)
    head = untrained("medusa", target)
    suite, config = Suite("two", [[1, 5, 9], [1, 7]]), MeasureConfig(max_new_tokens=8, num_repeats=1)
    results = [measure(target, head, suite, config, name="medusa")[0] for _ in range(2)]
    report = build_report(target, results)
    assert calls == [target.device]
    assert report.environment.copy_gigabytes_per_second == 4.0
    for one in report.results:
        used = one.baseline_bandwidth
        assert used.gigabytes_per_second is not None and used.gigabytes_per_second > 0
        assert used.share_of_copy == pytest.approx(used.gigabytes_per_second / 4, abs=1e-4)
