"""The data of a run: splits the prompts, and turns the target's answers into training and validation rows."""

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...configs.errors import BadInput
from ...configs.files import write_json, write_text
from ...configs.jsonl import read_appended, read_jsonl
from ...data_pipelines.answers.conversations import SamplingConfig, exchanges
from ...data_pipelines.sources import iter_rows
from ...data_pipelines.vocab import always_kept, worthwhile_size
from ...eval.measurement.metrics import LEAST_TIMED
from ...eval.measurement.repetition import text_repetition
from ...eval.suites.prompts import load_suite
from ...heads.chat.rows import VARIABLES
from ...heads.chat.written_ids import KEY
from ...heads.target import Target
from .journal import Answers, Split

MOST_HELD_OUT = 32  # prompts
LEAST_PROMPTS = 3 * LEAST_TIMED  # a third is held out, and a confidence interval needs LEAST_TIMED prompts
VALIDATION = 8, 32  # least and most rows that score candidates,
ROW_SECONDS = 150.0  # one for so many seconds of the budget: more rows tell more apart
LEAST_ANSWERS = 8
ENDING = 16  # tokens that a chat template may add after an answer, upper limit
MANY = 0.2  # share of bad answers above which there is a warning


@dataclass(frozen=True)
class Asked:
    """A row of --prompts or --chats. Rows with the same question are duplicates."""

    question: str  # the messages before the first answer, as JSON
    told: dict[str, Any]  # what else the chat template is told, as rows record it
    row: dict[str, Any]


def read_asked(path: str) -> Iterator[Asked]:
    """Yields a file's rows with their questions. Raises BadInput on rows without a prompt."""
    for row in iter_rows(path):
        for exchange in exchanges(row, SamplingConfig(), turns="all"):
            told = {"tools": exchange.tools, VARIABLES: exchange.variables}
            question = as_question(exchange.script[: exchange.script.index(None)])
            yield Asked(question, {key: value for key, value in told.items() if value}, row.data)


def as_question(messages: Sequence[Any]) -> str:
    """The messages before the first answer as JSON, for `Asked.question`."""
    return json.dumps(messages, ensure_ascii=False, sort_keys=True)


