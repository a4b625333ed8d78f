"""Without servers the target answers in this process: its own text, the same in a resumed run, by one command."""

import json
import shutil

import pytest
import typer
from headstart.configs.errors import BadInput
from headstart.configs.jsonl import read_jsonl
from headstart.data_pipelines.answers.conversations import ChatRequest, Failure, SamplingConfig
from headstart.eval.decoding import continuous, generate, replay
from headstart.heads.medusa import MedusaHead
from headstart.heads.registry import HEADS, build_head, save_head
from headstart.heads.target import Target
from headstart.scripts.data import regenerate as data_regenerate
from headstart.scripts.data.engine_answers import EngineAnswers
from headstart.scripts.data.regenerate import regenerate
from transformers import AutoTokenizer

TEMPLATE = (
    "w1 {% for m in messages %}{{ 'w5 ' if m.role == 'user' else 'w6 ' }}{{ m.content }}{{ ' w2 ' }}{% endfor %}"
    "{% if add_generation_prompt %}w6 {% if enable_thinking %}w7 {% endif %}{% endif %}"
)
PROMPTS = [f"w{10 + number} w{3 + 2 * number} " * (1 + number % 4) for number in range(9)]
GREEDY = SamplingConfig(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def chat_target(saved_target, tmp_path_factory):
    """The folder of a target whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(saved_target, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine_answers(chat_target):
    return EngineAnswers(Target.load(chat_target))


@pytest.fixture
def command(chat_target, tmp_path):
    """command(key=value ...) runs the command on PROMPTS."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text.strip()}) + "\n" for text in PROMPTS))
    fixed = [f"sources={path}", f"target={chat_target}", "engine.batch_size=4", "sampling.max_tokens=12"]
    return lambda *overrides: regenerate("configs/data/regenerate_local.yaml", [*fixed, *overrides])


def asked(text, sampling=GREEDY):
    return ChatRequest([{"role": "user", "content": text}], None, sampling, seed=1)


def test_a_head_of_the_target_drafts_and_the_answers_stay(command, chat_target, tmp_path, monkeypatch):
    target = Target.load(chat_target)
    save_head(build_head(HEADS["medusa"].config_class(type="medusa"), target, seed=1), tmp_path / "head")
    drafters, engine = [], continuous.Engine

    def noting(target, drafter, **how):
        drafters.append(drafter)
        return engine(target, drafter, **how)

    monkeypatch.setattr(continuous, "Engine", noting)
    command(f"output={tmp_path / 'plain'}", "sampling.temperature=0")
    command(f"output={tmp_path / 'drafted'}", "sampling.temperature=0", f"engine.head={tmp_path / 'head'}")
    assert read_jsonl(tmp_path / "drafted" / "answers.jsonl") == read_jsonl(tmp_path / "plain" / "answers.jsonl")
    assert drafters[0] is None and isinstance(drafters[-1], MedusaHead)


def test_answers_are_the_targets_own_greedy_text(engine_answers):
    target = engine_answers.target
    requests = [asked(text) for text in PROMPTS[:4]]
    for request, answer in zip(requests, engine_answers(requests), strict=True):
        prompt = engine_answers.prompt(request)
        [alone] = generate(target, None, prompt, max_new_tokens=12).token_ids
        words = [f"w{token}" for token in alone if token != 2]
        assert answer.message == {"role": "assistant", "content": " ".join(words)}
        assert answer.finish_reason == ("stop" if alone[-1] == 2 else "length")
        assert (answer.num_prompt_tokens, answer.num_tokens) == (len(prompt), len(alone))


def test_a_batch_is_decoded_in_recorded_steps_where_those_are_the_default(engine_answers, monkeypatch):
    requests, recorded = [asked(text) for text in PROMPTS[:4]], []
    plain = engine_answers(requests)
    monkeypatch.setattr("headstart.scripts.data.engine_answers.default_steps", lambda device, num_tokens: "compile")
    monkeypatch.setattr(replay, "compiled", lambda step, arguments: recorded.append(arguments) or step)
    assert engine_answers(requests) == plain and recorded


def test_a_prompt_that_cannot_be_asked_fails_alone(engine_answers, monkeypatch):
    long = " ".join(["w9"] * 250)
    failure, answer = engine_answers([asked(long), asked(PROMPTS[0])])
    assert isinstance(failure, Failure)
    assert str(failure) == "254 prompt tokens + 12 new ones (max_tokens) exceed the context of 256"
    assert answer == engine_answers([asked(PROMPTS[0])])[0]
    monkeypatch.setattr(engine_answers.tokenizer, "chat_template", "{{ raise_exception('users first') }}")
    [failure] = engine_answers([asked(PROMPTS[0])])
    assert str(failure) == "the chat template refuses the messages: users first"


def test_thinking_is_told_to_the_template(engine_answers):
    for thinking, last in ((True, 7), (False, 6), (None, 6)):
        prompt = engine_answers.prompt(asked("w3", SamplingConfig(max_tokens=12, thinking=thinking)))
        assert isinstance(prompt, list) and prompt[-1] == last


def test_a_trace_that_the_prompt_opens_stands_apart(engine_answers, monkeypatch):
    monkeypatch.setattr(engine_answers, "markers", ("w7", "w8"))
    request = asked("w3", SamplingConfig())
    message = engine_answers.answer([1, 5, 6, 7], [30, 31, 8, 40, 2], request).message
    assert message == {"role": "assistant", "content": " w40", "reasoning_content": "w30 w31 "}
    message = engine_answers.answer([1, 5, 6], [7, 30, 8, 40, 2], request).message
    assert message == {"role": "assistant", "content": "w7 w30 w8 w40"}


def test_prompts_that_begin_alike_are_read_behind_each_other(command, tmp_path, monkeypatch):
    """So that what they share, as the instruction of a domain, is read once."""
    instructions = ["w20 w21 w22 w23 w24", "w30 w31 w32 w33 w34"]
    rows = [{"prompt": f"{instructions[number % 2]} w{10 + number}"} for number in range(12)]
    path, lengths, prefill = tmp_path / "two.jsonl", [], continuous.prefill
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def noting(reader, texts, watch, *, num_kept: int):
        lengths.append(num_kept)
        return prefill(reader, texts, watch, num_kept=num_kept)

    monkeypatch.setattr(continuous, "prefill", noting)
    command(f"sources={path}", f"output={tmp_path / 'answers'}", "sampling.temperature=0")
    assert lengths[0] == 0 and sum(one >= 7 for one in lengths) == 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stopped_within_a_batch_the_command_ends_the_same(temperature, command, tmp_path, monkeypatch, capsys):
    sampling = f"sampling.temperature={temperature}"
    command(sampling, f"output={tmp_path / 'whole'}")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("[!.]*")}
    assert set(whole) == {"answers.jsonl", "manifest.json"}
    assert f"9 rows in {tmp_path}/whole/answers.jsonl, " in capsys.readouterr().out

    shown = []

    def stop(self, progress):
        shown.append(progress.num_answered)
        if progress.num_answered in (3, 6) and len(shown) > 1 and shown[-2] != shown[-1]:
            raise KeyboardInterrupt

    monkeypatch.setattr(data_regenerate.AnswerProgress, "show", stop)
    for enough in (3, 6):
        with pytest.raises(KeyboardInterrupt):
            command(sampling, f"output={tmp_path / 'out'}")
        assert len(read_jsonl(tmp_path / "out/answers.part.jsonl")) == enough
    command(sampling, f"output={tmp_path / 'out'}")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("[!.]*")} == whole
    rows = read_jsonl(tmp_path / "out/answers.jsonl")
    assert [row["messages"][0]["content"] for row in rows] == [text.strip() for text in PROMPTS]


