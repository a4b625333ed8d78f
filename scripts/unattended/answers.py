"""The stage of `headstart auto` in which the target answers prompts: greedily, and sampled as well where they are few.

The answers become the rows that candidates are trained and scored on.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import BadInput
from ...base.files import write_json
from ...base.jsonl import read_appended
from ...data_pipelines.vocab import always_kept, worthwhile_size
from ...eval.figures.repetition import text_repetition
from ...heads.stored.fit import row_share
from ...targets.chat.written_ids import KEY
from ...targets.target import Target
from .candidates import BATCH_SIZE
from .held_out import first_asked, write_rows
from .machine import without_weights
from .running.journal import AnswerCounts, known
from .running.session import AutoRun
from .target_server import TargetServer

PER_PROMPT = 4  # answers, upper limit
TEMPERATURE = 0.7  # of all answers to a prompt but the first
MOST_READ = 6.0  # prompts are answered again if a head could read each answer more often than this in the time left
LEAST_STARTS = 3.0  # and if the time for answers left is that of so many starts of a command
LEAST_ANSWERS = 8
VALIDATION = 8, 32  # least and most rows that score candidates,
ROW_SECONDS = 150.0  # one for so many seconds of the budget: more rows tell more apart
ENDING = 16  # tokens that a chat template may add after an answer, upper limit
MANY = 0.2  # share of bad answers above which there is a warning


def answer(run: AutoRun, server: TargetServer) -> AnswerCounts:
    """The target answers prompts for its share of the time; the rows are written into the run's data/.

    A head learns more from several answers to a prompt than from reading one of them many times.

    Raises: BadInput if there are too few answers.
    """
    passes = [run.folder / (f"answers-{number}" if number > 1 else "answers") for number in range(1, PER_PROMPT + 1)]
    for number, folder in enumerate(passes):
        if number and not (is_whole(passes[number - 1]) and asks_again(run, number)):
            break
        if not is_whole(folder):
            ask(run, server, folder, seed=number)
            run.write()
    answers = gather(run, passes[0], passes[1:])
    for warning in answers.warnings:
        run.say(f"warning: {warning}")
    return answers


def is_whole(folder: Path) -> bool:
    """Whether all prompts were asked there, and some answered."""
    return all_answered(folder) and bool(read_answers(folder))


def ask(run: AutoRun, server: TargetServer, folder: Path, *, seed: int) -> None:
    """Have the prompts answered once, for as long as there is time, by the engine's server or by our own engine.

    Args: seed: of sampling; 0: greedily.
    Raises: BadInput if answering does not start.
    """
    settings, machine, until = run.settings, run.machine, run.journal.answers_until
    if (folder / "manifest.json").exists() and run.left_until(until) < server.seconds_to_start:
        return  # of a run that was stopped late: what is there is taken
    temperature = TEMPERATURE if seed else 0
    engine = server.answering() or [f"engine.dtype={machine.dtype}", f"engine.device={settings.device}"]
    arguments = [
        *("data", "regenerate", "data/regenerate_local.yaml", f"sources={run.data / 'prompts.jsonl'}"),
        *(f"output={folder}", f"target={settings.target}", *engine),
        *(f"sampling.temperature={temperature:g}", f"sampling.max_tokens={settings.max_new_tokens}"),
    ]
    arguments += [f"engine.adapter={settings.adapter}"] if settings.adapter else []
    arguments += [f"sampling.seed={seed}"] if seed else []
    again = f" again, sampled at temperature {temperature:g}," if seed else ""
    what = f"the target answers{again} as many prompts as there is time for"
    record = server.step(what, arguments, name=folder.name, seconds=run.left_until(until), until=until)
    if not (folder / "manifest.json").exists():
        raise BadInput(f"the target could not answer: {record.last_line}")
    if record.exit_code and not record.stopped and not all_answered(folder):
        run.say(f"warning: answering failed, what is there is taken: {record.last_line}: see {record.log}")


def asks_again(run: AutoRun, number: int) -> bool:
    """Whether prompts that have `number` answers are answered once more."""
    if run.left_until(run.journal.answers_until) < LEAST_STARTS * run.machine.begin_seconds:
        return False
    step_seconds = statistics.median(candidate.step_seconds for candidate in run.machine.able)
    num_read = run.clock.left / step_seconds * BATCH_SIZE  # rows
    return num_read > MOST_READ * number * known(run.journal.split).asked


def all_answered(folder: Path) -> bool:
    """Whether `headstart data regenerate` has answered all prompts there."""
    return (folder / "answers.jsonl").exists()


def gather(run: AutoRun, greedy: Path, sampled: Sequence[Path]) -> AnswerCounts:
    """Writes train.jsonl and validation.jsonl, from the target's answers.

    Args: greedy: folder; may have been stopped before its end. sampled: folders, if they are there, with further
        answers to these prompts, to train on.

    Raises: BadInput if there are fewer than LEAST_ANSWERS answers.
    """
    written, sampled = read_answers(greedy), [folder for folder in sampled if (folder / "manifest.json").exists()]
    if len(written) < LEAST_ANSWERS:
        raise BadInput(
            f"--budget: the target answered {len(written)} prompts in the time for this, at least {LEAST_ANSWERS} "
            "are needed; give a larger --budget or fewer --max-new-tokens"
        )
    written.sort(key=lambda row: row["id"])
    num_validation = min(len(written) // 4, num_validation_rows(run.settings.budget))
    validation, train = written[:num_validation], written[num_validation:]
    judged = {first_question(row) for row in validation}
    again = [row for folder in sampled for row in read_answers(folder) if first_question(row) not in judged]
    write_rows(run.data / "validation.jsonl", validation)
    write_rows(run.data / "train.jsonl", [*train, *again])
    write_json(run.data / "manifest.json", joined_manifest([greedy, *sampled]))
    target = without_weights(run.settings)
    greedy_ids, sampled_ids = (
        [ids for row in rows for ids in answer_ids_of(row, target.tokenizer)] for rows in (written, again)
    )
    size, covered = draft_vocabulary_for(target, [*greedy_ids, *sampled_ids])
    truncated = sum(row["truncated"] for row in written)
    looping = sum(text_repetition(i, [ids]).is_looping for i, ids in enumerate(greedy_ids))
    usages = [row["usage"] for row in (*written, *again)]
    lengths = [usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages]
    return AnswerCounts(
        written=len(written),
        sampled=len(again),
        validation=num_validation,
        tokens=sum(usage["completion_tokens"] for usage in usages),
        row_tokens=sum(lengths),
        truncated=truncated,
        looping=looping,
        complete=is_whole(greedy),
        draft_vocab_size=size,
        coverage=covered,
        max_length=max(lengths) + ENDING,
        warnings=warnings_of(len(written), truncated=truncated, looping=looping),
    )


def num_validation_rows(budget: float) -> int:
    """Rows that score candidates, with a budget of that many seconds, where there are four times as many answers."""
    least, most = VALIDATION
    return min(max(int(budget / ROW_SECONDS), least), most)


def draft_vocabulary_for(target: Target, texts: Sequence[Sequence[int]]) -> tuple[int | None, float | None]:
    """Size and coverage of the draft vocabulary that is worthwhile for these token ids; None: no cut is."""
    tokens = [token for ids in texts for token in ids]
    counts = np.bincount(tokens, minlength=target.vocab_size)[: target.vocab_size]  # [V]
    eos_token_ids = set(target.eos_token_ids)
    always = always_kept(target.tokenizer, eos_token_ids=eos_token_ids, vocab_size=target.vocab_size)
    return worthwhile_size(counts, always, row_share=row_share(target))


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """The rows that `headstart data regenerate` has written into a folder so far."""
    return read_appended(folder / ("answers.jsonl" if all_answered(folder) else "answers.part.jsonl"))


def first_question(row: dict[str, Any]) -> str:
    """`first_asked` of an answered row."""
    return first_asked(row.get("messages") or [{"role": "user", "content": row["prompt"]}])


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
    if (written := row.get(KEY)) is not None:
        turns = [(sequence, turn) for sequence in written["sequences"] for turn in sequence["turns"]]
        return [sequence["input_ids"][start:end] for sequence, (_, start, end) in turns]
    messages = row.get("messages") or [{"role": "assistant", "content": row.get("response")}]
    texts = [message.get("content") for message in messages if message["role"] == "assistant"]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts if text]


def warnings_of(num_rows: int, *, truncated: int, looping: int) -> list[str]:
    """Warnings about answers that loop or are cut off, for the report."""
    warnings = []
    if looping > MANY * num_rows:
        warnings.append(
            f"{looping} of {num_rows} answers loop (more than half of their 4-grams repeat earlier ones): loops are "
            "easy to draft, and the speedup on other answers is lower"
        )
    if truncated > MANY * num_rows:
        warnings.append(
            f"{truncated} of {num_rows} answers were cut off at --max-new-tokens: the head learns little about how "
            "answers end"
        )
    return warnings
