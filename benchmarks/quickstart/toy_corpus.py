"""The smoke run's corpus: seeded chat problems with reasoning traces, and source text from the standard library."""

import os
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path

NAMES = "Anna Ben Carl Dora Emil Fay Gus Hana Ivan Kim Leo Mia".split()
THINGS = "apples coins books stamps shells cards pens eggs".split()
HOLDERS = "bag box jar tray".split()
EVENTS = "train film trip game class".split()
GAINS = ("finds {d} more", "buys {d} more", "gets {d} from a friend", "wins {d}")
LOSSES = ("loses {d}", "sells {d}", "gives away {d}", "drops {d}")
OPENINGS = ("Let me think.", "Okay, step by step.", "First, what do we know?", "Let's see.")
ENDINGS = ("That is all.", "So that is the answer.", "Done.", "Nothing is left to do.")
HELD_OUT_SHARE = 8  # one question (or source file) in eight is held out, by the checksum of its text

Draft = tuple[str, list[str], str]  # question, trace sentences, final answer


def _total(rng: random.Random) -> Draft:
    """A running total of one to three changes."""
    name, thing, total = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 12)
    asked = [f"{name} has {total} {thing}."]
    starts = (f"{name} starts with {total}.", f"At first there are {total} {thing}.", f"We begin at {total}.")
    steps = [rng.choice(starts)]
    for _ in range(rng.randint(1, 3)):
        d = rng.randint(1, 9)
        is_gain = total < d or rng.random() < 0.5
        phrase = rng.choice(GAINS if is_gain else LOSSES).format(d=d)
        after = total + d if is_gain else total - d
        asked.append(f"{rng.choice(('Then ', '', 'Later '))}{name} {phrase}.")
        sum_ = f"{total} {'+' if is_gain else '-'} {d} = {after}."
        templates = (f"{name} {phrase}, so {sum_}", f"{name} {phrase}: {sum_}", f"Since {name} {phrase}, we get {sum_}")
        steps.append(rng.choice(templates))
        total = after
    return f"{' '.join(asked)} How many {thing} does {name} have?", steps, f"{name} has {total} {thing}."


def _groups(rng: random.Random) -> Draft:
    """Equal groups, added up one by one."""
    name, thing, holder = rng.choice(NAMES), rng.choice(THINGS), rng.choice(HOLDERS)
    count, size = rng.randint(2, 5), rng.randint(2, 9)
    question = rng.choice((
        f"{name} has {count} {holder}s with {size} {thing} in each. How many {thing} is that?",
        f"There are {size} {thing} in each {holder}, and {name} has {count} {holder}s. How many {thing} are there?",
    ))  # fmt: skip
    given = (
        f"There are {count} {holder}s, each with {size} {thing}.",
        f"Each {holder} has {size}, and we have {count}.",
    )
    steps, total = [rng.choice(given), f"One {holder}: {size}."], size
    for number in range(2, count + 1):
        sum_ = f"{total} + {size} = {total + size}."
        steps.append(rng.choice((f"{number} {holder}s: {sum_}", f"With {number} {holder}s it is {sum_}")))
        total += size
    return question, steps, rng.choice((f"There are {total} {thing}.", f"That is {total} {thing}."))


def _compare(rng: random.Random) -> Draft:
    """Who has more, and by how much."""
    (one, other), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    first, second = rng.sample(range(1, 16), 2)
    more, high, low = (one, first, second) if first > second else (other, second, first)
    question = f"{one} has {first} {thing} and {other} has {second}. Who has more, and how many more?"
    steps = [
        rng.choice((f"{one} has {first} and {other} has {second}.", f"For {one} it is {first}, for {other} {second}.")),
        rng.choice((f"{high} is more than {low}, so {more} has more.", f"{more} has more: {high} is more than {low}.")),
        rng.choice((f"The difference is {high} - {low} = {high - low}.", f"{high} - {low} = {high - low}.")),
    ]
    return question, steps, f"{more} has {high - low} more {thing}."