def test_what_is_refused_before_the_first_answer_shows_no_progress(command, tmp_path, capsys):
    (tmp_path / "out").touch()
    with pytest.raises(BadInput, match="out: a file, not a folder"):
        command(f"output={tmp_path / 'out'}")
    assert capsys.readouterr().err == ""


def test_the_manifest_names_the_weights_and_another_batch_size_is_refused(command, chat_target, tmp_path):
    command(f"output={tmp_path / 'out'}", "num_rows=2")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["settings"]["target_fingerprint"] == Target.load(chat_target).fingerprint
    with pytest.raises(BadInput, match="started with batch_size 4, now 2"):
        command(f"output={tmp_path / 'out'}", "num_rows=2", "engine.batch_size=2")


@pytest.mark.parametrize("what", ["template_hash", "tokenizer_hash", "target_config_hash", "eos_token_ids"])
def test_answers_of_what_is_another_target_under_the_same_path_are_not_gone_on_with(
    what, command, chat_target, tmp_path
):
    folder, how = shutil.copytree(chat_target, tmp_path / "target"), ["num_rows=2", f"output={tmp_path / 'out'}"]
    command(f"target={folder}", *how)
    command(f"target={folder}", *how)
    name, before, after = {
        "template_hash": ("chat_template.jinja", "w1 ", "w3 "),
        "tokenizer_hash": ("tokenizer.json", '"w60"', '"w61"'),
        "target_config_hash": ("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-03'),
        "eos_token_ids": ("generation_config.json", '"eos_token_id": 2', '"eos_token_id": 3'),
    }[what]
    text = (folder / name).read_text()
    assert before in text
    (folder / name).write_text(text.replace(before, after, 1))
    with pytest.raises(BadInput, match=f"started with {what} .*give a new folder"):
        command(f"target={folder}", *how)


def test_failed_rows_are_exit_code_1(command, tmp_path, capsys):
    with pytest.raises(typer.Exit) as caught:
        command(f"output={tmp_path / 'out'}", "sampling.max_tokens=250")
    assert caught.value.exit_code == 1
    failed = read_jsonl(tmp_path / "out/failed.jsonl")
    assert f"{len(failed)} failed" in capsys.readouterr().out
    assert all("exceed the context of 256" in row["problem"] for row in failed)
    written = read_jsonl(tmp_path / "out/answers.jsonl")
    assert 0 < len(failed) < 9 and len(failed) + len(written) == 9


def test_a_tokenizer_without_chat_template_is_refused(command, saved_target, tmp_path):
    with pytest.raises(BadInput, match="no chat template to ask with"):
        command(f"target={saved_target}", f"output={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_with_an_adapter_the_answers_are_those_that_it_serves(command, chat_target, lora, tmp_path):
    adapter = lora(chat_target)
    how = ["sampling.temperature=0", "num_rows=4"]
    command(f"output={tmp_path / 'base'}", *how)
    command(f"output={tmp_path / 'adapted'}", f"engine.adapter={adapter}", *how)
    base, adapted = (read_jsonl(tmp_path / name / "answers.jsonl") for name in ("base", "adapted"))
    assert [row["messages"] for row in base] != [row["messages"] for row in adapted]
    by_hand = EngineAnswers(Target.load(chat_target, adapter=adapter))
    for row in adapted:
        [answer] = by_hand([ChatRequest(row["messages"][:-1], None, GREEDY, 0)])
        assert answer.message == row["messages"][-1]
    with pytest.raises(BadInput, match="target_fingerprint"):
        command(f"output={tmp_path / 'adapted'}", *how)
