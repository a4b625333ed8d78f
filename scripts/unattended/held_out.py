"""What is held out to measure on: a third of the prompts of `headstart auto`, or of the conversations of a refit.

Rows that were asked the same first question stay together, so that nothing is learnt from what is measured on.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.files import write_text
from ...data_pipelines.answers.conversations import SamplingConfig, exchanges
from ...data_pipelines.rows.sources import iter_rows
from ...data_pipelines.rows.traffic import ServedChat
from ...eval.figures.metrics import LEAST_TIMED
from ...targets.chat.messages import plain_text
from ...targets.chat.rows import VARIABLES, chat_of, is_chat
from ...targets.images.pictures import sources_in

MOST_PROMPTS = 32  # held out by auto, unless its batches are large
MOST_CONVERSATIONS = 64  # held out by refit
LEAST_QUESTIONS = 3 * LEAST_TIMED  # as a third is held out, and a confidence interval needs LEAST_TIMED
MOST_VALIDATION = 16  # rows of each side for the validations of refit's training


def held_out_questions(
    questions: Iterable[str], file: str, unit: str, *, most: int, seed: int
) -> tuple[list[str], list[str]]:
    """A random third of the different questions, at most so many, and the others, shuffled.

    Raises: BadInput if there are fewer than LEAST_QUESTIONS. Args: file, unit: where they are and what they are called.
    """
    shuffled = sorted(set(questions))
    if len(shuffled) < LEAST_QUESTIONS:
        few = f"{file}: {len(shuffled)} different {unit}, at least {LEAST_QUESTIONS} are needed"
        raise BadInput(f"{few}: a third is held out to measure on")
    random.Random(seed).shuffle(shuffled)
    count = min(len(shuffled) // 3, most)
    return shuffled[:count], shuffled[count:]


# Prompts, of `headstart auto`


@dataclass(frozen=True)
class PromptRow:
    """A row of --prompts. Rows with the same `first_asked` are duplicates."""

    question: str  # the messages before the first answer, as JSON
    told: dict[str, Any]  # what else the chat template is told, as rows record it
    row: dict[str, Any]


def read_asked(path: str) -> Iterator[PromptRow]:
    """Yields a file's rows with their questions. Raises BadInput on rows without a prompt."""
    for row in iter_rows(path):
        for exchange in exchanges(row, SamplingConfig(), turns="all"):
            told = {"tools": exchange.tools, VARIABLES: exchange.variables}
            question = as_question(exchange.script[: exchange.script.index(None)])
            given = chat_of(row.data, row.origin).messages if is_chat(row.data) else []
            # pictures are named from where the row is, and it is written elsewhere
            data = {**row.data, "messages": given} if sources_in(given) else row.data
            yield PromptRow(question, {key: value for key, value in told.items() if value}, data)


def as_question(messages: Sequence[Any]) -> str:
    """The messages before the first answer as JSON, for `PromptRow.question`."""
    return json.dumps(messages, ensure_ascii=False, sort_keys=True)


def first_asked(messages: Sequence[Any]) -> str:
    """The first question as `plain_text`, by which duplicates are found: whatever a system prompt or a greeting says
    before it."""
    asked = next((one for one in messages if one["role"] == "user"), messages[0])
    return plain_text(str(asked.get("content")))


def split_prompts(
    prompts: str, folder: Path, *, most: int = MOST_PROMPTS, seed: int, is_plain: bool = False
) -> tuple[int, int]:
    """Splits the prompts into held-out ones and ones for the target to answer.

    Writes into `folder`: held_out.jsonl; and prompts.jsonl, shuffled, so that the prompts answered in time are a random
    sample.

    Args: most: prompts that are held out. is_plain: whether the target has no chat template, and continues prompts.

    Returns the numbers of held-out prompts and of prompts to answer; of duplicate rows one counts.
    Raises BadInput if there are too few different prompts.
    """
    rows = {first_asked(json.loads(asked.question)): asked for asked in read_asked(prompts)}
    once = {asked.question: asked for asked in rows.values()}
    held_out, asked = held_out_questions(once, f"--prompts {prompts}", "prompts", most=most, seed=seed)
    write_rows(folder / "held_out.jsonl", [held_out_row(once[question], is_plain=is_plain) for question in held_out])
    write_rows(folder / "prompts.jsonl", [once[question].row for question in asked])
    return len(held_out), len(asked)


def held_out_row(asked: PromptRow, *, is_plain: bool) -> dict[str, Any]:
    """A row for `headstart eval --prompts`, with its domain if it has one."""
    domain = {key: asked.row[key] for key in ("category", "domain") if isinstance(asked.row.get(key), str)}
    messages = json.loads(asked.question)
    if is_plain and [message["role"] for message in messages] == ["user"] and not asked.told:
        return {"prompt": messages[0]["content"], **domain}
    return {"messages": messages, **asked.told, **domain}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


# Conversations, of `headstart refit`

NEW, OLD = "new", "old"  # traffic and replay


@dataclass(frozen=True)
class RowSplits:
    """The rows of one side: of the new traffic, or the old rows."""

    held_out: list[ServedChat]  # never trained on, nor is any row with the same first question
    # for the training's validations: of the others a fifth, at most MOST_VALIDATION, and what asks the same
    validation: list[ServedChat]
    rest: list[ServedChat]


def split_traffic(new: Sequence[ServedChat], old: Sequence[ServedChat], *, seed: int) -> tuple[RowSplits, RowSplits]:
    """Splits new traffic and old rows by conversation; what one side holds out is not in the other's rest.

    Raises: BadInput if one has too few conversations; there may be no old rows at all.
    """

    def chosen(file: str, rows: Sequence[ServedChat]) -> set[str]:
        questions = (row.question for row in rows)
        return set(held_out_questions(questions, file, "conversations", most=MOST_CONVERSATIONS, seed=seed)[0])

    of_new, of_old = chosen("--traffic", new), chosen("--replay", old) if old else set[str]()

    def splits(rows: Sequence[ServedChat], held_out: set[str]) -> RowSplits:
        shuffled = list(rows)
        random.Random(seed).shuffle(shuffled)
        rest = [row for row in shuffled if row.question not in of_new | of_old]
        questions = {row.question for row in rest[: min(len(rest) // 5, MOST_VALIDATION)]}
        validation = [row for row in rest if row.question in questions]
        learnt = [row for row in rest if row.question not in questions]
        if not learnt:  # all ask the same
            validation, learnt = [], rest
        return RowSplits([row for row in shuffled if row.question in held_out], validation, learnt)

    return splits(new, of_new), splits(old, of_old)


def mixed(new: Sequence[ServedChat], old: Sequence[ServedChat], *, seed: int) -> list[ServedChat]:
    """The training rows, shuffled: all new rows, and as many old ones, which repeat if there are too few."""
    rows = [*new, *(old[i % len(old)] for i in range(len(new) if old else 0))]
    random.Random(seed).shuffle(rows)
    return rows
