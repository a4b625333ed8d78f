"""The quickstart's corpus: seeded chat problems with reasoning traces, and source text from the standard library."""

import os
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path

NAMES = "Anna Ben Carl Dora Emil Fay Gus Hana Ivan Jude Kim Leo Mia Nora Omar Pia".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
PLACES = "kitchen garden drawer basket cellar box garage pocket".split()
THINGS = "apples coins books stamps shells cards pens eggs".split()
COLORS = "red blue green white black".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth".split()
HELD_OUT_SHARE = 8  # one question (or source file) in eight is held out, by the checksum of its text
OPENINGS = (
    "Okay, let me work through this.", "Let me think step by step.", "I should go slowly here.",
    "First I want to see what is given.", "Let's take this one piece at a time.", "Alright, what do we know?",
    "Hmm, let me see.", "This one needs a few small steps.", "Let me write down what happens.", "Good, let me start.",
)  # fmt: skip
ENDINGS = (
    "That settles it.", "Nothing is left to do.", "That was the last step.", "I am done.", "So that is the answer.",
    "Everything has been used.", "This looks right.", "Good, that is all.",
)  # fmt: skip
GAINS = ("buys {d} more", "finds {d} more", "wins {d} more", "gets {d} from {other}", "picks up {d} more")
LOSSES = ("loses {d}", "gives {d} to {other}", "sells {d}", "hands {d} to {other}", "gives away {d}")
PLUS_STEPS = (
    "We add {d}: {a} + {d} = {b}.", "Next, {a} + {d} = {b}.", "Going from {a} up by {d} gives {b}.",
    "With {a} and {d} more there are {b}.", "Plus {d}, so {a} + {d} makes {b}.", "Then {a} grows by {d} to {b}.",
)  # fmt: skip
MINUS_STEPS = (
    "We take away {d}: {a} - {d} = {b}.", "Next, {a} - {d} = {b}.", "Going from {a} down by {d} gives {b}.",
    "With {a} and {d} fewer there are {b}.", "Minus {d}, so {a} - {d} leaves {b}.", "Then {a} shrinks by {d} to {b}.",
)  # fmt: skip
FEATURES = (("taller", "tallest"), ("older", "oldest"), ("faster", "fastest"), ("stronger", "strongest"))

Draft = tuple[str, list[str], str, str]  # question, trace sentences, closing sentence, answer


def _varied(rng: random.Random, phrases: tuple[str, ...], count: int) -> list[str]:
    """Draws phrases so that none comes back before all have been used."""
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += rng.sample(phrases, len(phrases))
    return drawn[:count]


def _total(rng: random.Random) -> Draft:
    name, other = rng.sample(NAMES, 2)
    thing, total, num_changes = rng.choice(THINGS), rng.randint(3, 12), rng.randint(2, 4)
    events = [rng.choice((f"{name} has {total} {thing}.", f"There are {total} {thing} on {name}'s table."))]
    steps = [rng.choice(("The beginning: ", "At first: ", "We know: ")) + events[0]]
    links = _varied(rng, ("Then", "Later", "After that", "Next", "Soon", "In the evening"), num_changes)
    plus, minus = _varied(rng, PLUS_STEPS, num_changes), _varied(rng, MINUS_STEPS, num_changes)
    for index, link in enumerate(links):
        change = rng.randint(2, 6)
        gain = total < 8 or (total < 15 and rng.random() < 0.5)
        after = total + change if gain else total - change
        event = rng.choice(GAINS if gain else LOSSES).format(d=change, other=other)
        events.append(f"{link} {name} {event}.")
        steps.append(f"{events[-1]} {(plus if gain else minus)[index].format(a=total, d=change, b=after)}")
        total = after
    question = f"{' '.join(events)} How many {thing} does {name} have now?"
    closings = (f"{name} now has {total} {thing}.", f"The answer is {total}.", f"In the end there are {total} {thing}.")
    return question, steps, rng.choice(closings), str(total)


