"""The target answers in this process, or in the server of an engine, which is asked by ids: its own text, the same rows
whichever answers, the same in a resumed run, by one command.
"""

import json
import re
import shutil
import urllib.request
from contextlib import nullcontext

import pytest
import typer
from headstart.base.doing import Doing
from headstart.base.errors import BadInput
from headstart.base.jsonl import read_jsonl
from headstart.data_pipelines.answers.conversations import ChatRequest, Failure, SamplingConfig
from headstart.engines.servers.registry import SERVER_ENGINES
from headstart.eval.decoding import generate, replay
from headstart.eval.decoding.engine import Engine
from headstart.scripts.data import regenerate as data_regenerate
from headstart.scripts.data.engine_answers import EngineAnswers
from headstart.scripts.data.regenerate import regenerate
from headstart.targets import loading
from headstart.targets.chat.answers import answer_text
from headstart.targets.chat.prompts import plain_ids
from headstart.targets.target import Target
from headstart.targets.weights.served_adapter import ServedAdapter
from openai_server import serving
from words import with_template

TEMPLATE = (
    "w1 {% for m in messages %}{{ 'w5 ' if m.role == 'user' else 'w6 ' }}{{ m.content }}{{ ' w2 ' }}{% endfor %}"
    "{% if add_generation_prompt %}w6 {% endif %}"
)
PROMPTS = [f"w{10 + number} w{3 + 2 * number} " * (1 + number % 4) for number in range(9)]
GREEDY = SamplingConfig(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def chat_target(saved_target, tmp_path_factory):
    """The folder of a target whose tokenizer has a chat template."""
    return with_template(saved_target, tmp_path_factory.mktemp("chat") / "target", TEMPLATE)


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


def asked(text):
    return ChatRequest([{"role": "user", "content": text}], None, GREEDY, seed=1)


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


def test_a_trace_that_the_prompt_opens_stands_apart(engine_answers, monkeypatch):
    monkeypatch.setattr(engine_answers, "markers", ("w7", "w8"))
    request = asked("w3")
    message = engine_answers.answer([1, 5, 6, 7], [30, 31, 8, 40, 2], request).message
    assert message == {"role": "assistant", "content": " w40", "reasoning_content": "w30 w31 "}
    message = engine_answers.answer([1, 5, 6], [7, 30, 8, 40, 2], request).message
    assert message == {"role": "assistant", "content": "w7 w30 w8 w40"}


def test_prompts_that_begin_alike_are_read_behind_each_other(command, tmp_path, monkeypatch):
    """So that what they share, as the instruction of a domain, is read once."""
    instructions = ["w20 w21 w22 w23 w24", "w30 w31 w32 w33 w34"]
    rows = [{"prompt": f"{instructions[number % 2]} w{10 + number}"} for number in range(12)]
    path, lengths, prefill = tmp_path / "two.jsonl", [], Engine.prefill
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def noting(reader, *prompts, num_kept: int, **how):
        lengths.append(num_kept)
        return prefill(reader, *prompts, num_kept=num_kept, **how)

    monkeypatch.setattr(Engine, "prefill", noting)
    command(f"sources={path}", f"output={tmp_path / 'answers'}", "sampling.temperature=0")
    assert lengths[0] == 0 and sum(one >= 7 for one in lengths) == 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stopped_within_a_batch_the_command_ends_the_same(temperature, command, tmp_path, monkeypatch, capsys):
    sampling = f"sampling.temperature={temperature}"
    command(sampling, f"output={tmp_path / 'whole'}")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("[!.]*")}
    assert set(whole) == {"answers.jsonl", "manifest.json"}
    assert f"9 rows in {tmp_path}/whole/answers.jsonl, " in capsys.readouterr().out

    class Stopping(Doing):
        def __call__(self, parts=1):
            is_first, _ = self.first is None, super().__call__(parts)
            if parts and not is_first and self.done in (3, 6):
                raise KeyboardInterrupt

    monkeypatch.setattr(data_regenerate, "doing", lambda what, total: nullcontext(Stopping(what, total)))
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


def test_a_folder_is_gone_on_with_however_the_targets_path_is_written(command, chat_target, tmp_path, monkeypatch):
    how = ["num_rows=2", f"output={tmp_path / 'out'}"]
    monkeypatch.chdir(chat_target.parents[1])
    for target in (chat_target.relative_to(chat_target.parents[1]), chat_target, f"./{chat_target.parent.name}/target"):
        command(f"target={target}", *how)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    rows = read_jsonl(tmp_path / "out/answers.jsonl")
    assert {manifest["settings"]["target"], *(row["target"] for row in rows)} == {str(chat_target)}


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


