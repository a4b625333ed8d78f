"""A tiny target with a chat template, and rows written to files as suites publish them."""

import gzip
import json

import pytest
from transformers import AutoTokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ 'w9 ' if m.role == 'system' else 'w10 ' if m.role == 'user' else 'w11 ' }}{{ m.content }} w2 {% endfor %}"
    "{% if add_generation_prompt %}w11 {% if enable_thinking is defined %}{{ 'w12' if enable_thinking else 'w13' }}"
    "{% endif %}{% endif %}"
)


@pytest.fixture
def chat_target(tiny_target, saved_target):
    """Words w0 .. w60, others are w0. A system prompt opens with w9, a user with w10, an assistant with w11; turns end
    with w2; told to think, w12 follows, told not to, w13."""
    target = tiny_target("llama")
    target._tokenizer = AutoTokenizer.from_pretrained(saved_target)
    target._tokenizer.chat_template = CHAT_TEMPLATE
    return target


@pytest.fixture
def written(tmp_path):
    """written("name.jsonl", *rows): a file of rows, gzipped where the name says so."""

    def write(name, *rows):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write
