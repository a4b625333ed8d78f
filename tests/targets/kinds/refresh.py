"""Walks every kind of target, and writes the record and reference/targets.md: `make targets`, or some kinds by name.

    python tests/targets/kinds/refresh.py [KIND ...]

A process per core; 8 minutes of computing time in all. With names, the other kinds' outcomes stay as they are recorded.
"""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))  # of tests/words.py
from kinds import KINDS  # noqa: E402
from record import RECORD, Record, usual  # noqa: E402
from walk import walked  # noqa: E402


def walk(name: str) -> dict[str, str]:
    torch.set_num_threads(1)
    started = perf_counter()
    found = walked(KINDS[name])
    said = usual(KINDS[name], found).items()
    found = dict(one for one in found.items() if one not in said)
    words = [f"{step} {line.partition(':')[0]}" for step, line in found.items()]
    print(f"{name}, {perf_counter() - started:.0f} s: {', '.join(words) or 'all ok'}", flush=True)
    return found


def refresh(names: list[str]) -> None:
    if unknown := set(names) - KINDS.keys():
        raise SystemExit(f"{', '.join(sorted(unknown))}: no such kind of target")
    kept = Record.read().outcomes if names and RECORD.is_file() else {}
    asked = names or list(KINDS)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = {**kept, **dict(zip(asked, pool.map(walk, asked), strict=True))}
    outcomes = {name: found[name] for name in KINDS if name in found}
    Record(transformers.__version__, outcomes).write()


if __name__ == "__main__":
    refresh(sys.argv[1:])
