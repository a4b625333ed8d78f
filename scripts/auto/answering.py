"""The stage in which the target answers prompts: all of them greedily, then again, sampled, where these are few."""

import statistics
from pathlib import Path

from ...configs.errors import BadInput
from ...heads.fit import row_share
from ...heads.loading import TargetConfig
from ...heads.target import Target
from ...heads.targets.skeleton import NoSkeleton, load_skeleton
from ..unattended.steps import last_line
from . import data
from .budget import ANSWERS
from .candidates import BATCH_SIZE
from .session import Session

PER_PROMPT = 4  # answers, upper limit
TEMPERATURE = 0.7  # of all answers to a prompt but the first
MOST_READ = 6.0  # prompts are answered again if a head could read each answer more often than this in the time left
LEAST_STARTS = 3.0  # and if the time for answers left is that of so many starts of a command


def answer(run: Session) -> None:
    """The target answers prompts for its share of the time; writes `answers_until` and `answers` into the journal.

    A head learns more from several answers to a prompt than from reading one of them many times.

    Raises: BadInput if there are too few answers; SystemExit after a signal to stop.
    """
    journal, settings = run.journal, run.settings
    if journal.answers is not None:
        return
    if journal.answers_until is None:
        journal.answers_until = run.clock.used + ANSWERS * settings.budget
        run.write()
    folders = [run.folder / "answers", *(run.folder / f"answers-{number}" for number in range(2, PER_PROMPT + 1))]
    for number, folder in enumerate(folders):
        if number and not (data.is_finished(folders[number - 1]) and asks_again(run, number)):
            break
        if not data.is_finished(folder):
            ask(run, folder, seed=number, temperature=TEMPERATURE if number else 0, until=journal.answers_until)
            run.write()
    try:
        model = load_skeleton(TargetConfig(path=settings.target))
    except NoSkeleton:
        model = Target.load(settings.target, dtype=settings.dtype)
    greedy, *sampled = folders
    journal.answers = data.gather(
        run.folder / "data",
        greedy,
        [folder for folder in sampled if (folder / "manifest.json").exists()],
        model.tokenizer,
        vocab_size=model.vocab_size,
        row_share=row_share(model),
        eos_token_ids=set(model.eos_token_ids),
        most_validation=data.validation_rows(settings.budget),
    )
    for warning in journal.answers.warnings:
        run.say(f"warning: {warning}")
    run.write()


def asks_again(run: Session, number: int) -> bool:
    """Whether prompts that have `number` answers are answered once more."""
    machine, journal = run.machine, run.journal
    assert journal.split is not None and journal.answers_until is not None
    if journal.answers_until - run.clock.used < LEAST_STARTS * machine.start_seconds:
        return False
    step_seconds = statistics.median(each.step_seconds for each in machine.able)
    num_read = run.clock.left / step_seconds * BATCH_SIZE  # rows
    return num_read > MOST_READ * number * journal.split.asked


def ask(run: Session, folder: Path, *, seed: int, temperature: float, until: float) -> None:
    """Run `headstart data regenerate` over all prompts, up to the second `until` of the budget.

    Raises: BadInput if it does not start to answer; SystemExit after a signal to stop.
    """
    machine, settings = run.machine, run.settings
    arguments = [
        *("data", "regenerate", "data/regenerate_local.yaml"),
        *(f"sources={run.folder / 'data' / 'prompts.jsonl'}", f"output={folder}"),
        *(f"target={settings.target}", f"engine.dtype={machine.dtype}", f"engine.device={machine.device}"),
        *(f"sampling.temperature={temperature:g}", f"sampling.max_tokens={settings.max_new_tokens}"),
    ]
    if temperature:
        arguments.append(f"sampling.seed={seed}")
    again = f" again, sampled at temperature {temperature:g}," if temperature else ""
    what = f"the target answers{again} as many prompts as there is time for"
    record = run.step(what, arguments, name=folder.name, seconds=max(until - run.clock.used, 0), until=until)
    if not (folder / "manifest.json").exists():
        raise BadInput(f"the target could not answer: {last_line(Path(record.log))}")
