"""A row records what its chat template was told, and is told it again wherever it is rendered."""

import json
import shutil
from datetime import date
from pathlib import Path

import pytest
from headstart.base.jsonl import read_jsonl
from headstart.configs.loader import build
from headstart.data_pipelines.answers.conversations import SamplingConfig, exchanges
from headstart.data_pipelines.answers.regenerate import RegenerateConfig
from headstart.data_pipelines.masks.chat import encode_row
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.rows.sources import Row
from headstart.data_pipelines.rows.traffic import served_chat
from headstart.eval.drafters.answers import answered
from headstart.scripts.data.engine_answers import EngineAnswers
from headstart.scripts.data.regenerate import regenerate
from headstart.scripts.unattended.held_out import held_out_row, read_asked
from headstart.targets.chat.prompts import ChatTemplate, prompt_ids
from headstart.targets.chat.written_ids import tokenizer_fingerprint
from headstart.targets.target import Target
from openai_server import regenerated, serving
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "w1 {% if strftime_now is defined %}w{{ strftime_now('%d') }} {% endif %}"
    "{% if tools %}w30 {% endif %}{% if reasoning_effort is defined %}w{{ reasoning_effort }} {% endif %}"
    "{% for m in messages %}{{ 'w5 ' if m.role == 'user' else 'w9 ' if m.role == 'system' else 'w6 ' }}"
    "{{ m.content }}{% if enable_thinking == false and m.role == 'user' %} w40{% endif %}{{ ' w2 ' }}{% endfor %}"
    "{% if add_generation_prompt %}w6 {% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def target(saved_target, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(saved_target, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def rows(path: Path, *asked) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return path


def test_what_the_template_is_told_is_recorded_and_told_again(target, tmp_path):
    asked = [
        {"prompt": "w10 w11"},
        {"turns": ["w10 w11"], "tools": json.dumps(TOOLS), "system": "w12"},
        {"conversations": [{"from": "human", "value": "w10"}], "chat_template_kwargs": {"enable_thinking": True}},
        {"prompt": "w13", "chat_template_kwargs": {"strftime_now": "2026-03-17", "reasoning_effort": "15"}},
    ]
    source = rows(tmp_path / "asked.jsonl", *asked)
    fixed = [f"sources={source}", f"target={target}", f"output={tmp_path / 'out'}", "sampling.max_tokens=4"]
    told = [
        "sampling.temperature=0",
        "sampling.thinking=false",
        "sampling.chat_template_kwargs={reasoning_effort: '14'}",
    ]
    regenerate("configs/data/regenerate_local.yaml", [*fixed, *told])
    written = read_jsonl(tmp_path / "out" / "answers.jsonl")
    common = {"reasoning_effort": "14", "enable_thinking": False, "strftime_now": "2025-01-01"}
    assert [row["chat_template_kwargs"] for row in written] == [
        common,
        common,
        {**common, "enable_thinking": True},
        {**common, "strftime_now": "2026-03-17", "reasoning_effort": "15"},
    ]
    assert written[1]["tools"] == TOOLS
    loaded = Target.load(target)
    answers, sampling = (
        EngineAnswers(loaded),
        SamplingConfig(max_tokens=4, thinking=False, chat_template_kwargs={"reasoning_effort": "14"}),
    )
    mark = tokenizer_fingerprint(loaded.tokenizer)
    heads = [[1, 0, 0, 14], [1, 0, 0, 30, 14, 9, 12, 2], [1, 0, 0, 14], [1, 17, 15]]  # w01: w0, and no word
    for row, given, head, line in zip(written, asked, heads, range(1, 5), strict=True):
        [exchange] = exchanges(Row(given, "a:1"), sampling, turns="all")
        prompt = answers.prompt(next(exchange.talk()))
        assert isinstance(prompt, list) and prompt[: len(head)] == head and (40 in prompt) == (line != 3)
        [sample] = encode_row(Row(row, f"a:{line}"), loaded.tokenizer, DataConfig(train=""))
        assert sample.input_ids[: int(sample.loss_mask.argmax())].tolist() == prompt
        assert prompt_ids(row, loaded.tokenizer, origin="a:1") == prompt
        [(asked_with, *_)] = answered(row, loaded.tokenizer, origin="a:1", fingerprint=mark, vocab_size=None)
        assert asked_with == prompt
    [first, *_] = read_asked(str(tmp_path / "out" / "answers.jsonl"))
    assert held_out_row(first, is_plain=False)["chat_template_kwargs"] == common, "auto measures as it asks"


@pytest.mark.parametrize(
    ("template", "printed"),
    [
        ("{{ strftime_now('%d %B %Y') }}", "07 March 2026"),
        ("{{ strftime_now(format='%-d/%m') }}", "7/03"),
        ("{% set how = '%Y-%m-%d' %}{{ strftime_now(how) }}", "2026-03-07"),
        ("{{ strftime_now(how) }}", "7 of Mar"),
        ("{% macro day() %}{{ strftime_now('%Y') | int + 1 }}{% endmacro %}{{ day() }}", "2027"),
        ("\n  {% if strftime_now is defined %}{{ strftime_now('%A') }}{% endif %}", "\nSaturday"),
        ("  {% if tools %}{{ strftime_now('%A') }}{% endif %}\n 5%d", " 5%d"),
    ],
)
def test_the_recorded_day_is_printed_however_the_template_asks(template, printed):
    """And nothing else of the template changes."""
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template)
    told = {"strftime_now": "2026-03-07", "how": "%-d of %b"}
    assert ChatTemplate(tokenizer, variables=told).render_text([{"role": "user", "content": "Hi"}]) == printed


def test_a_config_tells_for_rows_that_record_nothing(target):
    tokenizer = Target.load(target).tokenizer
    row = {"messages": [{"role": "user", "content": "w10"}, {"role": "assistant", "content": "w11"}]}
    config = DataConfig(train="", chat_template_kwargs={"enable_thinking": False})
    [sample] = encode_row(Row(row, "a:1"), tokenizer, config)
    assert 40 in sample.input_ids
    [sample] = encode_row(Row({**row, "chat_template_kwargs": {"enable_thinking": True}}, "a:1"), tokenizer, config)
    assert 40 not in sample.input_ids


def test_servers_are_told_what_rows_record(tmp_path):
    told = {"enable_thinking": True, "strftime_now": "2026-03-17"}
    source = rows(tmp_path / "asked.jsonl", {"prompt": "hi", "chat_template_kwargs": told, "tools": TOOLS})
    sampling = {"thinking": False, "chat_template_kwargs": {"reasoning_effort": "low"}}
    settings = {"sources": str(source), "output": str(tmp_path / "out"), "target": "tiny", "sampling": sampling}
    with serving() as server:
        regenerated(build(RegenerateConfig, {**settings, "engine": {"name": "openai", "server": server.url}}))
    [row] = read_jsonl(tmp_path / "out" / "answers.jsonl")
    sent = {"reasoning_effort": "low", "enable_thinking": True}
    assert server.bodies[0]["chat_template_kwargs"] == sent and server.bodies[0]["tools"] == TOOLS
    assert row["chat_template_kwargs"] == {**sent, "strftime_now": date.today().isoformat()}, (
        "no server can be told a day"
    )


def test_served_traffic_keeps_what_its_requests_told():
    request = {"messages": [{"role": "user", "content": "hi"}], "extra_body": {"chat_template_kwargs": {"a": 1}}}
    row, _ = served_chat({"request": request, "response": "ok"}, "a:1")
    assert row.row["chat_template_kwargs"] == {"a": 1}