def _groups(rng: random.Random) -> Draft:
    thing, holder, size = rng.choice(THINGS), rng.choice(("bag", "tray", "crate", "jar")), rng.randint(2, 5)
    count, extra, name = rng.randint(2, 4), rng.randint(0, 4), rng.choice(NAMES)
    loose = f" and {extra} loose {thing}" if extra else ""
    facts = rng.choice((
        f"{name} has {count} {holder}s with {size} {thing} each{loose}.",
        f"Each {holder} holds {size} {thing}. {name} owns {count} {holder}s{loose}.",
    ))  # fmt: skip
    question = f"{facts} How many {thing} {rng.choice(('is that', 'are there', 'does that make'))}?"
    total = size
    firsts = (f"One {holder} gives {size} {thing}.", f"The first {holder} has {size}.", f"Start with {size} {thing}.")
    steps = [rng.choice(("Given: ", "We know this: ", "It says: ")) + facts, rng.choice(firsts)]
    for ordinal, phrase in zip(ORDINALS[1:count], _varied(rng, PLUS_STEPS, count - 1), strict=True):
        lead = rng.choice((f"Now the {ordinal} {holder}.", f"The {ordinal} one comes in.", f"On to the {ordinal}."))
        steps.append(f"{lead} {phrase.format(a=total, d=size, b=total + size)}")
        total += size
    if extra:
        steps.append(f"The loose ones count too: {total} + {extra} = {total + extra}.")
        total += extra
    closings = (f"That makes {total} {thing}.", f"{name} has {total} {thing} in all.", f"The answer is {total}.")
    return question, steps, rng.choice(closings), str(total)


def _sort(rng: random.Random) -> Draft:
    numbers, rising = rng.sample(range(1, 16), rng.randint(3, 5)), rng.random() < 0.5
    order, word = ("smallest to largest", "smallest") if rising else ("largest to smallest", "largest")
    shown = ", ".join(map(str, numbers))
    question = rng.choice((
        f"Sort these numbers from {order}: {shown}.", f"Put {shown} in order from {order}.",
        f"{rng.choice(NAMES)} wrote {shown}. List them from {order}.",
    ))  # fmt: skip
    steps = [rng.choice((f"The list is {shown}.", f"We have {shown}.", f"The numbers are {shown}."))]
    phrases = ("The {word} is {pick}.", "I pick {pick}.", "Now {pick} is {word}.", "Here {pick} comes next.")
    leftovers = ("That leaves {rest}.", "Without it we have {rest}.", "Still open: {rest}.", "Remaining are {rest}.")
    rest, done = list(numbers), []
    picks, lefts = _varied(rng, phrases, len(numbers)), _varied(rng, leftovers, len(numbers))
    while len(rest) > 1:
        pick = min(rest) if rising else max(rest)
        rest.remove(pick)
        done.append(pick)
        step = f"{picks[len(done)]} {lefts[len(done)]}"
        steps.append(step.format(word=word, pick=pick, rest=", ".join(map(str, rest))))
    answer = ", ".join(map(str, done + rest))
    return question, steps, rng.choice((f"The order is {answer}.", f"Sorted: {answer}.", f"It is {answer}.")), answer


def _count(rng: random.Random) -> Draft:
    colors = rng.sample(COLORS, 3)
    items = [rng.choice(colors) for _ in range(rng.randint(4, 7))]
    wanted, thing, name = rng.choice(colors), rng.choice(("bead", "flag", "ball", "card")), rng.choice(NAMES)
    question = rng.choice((
        f"{name} lays out these {thing}s: {', '.join(items)}. How many are {wanted}?",
        f"How many {wanted} {thing}s are in this row: {', '.join(items)}?",
    ))  # fmt: skip
    hits = ("{i} is {item}, that makes {n}.", "{i} comes {item}, so {n}.", "{i} {item}, count {n}.")
    misses = ("{i} is {item}, no.", "{i} comes {item}, skip it.", "{i} {item}, not wanted.", "{i} I see {item}, no.")
    goal = rng.choice((f"I look for {wanted} in this:", f"Only {wanted} counts:", f"Which are {wanted} here:"))
    found, steps = 0, [f"{goal} {', '.join(items)}."]
    hit, miss = _varied(rng, hits, len(items)), _varied(rng, misses, len(items))
    for index, item in enumerate(items):
        found += item == wanted
        phrase = (hit if item == wanted else miss)[index]
        steps.append(phrase.format(i=ORDINALS[index].capitalize(), item=item, n=found))
    closings = (f"There are {found} {wanted} {thing}s.", f"The answer is {found}.", f"I count {found} {wanted} ones.")
    return question, steps, rng.choice(closings), str(found)