def test_the_dtype_is_that_of_the_revision_that_answers(command, tmp_path, monkeypatch):
    read, asked = loading.AutoConfig.from_pretrained, []

    def noting(path, **how):
        asked.append(how["revision"])
        return read(path, **how)

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", noting)
    command(f"output={tmp_path / 'rows'}", "engine.revision=abc", "engine.device=cpu", "num_rows=1")
    assert set(asked) == {"abc"}


def test_a_length_that_leaves_no_prompt_room_is_clipped_and_what_fails_is_said(command, tmp_path, capsys):
    command(f"output={tmp_path / 'out'}", "sampling.max_tokens=256", "num_rows=1")
    assert (
        "sampling.max_tokens 256: leaves no prompt room in the target's context of 256: 128" in capsys.readouterr().err
    )
    assert read_jsonl(tmp_path / "out/answers.jsonl")[0]["sampling"]["max_tokens"] == 128
    with pytest.raises(typer.Exit):
        command(f"output={tmp_path / 'none'}", "sampling.max_tokens=255")
    assert " of 9 that failed: " in (err := capsys.readouterr().err) and "exceed the context of 256" in err


def test_without_a_chat_template_prompts_are_continued_as_they_are_and_chats_fail(command, saved_target, tmp_path):
    target, rows = Target.load(saved_target), tmp_path / "rows.jsonl"
    chat = {"messages": [{"role": "system", "content": "w5"}, {"role": "user", "content": "w6"}]}
    prompts = [{"prompt": f"w{i} w9 w{i + 3}"} for i in range(5, 9)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in [*prompts, chat]))
    with pytest.raises(typer.Exit):
        command(f"target={saved_target}", f"sources={rows}", f"output={tmp_path / 'out'}", "sampling.temperature=0")
    answers = read_jsonl(tmp_path / "out/answers.part.jsonl")
    assert {row["prompt"] for row in answers} == {row["prompt"] for row in prompts}
    for row in answers:
        limit = row["sampling"]["max_tokens"]
        plain = generate(target, None, plain_ids(target.tokenizer, row["prompt"]), max_new_tokens=limit)
        assert row["response"] == answer_text(plain.token_ids[0], target.tokenizer, target.eos_token_ids)
    [failed] = read_jsonl(tmp_path / "out/failed.jsonl")
    assert "has no chat template; give plain `prompt` rows" in json.dumps(failed)


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


# ---------------------------------------------------------------------------------------------------------------------
# By the server of another engine


def decoding(target, *, keeps_end=True):
    """What a server answers ids with. keeps_end: its ids have the end token, which else is named beside them."""

    def answer(server, body, attempt):
        [new] = generate(target, None, [body["prompt"]], max_new_tokens=body["max_tokens"]).token_ids
        has_ended = new[-1] in body["stop_token_ids"]
        choice = {"finish_reason": "stop" if has_ended else "length", "prompt_token_ids": body["prompt"]}
        assert body["return_token_ids"] and body["temperature"] == 0 and body["repetition_penalty"] == 1
        if has_ended and not keeps_end:
            choice["matched_stop"], new = new[-1], new[:-1]
        return 200, {}, {"choices": [{**choice, "text": "", "token_ids": new}], "usage": {}}

    return answer


@pytest.mark.parametrize("keeps_end", [True, False])
@pytest.mark.parametrize("has_template", [True, False])
def test_the_rows_are_the_same_whichever_engine_answers(
    keeps_end, has_template, command, chat_target, saved_target, tmp_path
):
    """Prompt ids as the template gives them, end tokens, plain continuations, and the settings of the target."""
    path, how = tmp_path / "target", [f"target={tmp_path / 'target'}", "sampling.temperature=0"]
    shutil.copytree(chat_target if has_template else saved_target, path)
    command(f"output={tmp_path / 'endless'}", *how)
    written = read_jsonl(tmp_path / "endless" / "answers.jsonl")[0]["written_ids"]["sequences"][0]["input_ids"]
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [2, written[-3]]}))
    command(f"output={tmp_path / 'here'}", *how)
    with serving(decoding(Target.load(path), keeps_end=keeps_end)) as server:
        command(
            f"output={tmp_path / 'there'}",
            *how,
            "engine.name=vllm",
            f"engine.server={server.url}",
            "client.concurrency=1",
        )
    here, there = (tmp_path / name for name in ("here", "there"))
    assert (here / "answers.jsonl").read_bytes() == (there / "answers.jsonl").read_bytes()
    rows = read_jsonl(there / "answers.jsonl")
    assert {row["finish_reason"] for row in rows} == {"stop", "length"} and all("written_ids" in row for row in rows)
    ours, theirs = (json.loads((folder / "manifest.json").read_text())["settings"] for folder in (here, there))
    assert (ours.pop("by"), theirs.pop("by")) == ("engine", "vllm")
    assert ours["target_fingerprint"] == theirs["target_fingerprint"]


