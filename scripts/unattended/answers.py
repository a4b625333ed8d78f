"""The stage of `headstart auto` in which the target answers prompts: greedily, and sampled as well where they are few.

The answers become the rows that candidates are trained and scored on.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import BadInput
from ...base.files import write_json
from ...base.jsonl import read_appended
from ...data_pipelines.vocab import always_kept, worthwhile_size
from ...eval.figures.repetition import text_repetition
from ...heads.stored.fit import row_share
from ...targets.chat.prompts import plain_ids
from ...targets.chat.written_ids import KEY
from ...targets.target import Target
from .candidates import BATCH_SIZE
from .held_out import as_question, plain, read_asked, write_rows
from .machine import without_weights
from .running.journal import AnswerCounts, known
from .running.session import AutoRun
from .running.steps import StepRecord
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


@dataclass(frozen=True)
class Pass:
    """All prompts are answered once: by the engine's server, by our own engine, or partly by each.

    number: 0: greedily; further passes are sampled.
    """

    run: AutoRun
    number: int

    @property
    def here(self) -> Path:
        """The folder of what our own engine answers."""
        return self.run.folder / ("answers" if not self.number else f"answers-{self.number + 1}")

    @property
    def served(self) -> Path:
        """The folder of what the engine's server answers."""
        return self.here.with_name(f"{self.here.name}-served")

    @property
    def folders(self) -> list[Path]:
        """Those that there are."""
        return [folder for folder in (self.served, self.here) if (folder / "manifest.json").exists()]

    @property
    def is_whole(self) -> bool:
        """Whether all prompts were asked, and some answered."""
        return any(all_answered(folder) and read_answers(folder) for folder in self.folders)

    def rows(self) -> list[dict[str, Any]]:
        """What was answered so far."""
        return [row for folder in self.folders for row in read_answers(folder)]

    def ask(self, server: TargetServer) -> None:
        """Have what is left of the prompts answered, for as long as there is time.

        Raises: BadInput if our own engine does not start to answer; SystemExit after a signal to stop.
        """
        if words := server.answering():
            problem, sources = "", self.run.data / "prompts.jsonl"
            try:
                record = self.regenerate(self.served, words, sources=sources, meanwhile=server.keep)
            except BadInput as error:
                problem = str(error)
            else:
                if not self.run.journal.unserved and (record.stopped or read_answers(self.served)):
                    return
                problem = record.last_line
            if not self.run.journal.unserved:
                server.give_up(problem)
        machine = self.run.machine
        words = [f"engine.dtype={machine.dtype}", f"engine.device={machine.device}"]
        if not (sources := self.left()):
            return
        record = self.regenerate(self.here, words, sources=sources)
        if not (self.here / "manifest.json").exists():
            raise BadInput(f"the target could not answer: {record.last_line}")
        if record.exit_code and not record.stopped and not all_answered(self.here):
            self.run.say(f"warning: answering failed, what is there is taken: {record.last_line}: see {record.log}")

    def left(self) -> Path | None:
        """The file of the prompts that the server has not answered; None: it has answered all of them."""
        prompts, done = self.run.data / "prompts.jsonl", {first_question(row) for row in read_answers(self.served)}
        if not done:
            return prompts
        asked = [asked.row for asked in read_asked(str(prompts)) if asked.question not in done]
        path = self.run.data / f"left-{self.number + 1}.jsonl"
        write_rows(path, asked)
        return path if asked else None

    def regenerate(
        self, folder: Path, words: Sequence[str], *, sources: Path, meanwhile: Callable[[], bool] = lambda: True
    ) -> StepRecord:
        """Run `headstart data regenerate`. Args: words: what it is told of the engine. meanwhile: as of `step`."""
        run, temperature = self.run, TEMPERATURE if self.number else 0
        settings, until = run.settings, run.journal.answers_until
        arguments = [
            *("data", "regenerate", "data/regenerate_local.yaml"),
            *(f"sources={sources}", f"output={folder}", f"target={settings.target}", *words),
            *(f"sampling.temperature={temperature:g}", f"sampling.max_tokens={settings.max_new_tokens}"),
        ]
        arguments += [f"engine.adapter={settings.adapter}"] if settings.adapter else []
        if temperature:
            arguments.append(f"sampling.seed={self.number}")
        again = f" again, sampled at temperature {temperature:g}," if temperature else ""
        what = f"the target answers{again} as many prompts as there is time for"
        return run.step(
            what, arguments, name=folder.name, seconds=run.left_until(until), until=until, meanwhile=meanwhile
        )


