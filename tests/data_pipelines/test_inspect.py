"""`inspect` shows what training sees: supervised runs by segment, grey for the rest, and statistics at the end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from headstart.base.errors import BadInput
from headstart.scripts.data.inspect import inspect
from headstart.targets.chat.written_ids import AnswerIds, as_entry, tokenizer_fingerprint
from typer.testing import CliRunner

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(inspect)


@pytest.fixture
def run(saved_target: Path, chat_tokenizer: Callable[[str], Any], tmp_path: Path) -> Callable[..., str]:
    """Runs `inspect` on three chats and returns what it printed."""
    target = tmp_path / "target"
    target.mkdir()
    tokenizer = chat_tokenizer("qwen3")
    config = {**json.loads((saved_target / "config.json").read_text()), "vocab_size": len(tokenizer)}
    (target / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(target)
    rows = [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n[b]ok.[/b]"}],
        [{"role": "user", "content": "again?"}, {"role": "assistant", "content": "1" * 150 + ".\n\n" + "2" * 90}],
        [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "late"}],
    ]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))

    def invoke(*arguments: str) -> str:
        overrides = [f"target.path={target}", f"data.train={chats}", "data.max_length=200"]
        done = CliRunner().invoke(app, ["runs/eagle3.yaml", *overrides, *arguments])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.output.replace(str(tmp_path), "")

    return invoke


def test_supervised_runs_stand_in_the_brackets_of_their_segment(run: Callable[..., str]) -> None:
    shown = run("--row", "0", "--no-color")
    assert shown.startswith("/chats.jsonl:1: ")
    assert "<|im_start|>assistant\n⟦<think>\nhm\n</think>⟧«\n\n[b]ok.[/b]<|im_end|>»\n" in shown
    assert "again?" not in shown


def test_in_colour_there_are_no_brackets(run: Callable[..., str]) -> None:
    shown = run("--row", "0", "--color")
    assert "\x1b[33m<think>" in shown and "\x1b[32m" in shown and "⟦" not in shown and "«" not in shown


def test_pieces_cuts_and_drops_are_said(run: Callable[..., str]) -> None:
    shown = run("--no-color")
    assert "/chats.jsonl:2: 200 tokens, " in shown and " tokens of the row left out, " in shown
    assert "of 3 rows: kept 2, cut 1, dropped 1" in shown
    pieces = run("--row", "1", "data.too_long=split", "--no-color")
    assert "/chats.jsonl:2, piece 1 of 2: " in pieces and "/chats.jsonl:2, piece 2 of 2: " in pieces
    assert "/chats.jsonl:3: dropped" in run("--row", "2", "--no-color")
    with pytest.raises(BadInput, match="^--row 3: data.train has fewer rows$"):
        run("--row", "3")


def test_statistics_close_the_output(run: Callable[..., str]) -> None:
    shown = run("--num-rows", "0", "--no-color")
    assert "chats.jsonl" not in shown
    for name in ("prompt", "think", "answer", "supervised", "p50", "p90"):
        assert name in shown


def test_ids_and_text_are_both_shown(run: Callable[..., str], chat_tokenizer: Callable[[str], Any], tmp_path) -> None:
    tokenizer = chat_tokenizer("qwen3")
    trace = "<think>\n\n</think>\n\n"
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{trace}hi"}]
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    apart = tokenizer.convert_tokens_to_ids(["h", "i", "<|im_end|>"])  # `hi` is one token of the tokenizer's own
    whole = tokenizer.convert_tokens_to_ids(["hi", "<|im_end|>"])
    begun, known = tokenizer(trace)["input_ids"], tokenizer_fingerprint(tokenizer)
    entries = [as_entry([(1, AnswerIds(prompt, [*begun, *new], known))]) for new in (apart, whole)]
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps({"messages": chat, **entry}) + "\n" for entry in [*entries, {}]))
    shown = " ".join(run(f"data.train={path}", "--num-rows", "3", "--no-color").split())
    assert "/ids.jsonl:1: " in shown and "gives others: 'h'+'i', not 'hi'" in shown
    assert "these are the ids that the target wrote; tokenising the text again gives the same" in shown
    assert "ids are from: ids (2 samples), text (1 samples)" in shown
    assert "of 2 rows with ids, 1 (50%) have other tokens if tokenised again" in shown
    assert "is not known, as no row has ids" in run("--no-color")
