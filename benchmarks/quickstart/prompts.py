"""The prompts of `make quickstart`: a narrow domain, orders to write as JSON or small Python functions, and general
requests as a contrast."""

import argparse
import json
import random
import zlib
from pathlib import Path

from ...base.files import write_text

NAMES = "Anna Ben Carla David Elena Felix Greta Hugo Irene Jonas Karin Leon Maria Nils Olga Paul Rosa Tina".split()
SURNAMES = "Weber Rossi Novak Jensen Dubois Silva Kowalski Larsen Bauer Costa Lindgren Moreau".split()
CITIES = "Berlin Oslo Madrid Vienna Prague Lisbon Warsaw Dublin Geneva Milan Bergen Lyon".split()
COLOURS = "blue red green black white yellow grey brown".split()
ITEMS = "chairs lamps tables bags jackets mugs blankets clocks mirrors notebooks pillows baskets".split()
UNITS = ("euros", "dollars")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday".split()
REQUESTS = (
    "Extract the order as JSON with the keys name, city, item, quantity and price.",
    "Read this note and write it as JSON with the keys name, city, item, quantity and price.",
    "Write the following order as JSON. Use the keys name, city, item, quantity and price.",
)
NOTES = (
    "{name} from {city} ordered {count} {item} for {price} {unit} each last {day}.",
    "{name}, who lives in {city}, would like {count} {item} at {price} {unit} apiece.",
    "On {day} we got a call from {name} in {city}: {count} {item}, {price} {unit} each.",
    "Please send {count} {item} to {name} in {city}. The price is {price} {unit} for each of them.",
    "New order, {day}. Customer: {name}, {city}. {count} {item} at {price} {unit}.",
)
CONTRAST = (
    "Write a short description of a red wool scarf for a shop.",
    "Explain to a child why the sky is blue.",
    "Write a short letter to a friend who moved to another city.",
    "Tell a short story about a dog that finds a key.",
)
HELD_OUT_SHARE = 8  # one order in eight is held out, by the checksum of its text; one function in eight, by its own

OF_NUMBERS = {
    "sum": "returns the sum of",
    "count": "counts",
    "largest": "returns the largest of",
    "smallest": "returns the smallest of",
    "mean": "returns the mean of",
    "product": "returns the product of",
    "squares": "returns a list of the squares of",
    "doubled": "returns a list of the doubles of",
    "sorted": "returns a sorted list of",
}
NUMBERS = {
    "even": "the even numbers",
    "odd": "the odd numbers",
    "positive": "the positive numbers",
    "negative": "the negative numbers",
    "threes": "the multiples of 3",
    "fives": "the multiples of 5",
    "large": "the numbers above 10",
    "small": "the numbers below 100",
    "two_digit": "the numbers with two digits",
}
OF_WORDS = {
    "count": "counts",
    "list": "returns a list of",
    "longest": "returns the longest of",
    "first": "returns the first of",
    "upper": "returns in capital letters",
    "reversed": "returns, each reversed,",
    "lengths": "returns a dictionary with the lengths of",
    "joined": "joins with commas",
}
WORDS = {
    "with_a": "the words that contain the letter a",
    "vowel": "the words that start with a vowel",
    "ending_s": "the words that end in s",
    "long": "the words of more than four letters",
    "short": "the words of at most three letters",
    "capital": "the words that start with a capital letter",
    "palindromes": "the words that are palindromes",
}
CODE_REQUESTS = (
    "Write a Python function that {does}. Answer with the code only.",
    "Write a short Python function named {name} that {does}. Answer with the code only.",
    "I need a Python function, {name}, which {does}. Only the code, please.",
)


def order(rng: random.Random) -> str:
    """One request with its note."""
    note = rng.choice(NOTES).format(
        name=f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}",
        city=rng.choice(CITIES),
        item=f"{rng.choice(COLOURS)} {rng.choice(ITEMS)}",
        count=rng.randint(2, 30),
        price=rng.randint(3, 95),
        unit=rng.choice(UNITS),
        day=rng.choice(DAYS),
    )
    return f"{rng.choice(REQUESTS)}\n\n{note}"


def function(rng: random.Random) -> tuple[str, str]:
    """One request, and the function that it asks for."""
    table, things, where = rng.choice([(OF_NUMBERS, NUMBERS, "numbers"), (OF_WORDS, WORDS, "words")])
    what, which = rng.choice(list(table)), rng.choice(list(things))
    name = f"{what}_{which}"
    text = rng.choice(CODE_REQUESTS).format(name=name, does=f"{table[what]} {things[which]} in a list of {where}")
    return text, name


def orders(count: int, *, seed: int, held_out: bool) -> list[str]:
    """Distinct orders of one side of the split, the same for the same seed."""
    rng, wanted = random.Random(seed), dict[str, None]()
    while len(wanted) < count:
        text = order(rng)
        if is_held_out(text) == held_out:
            wanted[text] = None
    return list(wanted)


def functions(count: int, *, seed: int, held_out: bool) -> list[str]:
    """Distinct requests for functions of one side of the split; no function is on both."""
    rng, wanted = random.Random(seed), dict[str, None]()
    while len(wanted) < count:
        text, name = function(rng)
        if is_held_out(name) == held_out:
            wanted[text] = None
    return list(wanted)


def is_held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


DOMAINS = {"orders": orders, "functions": functions}


def main() -> None:
    """Write prompts.jsonl, DOMAIN.jsonl (held out) and contrast.jsonl into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--domain", choices=DOMAINS, default="orders")
    parser.add_argument("--train", type=int, default=240, help="prompts to train on")
    parser.add_argument("--held-out", type=int, default=12, help="prompts to measure on")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    requests = DOMAINS[arguments.domain]
    files = {
        "prompts": requests(arguments.train, seed=arguments.seed, held_out=False),
        arguments.domain: requests(arguments.held_out, seed=arguments.seed + 1, held_out=True),
        "contrast": CONTRAST,
    }
    for name, texts in files.items():
        rows = [json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts]
        write_text(arguments.output / f"{name}.jsonl", "".join(rows))


if __name__ == "__main__":
    main()
