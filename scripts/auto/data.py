"""The traffic: prompts that are held out, prompts that the target answers, and what its answers are like."""

import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...configs.errors import BadInput
from ...configs.files import write_text
from ...configs.jsonl import read_jsonl
from ...data_pipelines.answers.conversations import SamplingConfig, exchanges
from ...data_pipelines.sources import iter_rows
from ...data_pipelines.vocab import always_kept, coverage, draft_vocabulary
from ...eval.measurement.metrics import LEAST_TIMED
from ...eval.measurement.repetition import text_repetition
from ...eval.suites.prompts import load_suite
from ...heads.target import Target
from .journal import Answers, Split

MOST_HELD_OUT = 32
LEAST_PROMPTS = 3 * LEAST_TIMED  # a third is held out, which must be enough to prove something
MOST_VALIDATION = 8  # rows that score candidates
LEAST_ANSWERS = 8
COVERED = 0.995  # of the answers' tokens, by a cut draft vocabulary
VOCABULARY_STEP = 256
ENDING = 16  # tokens that a template may put behind an answer
MANY = 0.2  # share of answers above which something is worth a warning


@dataclass(frozen=True)
class Asked:
    """A row of traffic. question: up to where the target first answers; two rows of one question are duplicates."""

    question: str  # JSON of messages
    row: dict[str, Any]


def read_asked(path: str) -> Iterator[Asked]:
    """Raises BadInput on rows without a prompt."""
    for row in iter_rows(path):
        for exchange in exchanges(row, SamplingConfig(), turns="all"):
            messages = exchange.script[: exchange.script.index(None)]
            yield Asked(json.dumps(messages, ensure_ascii=False, sort_keys=True), row.data)


def split_prompts(
    prompts: str, chats: str, folder: Path, *, most_held_out: int = MOST_HELD_OUT, seed: int
) -> tuple[int, int, int]:
    """Writes held_out.jsonl, prompts.jsonl, and of chats those that ask nothing that is held out, given.jsonl.

    Prompts are shuffled, so that the first that are answered are like the rest. Returns how many are held out, how many
    asked, and how many rows repeat another's question. Raises BadInput if there are too few.
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
    """A prompt as `headstart eval` reads it, with its domain."""
    domain = {key: asked.row[key] for key in ("category", "domain") if isinstance(asked.row.get(key), str)}
    return {"messages": json.loads(asked.question), **domain}


def is_answered(row: dict[str, Any]) -> bool:
    """Whether a row of --chats brings an answer; others have nothing to learn from."""
    messages = row.get("messages") or row.get("conversations") or [{}]
    last = messages[-1]
    return last.get("role", last.get("from")) in ("assistant", "gpt") or bool(row.get("response") or row.get("output"))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def describe_split(counts: tuple[int, int, int], path: Path, target: Target, *, max_new_tokens: int) -> Split:
    """The split, with the lengths of its held-out prompts. Raises BadInput if too few of them can be asked."""
    suite = load_suite(path, target, max_new_tokens=max_new_tokens)
    if len(suite.prompts) < LEAST_TIMED:
        failed = suite.failed[0]
        raise BadInput(f"--prompts: {len(suite.prompts)} held-out prompts can be asked: {failed.row}: {failed.reason}")
    lengths = [len(prompt) for prompt in suite.prompts]
    context = round(statistics.median(lengths)) + max_new_tokens // 2
    return Split(*counts, context=context, prompt_tokens=max(lengths))


def timing_text(path: Path, target: Target, *, max_new_tokens: int) -> list[int]:
    """Tokens of the held-out prompts, one behind another."""
    suite = load_suite(path, target, max_new_tokens=max_new_tokens)
    return [token for prompt in suite.prompts for token in prompt]


def gather(folder: Path, answers: Path, tokenizer: Any, *, vocab_size: int, eos_token_ids: set[int]) -> Answers:
    """Writes train.jsonl and validation.jsonl of what was answered, in time or not, and of given chats.

    Raises BadInput if there is too little.
    """
    finished = answers / "answers.jsonl"
    part = finished if finished.exists() else answers / "answers.part.jsonl"
    written = [json.loads(line) for line in part.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    given = folder / "given.jsonl"
    chats = read_jsonl(given) if given.exists() and given.stat().st_size else []
    if len(written) < LEAST_ANSWERS:
        raise BadInput(
            f"--budget: the target answered {len(written)} prompts in its share of the time, {LEAST_ANSWERS} are the "
            "least; give it more time or fewer --max-new-tokens"
        )
    written.sort(key=lambda row: row["id"])
    num_validation = min(len(written) // 4, MOST_VALIDATION)
    validation, train = written[:num_validation], written[num_validation:]
    write_rows(folder / "validation.jsonl", validation)
    write_rows(folder / "train.jsonl", [*train, *chats])
    write_text(folder / "manifest.json", (answers / "manifest.json").read_text())  # how answers were sampled
    texts = [text for row in written for text in assistant_texts(row)]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    learnt = [token for row in chats for text in assistant_texts(row) for token in tokenizer(text).input_ids]
    counts = np.bincount([token for row in ids for token in row] + learnt, minlength=vocab_size)[:vocab_size]
    always = always_kept(tokenizer, eos_token_ids=eos_token_ids, vocab_size=vocab_size)
    size, covered = vocabulary_for(counts, always)
    truncated = sum(row["truncated"] for row in written)
    looping = sum(text_repetition(i, [row]).is_looping for i, row in enumerate(ids))
    longest = max(row["usage"]["prompt_tokens"] + row["usage"]["completion_tokens"] for row in written) + ENDING
    return Answers(
        written=len(written),
        given=len(chats),
        validation=num_validation,
        tokens=sum(row["usage"]["completion_tokens"] for row in written),
        truncated=truncated,
        looping=looping,
        complete=part == finished,
        draft_vocab_size=size,
        coverage=covered,
        max_length=max(longest, 2048) if chats else longest,
        warnings=warnings_of(len(written), truncated=truncated, looping=looping),
    )


def assistant_texts(row: dict[str, Any]) -> list[str]:
    """What the assistant wrote, of a row of messages."""
    messages = row.get("messages") or []
    return [message["content"] for message in messages if message.get("role") == "assistant" and message.get("content")]


def vocabulary_for(counts: np.ndarray, always: list[int]) -> tuple[int | None, float | None]:
    """The smallest draft vocabulary that covers COVERED of the answers' tokens, and what it covers; (None, None) where
    that is not far smaller than the whole. Args: counts: [V] of each token."""
    if not counts.any():
        return None, None
    step = VOCABULARY_STEP
    for size in range(-(-max(len(always), step) // step) * step, len(counts) // 2 + 1, step):
        covered = coverage(counts, draft_vocabulary(counts, size=size, always=always))
        if covered >= COVERED:
            return size, round(covered, 4)
    return None, None


def warnings_of(num_rows: int, *, truncated: int, looping: int) -> list[str]:
    """What is wrong with answers, for a person who chooses the target and its prompts."""
    found = []
    if looping > MANY * num_rows:
        found.append(
            f"{looping} of {num_rows} answers repeat more than half of their own 4-grams: loops are drafted easily, "
            "and the speedup on answers without them is lower"
        )
    if truncated > MANY * num_rows:
        found.append(
            f"{truncated} of {num_rows} answers were cut at --max-new-tokens: how the target ends is seldom learnt"
        )
    return found