def _weekday(rng: random.Random) -> Draft:
    start, count, forward, name = rng.randrange(7), rng.randint(2, 6), rng.random() < 0.6, rng.choice(NAMES)
    event = rng.choice(("picnic", "exam", "concert", "match", "visit", "trip"))
    when = "after" if forward else "before"
    fact = rng.choice((
        f"The {event} of {name} is {count} days {when} {DAYS[start]}.",
        f"{name} plans a {event} {count} days {when} {DAYS[start]}.",
    ))  # fmt: skip
    question = f"{fact} {rng.choice(('Which day is that?', 'On which day is it?'))}"
    way = f"From {DAYS[start]} I go {'forward' if forward else 'back'} {count} days."
    steps = [rng.choice(("It says: ", "We know this: ", "Given: ")) + fact, way]
    phrases = ("{n} step: {day}.", "{n} comes {day}.", "{n} day is {day}.", "{n} we reach {day}.", "{n}, {day}.")
    day = start
    for index, phrase in enumerate(_varied(rng, phrases, count)):
        day = (day + (1 if forward else -1)) % 7
        steps.append(phrase.format(n=ORDINALS[index].capitalize(), day=DAYS[day]))
    answer = DAYS[day]
    closings = (f"The {event} is on {answer}.", f"It is on a {answer}.", f"That day is {answer}.")
    return question, steps, rng.choice(closings), answer


def _clock(rng: random.Random) -> Draft:
    minutes, name = rng.randrange(2, 25) * 30, rng.choice(NAMES)
    tasks = rng.sample(("a walk", "lunch", "a film", "a nap", "homework", "a class"), rng.randint(2, 3))
    spans = [rng.randint(1, 5) for _ in tasks]
    lengths = [f"{span // 2} hours" if span % 2 == 0 and span > 2 else _hours(span) for span in spans]
    listed = ", then ".join(f"{task} of {length}" for task, length in zip(tasks, lengths, strict=True))
    fact = f"At {_time(minutes)} {name} starts {listed}."
    question = f"{fact} What time is it when {name} is done?"
    steps = [rng.choice(("It says: ", "We know this: ", "Given: ")) + fact]
    phrases = (
        "{task} takes {length}: from {a} to {b}.", "{task} of {length} moves {a} to {b}.",
        "From {a}, {task} lasts {length}, until {b}.", "At {a} comes {task}, {length}, so it ends at {b}.",
    )  # fmt: skip
    for task, span, length, phrase in zip(tasks, spans, lengths, _varied(rng, phrases, len(tasks)), strict=True):
        step = phrase.format(task=task, length=length, a=_time(minutes), b=_time(minutes + span * 30))
        steps.append(step[0].upper() + step[1:])
        minutes += span * 30
    answer = _time(minutes)
    closings = (f"{name} is done at {answer}.", f"It is {answer}.", f"Everything ends at {answer}.")
    return question, steps, rng.choice(closings), answer


def _hours(span: int) -> str:
    """Names a span of one, two, three or five half hours."""
    return {1: "half an hour", 2: "one hour", 3: "one hour and a half", 5: "2 hours and a half"}[span]


def _time(minutes: int) -> str:
    return f"{(minutes // 60 - 1) % 12 + 1}:{minutes % 60:02d}"