@pytest.mark.parametrize("dies_at", [0, 2])
def test_prompts_of_a_lost_server_are_answered_by_the_others(dies_at, command, chat_target, tmp_path):
    """It is lost in the middle, or answers nothing from the start."""
    how = ["engine.name=vllm", "sampling.temperature=0", "client.concurrency=1", "client.backoff=0.01"]
    first, second = (decoding(Target.load(chat_target)) for _ in range(2))

    def dies(server, body, attempt):
        return first(server, body, attempt) if len(server.bodies) <= dies_at else "drop"

    with serving(second) as server, serving(dies) as lost:
        command(f"output={tmp_path / 'one'}", *how, f"engine.server={server.url}")
        command(f"output={tmp_path / 'two'}", *how, f"engine.server=[{lost.url}, {server.url}]")
    one, two = ((tmp_path / name / "answers.jsonl").read_bytes() for name in ("one", "two"))
    assert one == two and len(lost.bodies) > dies_at


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"prompt_token_ids": [1], "token_ids": [5]}, "read another prompt than it was asked"),
        ({"text": "w5"}, "gives no token ids"),
    ],
)
def test_what_a_server_cannot_prove_to_have_written_is_no_row(choice, problem, command, tmp_path, capsys):
    with serving(lambda *_: (200, {}, {"choices": [{"finish_reason": "stop", **choice}]})) as server:
        with pytest.raises(typer.Exit):
            command(f"output={tmp_path / 'out'}", "engine.name=sglang", f"engine.server={server.url}")
    assert problem in capsys.readouterr().err and not read_jsonl_or_none(tmp_path / "out/answers.jsonl")


def read_jsonl_or_none(path):
    return path.read_text() if path.exists() else ""


def test_a_server_is_started_for_what_is_left_to_ask_and_ends_with_it(command, python, tmp_path, capsys):
    how = [
        f"output={tmp_path / 'out'}",
        "engine.name=vllm",
        f"engine.python={python}",
        "engine.args=--max-model-len 99",
    ]
    command(*how)
    said = capsys.readouterr()
    assert "9 rows in" in said.out and "api_server" in said.err and "--max-model-len 99 --host" in said.err
    [place] = re.findall(r"--port (\d+)", said.err)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{place}/health")
    command(*how)
    said = capsys.readouterr()
    assert "9 rows in" in said.out and "api_server" not in said.err, "a finished run starts none"


def test_with_an_adapter_vllm_serves_it_and_is_asked_by_its_name(command, chat_target, lora, python, tmp_path, capsys):
    """The stand-in answers no question to the target alone."""
    adapter = lora(chat_target, r=40)
    under = [f"engine.adapter={adapter}", "sampling.temperature=0"]
    command(f"output={tmp_path / 'out'}", *under, "engine.name=vllm", f"engine.python={python}")
    flags = f"--enable-lora --lora-modules {adapter.name}={adapter} --max-lora-rank 64"
    said = capsys.readouterr()
    assert flags in said.err and "9 rows in" in said.out
    command(f"output={tmp_path / 'here'}", *under)
    there, here = (json.loads((tmp_path / name / "manifest.json").read_text())["settings"] for name in ("out", "here"))
    assert there["target_fingerprint"] == here["target_fingerprint"]
    with pytest.raises(BadInput, match="is not served with SGLang here"):
        SERVER_ENGINES["sglang"].adapting(ServedAdapter.read(adapter))


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (["engine.name=sglang", "engine.adapter=x"], "engine: adapter: goes with name: headstart"),
        (["engine.device=gpu"], "device gpu: "),
        (["engine.name=tgi"], "engine: name 'tgi': expected headstart or vllm or sglang or openai"),
        (["engine.args=--x"], "engine: args: goes with another engine; its name is headstart"),
        (["engine.name=vllm", "engine.dtype=float32"], "engine: dtype: goes with name: headstart"),
        (["engine.name=vllm", "engine.python=p", "engine.server=http://x"], "engine: python, args: are of a server"),
        (["engine.name=openai"], "engine: server: name openai is of one that runs"),
        (["client.extra_body={min_p: 0.1}"], "client.extra_body: goes with a server; engine.name is headstart"),
        (
            ["engine.name=vllm", "client.extra_body={chat_template_kwargs: {a: 1}}"],
            "client.extra_body.chat_template_kwargs: prompts are rendered here; give sampling.chat_template_kwargs",
        ),
        (
            ["client.extra_body={chat_template_kwargs: 1}"],
            "client: extra_body.chat_template_kwargs should be an object",
        ),
        (["engine.name=vllm", "engine.python=nowhere"], "--engine-python nowhere: No such file"),
    ],
)
def test_options_of_engines_that_do_not_go_together_are_refused(told, problem, command, tmp_path):
    with pytest.raises(BadInput, match=re.escape(problem)):
        command(f"output={tmp_path / 'out'}", *told)