def _sequence(rng: random.Random) -> Draft:
    """The next number of a row with equal steps."""
    step, first = rng.randint(1, 6), rng.randint(1, 20)
    row = [first + step * i for i in range(5)]
    shown = ", ".join(map(str, row[:4]))
    question = rng.choice(
        (f"What comes next: {shown}?", f"Continue the row {shown}.", f"Which number follows {shown}?")
    )
    again = f"{row[3]} - {row[2]} = {step}"
    steps = [
        f"From {row[0]} to {row[1]} it is {row[1]} - {row[0]} = {step}.",
        rng.choice((f"From {row[2]} to {row[3]} it is {again} too.", f"The same again: {again}.")),
        rng.choice((f"So the next is {row[3]} + {step} = {row[4]}.", f"Go on: {row[3]} + {step} = {row[4]}.")),
    ]
    return question, steps, rng.choice((f"The next number is {row[4]}.", f"Next comes {row[4]}."))


def _clock(rng: random.Random) -> Draft:
    """Hours added on a clock of twelve."""
    start, hours, event, name = rng.randint(1, 12), rng.randint(1, 11), rng.choice(EVENTS), rng.choice(NAMES)
    question = rng.choice((
        f"The {event} starts at {start} o'clock and takes {hours} hours. When does it end?",
        f"{name} begins a {event} at {start} o'clock. It takes {hours} hours. When is it over?",
    ))  # fmt: skip
    given = (
        f"The {event} starts at {start} and takes {hours} hours.",
        f"It starts at {start}, and {hours} hours go by.",
    )
    end = start + hours
    steps = [rng.choice(given), f"{start} + {hours} = {end}."]
    if end > 12:
        turn = (f"{end} is past 12, so {end} - 12 = {end - 12}.", f"The clock turns over: {end} - 12 = {end - 12}.")
        steps.append(rng.choice(turn))
    else:
        steps.append(rng.choice((f"{end} is not past 12.", "That is still on the clock.")))
    return question, steps, f"It ends at {(end - 1) % 12 + 1} o'clock."


FAMILIES: dict[str, Callable[[random.Random], Draft]] = {
    "total": _total,
    "groups": _groups,
    "compare": _compare,
    "sequence": _sequence,
    "clock": _clock,
}


def _held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def reasoning_problems(count: int, seed: int, *, held_out: bool = False) -> list[dict]:
    """Chat problems; a held-out question never occurs among the others, whatever the seed, and is drawn once.

    Returns: dicts with `kind`, `messages` (user, assistant with a `<think>` trace) and `answer`, see `is_right`.
    """
    rng, problems, drawn = random.Random(f"reasoning {seed}"), [], set()
    while len(problems) < count:
        kind = rng.choice(list(FAMILIES))
        question, steps, final = FAMILIES[kind](rng)
        trace = " ".join([rng.choice(OPENINGS), *steps, rng.choice(ENDINGS)])
        if _held_out(question) != held_out or (held_out and question in drawn):
            continue
        drawn.add(question)
        turns = [("user", question), ("assistant", f"<think>\n{trace}\n</think>\n\n{final}")]
        messages = [{"role": role, "content": content} for role, content in turns]
        problems.append({"kind": kind, "messages": messages, "answer": _names_and_numbers(final)})
    return problems


def is_right(problem: dict, text: str) -> bool:
    """Whether the text closes its trace and then names exactly the names and numbers of the problem's answer."""
    return "</think>" in text and _names_and_numbers(text.rpartition("</think>")[2]) == problem["answer"]


def _names_and_numbers(text: str) -> str:
    return " ".join(re.findall(rf"\b(?:\d+|{'|'.join(NAMES)})\b", text))


def python_sources(seed: int, *, num_chars: int = 1_000_000, chars_per_file: int = 12_000) -> tuple[list, list]:
    """Beginnings of standard library files: about `num_chars` to train on, and texts of files held out by name."""
    paths = sorted(Path(os.path.dirname(os.__file__)).glob("*.py"))
    random.Random(f"sources {seed}").shuffle(paths)
    train, held_out = [], []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")[:chars_per_file]
        except (OSError, UnicodeDecodeError):
            continue
        if _held_out(path.name):
            held_out.append(text)
        elif num_chars > 0:
            train.append(text)
            num_chars -= len(text)
    return train, held_out


def contrast_prompts(count: int, seed: int) -> list[str]:
    """Distinct short passages of held-out source files, each from a definition up to the end of a later line."""
    texts = python_sources(seed)[1]
    starts = [(text, found.start()) for text in texts for found in re.finditer(r"^(?:def|class) ", text, re.M)]
    rng, prompts = random.Random(f"contrast {seed}"), {}
    for text, start in rng.sample(starts, len(starts)):
        end = text.find("\n", start + rng.randint(100, 180))
        if 100 <= end - start <= 260:
            prompts[text[start : end + 1]] = None
    return list(prompts)[:count]