def split_prompts(
    prompts: str, chats: str, folder: Path, *, most_held_out: int = MOST_HELD_OUT, seed: int
) -> tuple[int, int, int]:
    """Splits the prompts into held-out ones and ones for the target to answer, and selects the chats to learn from.

    Writes into `folder`: held_out.jsonl; prompts.jsonl, shuffled, so that the prompts answered in time are a random
    sample; and given.jsonl, the rows of `chats` that have an answer and whose question is not held out.

    Args: chats: file of answered rows; empty: none.

    Returns the numbers of held-out prompts, of prompts to answer, and of duplicate rows.
    Raises BadInput if there are fewer than LEAST_PROMPTS different prompts.
    """
    rows = list(read_asked(prompts))
    once = {asked.question: asked for asked in rows}
    if len(once) < LEAST_PROMPTS:
        raise BadInput(
            f"--prompts {prompts}: {len(once)} different prompts, at least {LEAST_PROMPTS} are needed: a third is held "
            "out to measure on"
        )
    questions = sorted(once)
    random.Random(seed).shuffle(questions)
    num_held_out = min(len(questions) // 3, most_held_out)
    held_out, asked = questions[:num_held_out], questions[num_held_out:]
    write_rows(folder / "held_out.jsonl", [held_out_row(once[question]) for question in held_out])
    write_rows(folder / "prompts.jsonl", [once[question].row for question in asked])
    if chats:
        kept_back = set(held_out)
        given = [each.row for each in read_asked(chats) if each.question not in kept_back and is_answered(each.row)]
        write_rows(folder / "given.jsonl", given)
    return len(held_out), len(asked), len(rows) - len(once)


def held_out_row(asked: Asked) -> dict[str, Any]:
    """A row for `headstart eval --prompts`, with its domain if it has one."""
    domain = {key: asked.row[key] for key in ("category", "domain") if isinstance(asked.row.get(key), str)}
    return {"messages": json.loads(asked.question), **asked.told, **domain}


def is_answered(row: dict[str, Any]) -> bool:
    """Whether a row of --chats ends with an answer."""
    messages = row.get("messages") or row.get("conversations") or [{}]
    last = messages[-1]
    return last.get("role", last.get("from")) in ("assistant", "gpt") or bool(row.get("response") or row.get("output"))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def describe_split(counts: tuple[int, int, int], path: Path, target: Target, *, max_new_tokens: int) -> Split:
    """The journal's entry for the split.

    Args:
        counts: as `split_prompts` returns them.
        path: held_out.jsonl.

    Raises: BadInput if fewer than LEAST_TIMED held-out prompts fit the target.
    """
    suite = load_suite(path, target, max_new_tokens=max_new_tokens)
    if len(suite.prompts) < LEAST_TIMED:
        failed = suite.failed[0]
        usable = f"only {len(suite.prompts)} held-out prompts are usable, at least {LEAST_TIMED} are needed"
        raise BadInput(f"--prompts: {usable}: {failed.row}: {failed.reason}")
    lengths = [len(prompt) for prompt in suite.prompts]
    context = round(statistics.median(lengths)) + max_new_tokens // 2
    return Split(*counts, context=context, prompt_tokens=max(lengths))


def timing_text(path: Path, target: Target, *, max_new_tokens: int) -> list[int]:
    """The token ids of all held-out prompts, concatenated."""
    suite = load_suite(path, target, max_new_tokens=max_new_tokens)
    return [token for prompt in suite.prompts for token in prompt]


def validation_rows(budget: float) -> int:
    """Rows that score candidates, with a budget of that many seconds, where there are answers enough."""
    least, most = VALIDATION
    return min(max(int(budget / ROW_SECONDS), least), most)


def gather(
    folder: Path,
    answers: Path,
    sampled: Sequence[Path],
    tokenizer: Any,
    *,
    vocab_size: int,
    row_share: float,
    eos_token_ids: set[int],
    most_validation: int,
) -> Answers:
    """Writes train.jsonl and validation.jsonl into `folder`, from the target's answers and the given chats.

    Args:
        folder: where given.jsonl is.
        answers: output of `headstart data regenerate`, which may have been stopped before its end.
        sampled: the same with further answers to these prompts, to train on.
        tokenizer: the target's.
        vocab_size: the target's.
        row_share: of `worthwhile_size`.
        most_validation: rows of validation.jsonl, where there are four times as many answers.

    Returns the journal's entry. Raises BadInput if there are fewer than LEAST_ANSWERS answers.
    """
    written = read_answers(answers)
    given = folder / "given.jsonl"
    chats = read_jsonl(given) if given.exists() and given.stat().st_size else []
    if len(written) < LEAST_ANSWERS:
        raise BadInput(
            f"--budget: the target answered {len(written)} prompts in the time for this, at least {LEAST_ANSWERS} "
            "are needed; give a larger --budget or fewer --max-new-tokens"
        )
    written.sort(key=lambda row: row["id"])
    num_validation = min(len(written) // 4, most_validation)
    validation, train = written[:num_validation], written[num_validation:]
    judged = {question_of(row) for row in validation}
    again = [row for path in sampled for row in read_answers(path) if question_of(row) not in judged]
    write_rows(folder / "validation.jsonl", validation)
    write_rows(folder / "train.jsonl", [*train, *again, *chats])
    write_json(folder / "manifest.json", joined_manifest([answers, *sampled]))
    greedy_ids = [ids for row in written for ids in answer_ids_of(row, tokenizer)]
    answer_ids = [*greedy_ids, *(ids for row in again for ids in answer_ids_of(row, tokenizer))]
    chat_ids = [tokenizer(text).input_ids for row in chats for text in assistant_texts(row)]
    tokens = [token for ids in (*answer_ids, *chat_ids) for token in ids]
    counts = np.bincount(tokens, minlength=vocab_size)[:vocab_size]  # [V]
    always = always_kept(tokenizer, eos_token_ids=eos_token_ids, vocab_size=vocab_size)
    size, covered = worthwhile_size(counts, always, row_share=row_share)
    truncated = sum(row["truncated"] for row in written)
    looping = sum(text_repetition(i, [ids]).is_looping for i, ids in enumerate(greedy_ids))
    usages = [row["usage"] for row in (*written, *again)]
    lengths = [usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages]
    longest = max(lengths) + ENDING
    return Answers(
        written=len(written),
        sampled=len(again),
        given=len(chats),
        validation=num_validation,
        tokens=sum(usage["completion_tokens"] for usage in usages),
        row_tokens=sum(lengths),
        truncated=truncated,
        looping=looping,
        complete=is_finished(answers),
        draft_vocab_size=size,
        coverage=covered,
        max_length=max(longest, 2048) if chats else longest,
        warnings=warnings_of(len(written), truncated=truncated, looping=looping),
    )


def is_finished(folder: Path) -> bool:
    """Whether `headstart data regenerate` has answered all prompts there."""
    return (folder / "answers.jsonl").exists()


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """The rows that `headstart data regenerate` has written into a folder so far."""
    return read_appended(folder / ("answers.jsonl" if is_finished(folder) else "answers.part.jsonl"))


def question_of(row: dict[str, Any]) -> str:
    """What an answered row was asked first, as `Asked.question`."""
    messages = row["messages"]
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return as_question(messages[:first])


def joined_manifest(folders: Sequence[Path]) -> dict[str, Any]:
    """The manifest of the first folder, with how the answers of all of them were sampled, by folder."""
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in folders]
    ways = {
        folder.name: way
        for folder, manifest in zip(folders, manifests, strict=True)
        for way in manifest["settings"]["sampling"].values()
    }
    return {**manifests[0], "settings": {**manifests[0]["settings"], "sampling": ways}}


def answer_ids_of(row: dict[str, Any], tokenizer: Any) -> list[list[int]]:
    """The token ids of the answers that the target has just written into a row; of their texts where it has none."""
    sequences = row.get(KEY, {}).get("sequences")
    if sequences is None:
        return [tokenizer(text, add_special_tokens=False).input_ids for text in assistant_texts(row)]
    return [each["input_ids"][start:end] for each in sequences for _, start, end in each["turns"]]


def assistant_texts(row: dict[str, Any]) -> list[str]:
    """The texts of a row's assistant messages."""
    messages = row.get("messages") or []
    return [message["content"] for message in messages if message.get("role") == "assistant" and message.get("content")]


def warnings_of(num_rows: int, *, truncated: int, looping: int) -> list[str]:
    """Warnings about answers that loop or are cut off, for the report."""
    found = []
    if looping > MANY * num_rows:
        found.append(
            f"{looping} of {num_rows} answers loop (more than half of their 4-grams repeat earlier ones): loops are "
            "easy to draft, and the speedup on other answers is lower"
        )
    if truncated > MANY * num_rows:
        found.append(
            f"{truncated} of {num_rows} answers were cut off at --max-new-tokens: the head learns little about how "
            "answers end"
        )
    return found