def _ranking(rng: random.Random) -> Draft:
    people, (more, most) = rng.sample(NAMES, rng.randint(3, 5)), rng.choice(FEATURES)
    clues = [f"{above} is {more} than {below}." for above, below in zip(people, people[1:], strict=False)]
    shuffled = rng.sample(clues, len(clues))
    question = f"{' '.join(shuffled)} {rng.choice(('Who is the', 'Which of them is the'))} {most}?"
    current = people.index(shuffled[0].split()[-1][:-1])
    firsts = ("I start from {name}.", "Take {name} first.", "Let me begin with {name}.")
    steps = [rng.choice(firsts).format(name=people[current])]
    steps.insert(0, f"The clues: {' '.join(shuffled)}")
    phrases = (
        "{below} has {above} ahead.", "But {above} is {more} than {below}.", "{above} beats {below}.",
        "Above {below} there is {above}.", "So {below} is behind {above}.",
    )  # fmt: skip
    for index, phrase in enumerate(_varied(rng, phrases, current)):
        above, below = people[current - index - 1], people[current - index]
        steps.append(phrase.format(above=above, below=below, more=more))
    nobodies = ("Nobody is {more} than {top}.", "No clue puts anyone above {top}.", "And {top} has nobody ahead.")
    steps.append(rng.choice(nobodies).format(more=more, top=people[0]))
    closings = (f"{people[0]} is the {most}.", f"The {most} is {people[0]}.", f"It is {people[0]}.")
    return question, steps, rng.choice(closings), people[0]


def _moves(rng: random.Random) -> Draft:
    objects = rng.sample(("key", "lamp", "letter", "ring", "ticket"), 2)
    asked, where, events, steps = objects[0], "", [], []
    put = ("{who} puts the {it} in the {at}.", "{who} takes the {it} to the {at}.", "{who} moves the {it} to the {at}.")
    same = ("So the {at} has it.", "Now it is in the {at}.", "It sits in the {at} then.", "That means {at}.")
    skips = ("The {it} does not matter.", "That is only the {it}.", "Ignore the {it}.", "The {it} is not asked for.")
    moved = [asked, *(rng.choice(objects) for _ in range(rng.randint(2, 4)))]
    rng.shuffle(moved)
    goals = [*rng.sample(PLACES, len(moved))]
    hits, passes = _varied(rng, same, len(moved)), _varied(rng, skips, len(moved))
    for index, (it, at) in enumerate(zip(moved, goals, strict=True)):
        who = rng.choice(NAMES)
        events.append(rng.choice(put).format(who=who, it=it, at=at))
        reaction = (hits if it == asked else passes)[index].format(who=who, it=it, at=at)
        steps.append(f"{events[-1]} {reaction}")
        where = at if it == asked else where
    question = f"{' '.join(events)} Where is the {asked} in the end?"
    steps.insert(0, rng.choice((f"I follow the {asked}.", f"We care about the {asked}.", f"Track the {asked}.")))
    closings = (f"The {asked} is in the {where}.", f"It is in the {where}.", f"Look in the {where}.")
    return question, steps, rng.choice(closings), where


FAMILIES: dict[str, Callable[[random.Random], Draft]] = {
    "total": _total, "groups": _groups, "sort": _sort, "count": _count,
    "weekday": _weekday, "clock": _clock, "ranking": _ranking, "moves": _moves,
}  # fmt: skip


def _held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def reasoning_problems(count: int, seed: int, *, held_out: bool = False) -> list[dict]:
    """Chat problems with distinct questions; held-out questions never occur among the others, whatever the seed."""
    rng, seen, problems = random.Random(f"reasoning {seed}"), set(), []
    while len(problems) < count:
        kind = rng.choice(list(FAMILIES))
        question, steps, closing, answer = FAMILIES[kind](rng)
        opening, ending = rng.choice(OPENINGS), rng.choice(ENDINGS)
        trace = " ".join([opening, *steps, ending] if rng.random() < 0.7 else [*steps, ending])
        if question in seen or _held_out(question) != held_out:
            continue
        seen.add(question)
        turns = [("user", question), ("assistant", f"<think>\n{trace}\n</think>\n\n{closing}")]
        messages = [{"role": role, "content": content} for role, content in turns]
        problems.append({"kind": kind, "messages": messages, "answer": answer})
    return problems


def is_right(problem: dict, text: str) -> bool:
    """Whether the text closes its trace and then names the problem's answer and no other candidate."""
    final = text.rpartition("</think>")[2] if "</think>" in text else ""
    if problem["answer"][0].isdigit():
        return re.findall(r"\d+(?::\d+)?(?:, \d+)*", final) == [problem["answer"]]
    candidates = {*NAMES, *DAYS, *PLACES}
    return [word for word in re.findall(r"\w+", final) if word in candidates] == [problem["answer"]]


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
