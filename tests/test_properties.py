"""Whatever a config or a row says: a right result, or one line that says what is wrong."""

import json
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.base.jsonl import read_jsonl
from headstart.configs.loader import build, read_config
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.rows.sources import Row
from headstart.heads.families import HEADS, head_class
from headstart.targets.loading import TargetConfig
from headstart.targets.target import Target
from headstart.train.inputs.config import TrainConfig

pytest.importorskip("hypothesis", reason="the dev extra has it")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

few = settings(
    max_examples=12,
    database=None,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))
json_values = values.filter(lambda value: is_json(value))
roles = st.sampled_from(["system", "user", "assistant", "tool", "human", "gpt", "narrator"])


def is_json(value: Any) -> bool:
    try:
        return bool(json.dumps(value, allow_nan=False))
    except ValueError:
        return False


def result_of(call: Callable[[], Any]) -> Any:
    """What it returns, or None where one line says what is wrong."""
    try:
        return call()
    except BadInput as error:
        assert str(error).strip() and len(str(error).splitlines()) == 1
        return None


def document_of(cls: type) -> Any:
    """Mappings with some of a config's keys, plausible and impossible values, and now and then another key."""
    names = [field.name for field in fields(cls)]
    plausible = st.integers(-2, 200) | st.floats(-1, 2) | st.sampled_from(["null", "auto", "cpu", "1e-4", "x/y"])
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=5), plausible | values, max_size=6)


@pytest.mark.parametrize(
    "cls", [TrainConfig, DataConfig, TargetConfig, *(head_class(name).config_class for name in HEADS)]
)
@few
@given(data=st.data())
def test_any_values_make_a_config_or_one_line(cls, data):
    raw = data.draw(document_of(cls))
    if cls is TrainConfig:
        raw = {"output_dir": "runs/a", "max_steps": 100, **raw}
    config = result_of(lambda: build(cls, raw, where="section"))
    if config is not None and cls is TrainConfig:
        assert 0 <= config.warm_up < config.max_steps and 0 < config.learning_rate < math.inf
        assert config.seed >= 0 and 0 <= config.max_grad_norm < math.inf


@few
@given(text=st.text(max_size=60), override=st.text(max_size=20))
def test_any_text_is_a_config_or_one_line(text, override, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    config = result_of(lambda: read_config(path, [override]))
    assert config is None or isinstance(config, dict)


@few
@given(text=st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_rows_or_one_line(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(text)
    rows = result_of(lambda: read_jsonl(path))
    assert rows is None or (rows and all(isinstance(row, dict) for row in rows))


@pytest.fixture(scope="module")
def tokenizer(saved_target):
    return Target.load(saved_target).tokenizer


turns = st.fixed_dictionaries({"role": roles | json_values, "content": st.text(max_size=9) | json_values})
shapes = st.fixed_dictionaries(
    {},
    optional={
        "input_ids": st.lists(st.integers(-1, 62), max_size=9) | json_values,
        "prompt_length": st.integers(-1, 9) | json_values,
        "messages": st.lists(turns, max_size=4) | json_values,
        **{key: st.text(max_size=9) | json_values for key in ("prompt", "response", "text", "instruction", "output")},
        "truncated": st.booleans() | json_values,
    },
)


@settings(few, max_examples=60)
@given(row=shapes, limit=st.integers(1, 12), too_long=st.sampled_from(["cut", "split", "drop"]))
def test_any_row_makes_samples_or_one_line(row, limit, too_long, tokenizer):
    config = DataConfig(train="rows.jsonl", max_length=limit, too_long=too_long)
    samples = result_of(lambda: encode_row(Row(row, "rows.jsonl:1"), tokenizer, config))
    for sample in samples or ():
        assert 0 < len(sample) <= limit and sample.loss_mask.any()
        assert 0 <= sample.input_ids.min() and sample.input_ids.max() < len(tokenizer)
