"""The prompts of `make quickstart`: orders to write as JSON, a narrow domain, and general requests as a contrast."""

import argparse
import json
import random
import zlib
from pathlib import Path

from ...configs.files import write_text

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
HELD_OUT_SHARE = 8  # one order in eight is held out, by the checksum of its text


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


def orders(count: int, *, seed: int, held_out: bool) -> list[str]:
    """Distinct orders of one side of the split, the same for the same seed."""
    rng, wanted = random.Random(seed), dict[str, None]()
    while len(wanted) < count:
        text = order(rng)
        if (zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0) == held_out:
            wanted[text] = None
    return list(wanted)


def main() -> None:
    """Write prompts.jsonl, orders.jsonl (held out) and contrast.jsonl into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--train", type=int, default=240, help="prompts to train on")
    parser.add_argument("--held-out", type=int, default=12, help="prompts to measure on")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    files = {
        "prompts": orders(arguments.train, seed=arguments.seed, held_out=False),
        "orders": orders(arguments.held_out, seed=arguments.seed + 1, held_out=True),
        "contrast": CONTRAST,
    }
    for name, texts in files.items():
        rows = [json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts]
        write_text(arguments.output / f"{name}.jsonl", "".join(rows))


if __name__ == "__main__":
    main()