def answer(run: AutoRun, server: TargetServer) -> AnswerCounts:
    """The target answers prompts for its share of the time; the rows are written into the run's data/.

    A head learns more from several answers to a prompt than from reading one of them many times.

    Raises: BadInput if there are too few answers; SystemExit after a signal to stop.
    """
    passes = [Pass(run, number) for number in range(PER_PROMPT)]
    for number, one in enumerate(passes):
        if number and not (passes[number - 1].is_whole and asks_again(run, number)):
            break
        if not one.is_whole:
            one.ask(server)
            run.write()
    answers = gather(run, passes[0], passes[1:])
    for warning in answers.warnings:
        run.say(f"warning: {warning}")
    return answers


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


def gather(run: AutoRun, greedy: Pass, sampled: Sequence[Pass]) -> AnswerCounts:
    """Writes train.jsonl and validation.jsonl, from the target's answers and the given chats.

    Args: greedy: may have been stopped before its end. sampled: with further answers to these prompts, to train on.

    Raises: BadInput if there are fewer than LEAST_ANSWERS answers.
    """
    written = greedy.rows()
    if len(written) < LEAST_ANSWERS:
        raise BadInput(
            f"--budget: the target answered {len(written)} prompts in the time for this, at least {LEAST_ANSWERS} "
            "are needed; give a larger --budget or fewer --max-new-tokens"
        )
    written.sort(key=lambda row: row["id"])
    num_validation = min(len(written) // 4, num_validation_rows(run.settings.budget))
    validation, train = written[:num_validation], written[num_validation:]
    judged = {first_question(row) for row in validation}
    again = [row for one in sampled for row in one.rows() if first_question(row) not in judged]
    chats = learnt_chats(run.data / "given.jsonl", judged)
    write_rows(run.data / "validation.jsonl", validation)
    write_rows(run.data / "train.jsonl", [*train, *again, *chats])
    write_json(
        run.data / "manifest.json", joined_manifest([folder for one in (greedy, *sampled) for folder in one.folders])
    )
    target = without_weights(run.settings)
    greedy_ids, sampled_ids = (
        [ids for row in rows for ids in answer_ids_of(row, target.tokenizer)] for rows in (written, again)
    )
    chat_ids = [plain_ids(target.tokenizer, text) for row in chats for text in assistant_texts(row)]
    size, covered = draft_vocabulary_for(target, [*greedy_ids, *sampled_ids, *chat_ids])
    truncated = sum(row["truncated"] for row in written)
    looping = sum(text_repetition(i, [ids]).is_looping for i, ids in enumerate(greedy_ids))
    usages = [row["usage"] for row in (*written, *again)]
    lengths = [usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages]
    longest = max(lengths) + ENDING
    return AnswerCounts(
        written=len(written),
        sampled=len(again),
        served=sum(len(read_answers(one.served)) for one in (greedy, *sampled)),
        given=len(chats),
        validation=num_validation,
        tokens=sum(usage["completion_tokens"] for usage in usages),
        row_tokens=sum(lengths),
        truncated=truncated,
        looping=looping,
        complete=greedy.is_whole,
        draft_vocab_size=size,
        coverage=covered,
        max_length=max(longest, 2048) if chats else longest,
        warnings=warnings_of(len(written), truncated=truncated, looping=looping),
    )


def learnt_chats(given: Path, judged: Iterable[str]) -> list[dict[str, Any]]:
    """The given chats without those that ask what validation rows are judged by; none without such a file."""
    never = {plain(question) for question in judged}
    asked = read_asked(str(given)) if given.exists() and given.stat().st_size else ()
    return [chat.row for chat in asked if plain(chat.question) not in never]


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
    """What an answered row was asked first, as `PromptRow.question`."""
    if "prompt" in row:
        return as_question([{"role": "user", "content": row["prompt"]}])
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
    return [sequence["input_ids"][start:end] for sequence in sequences for _, start, end in sequence["turns"]]


def assistant_texts(row: dict[str, Any]) -> list[str]:
    """The texts of a row's assistant messages."""
    messages = row.get("messages") or [{"role": "assistant", "content": row.get("response")}]
    return [message["content"] for message in messages if message.get("role") == "assistant" and message.get("content")]


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
