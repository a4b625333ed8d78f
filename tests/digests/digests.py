"""Does one checkout compute what another one does? For refactorings, which must not change behaviour.

    python tests/digests/digests.py --before CHECKOUT --after CHECKOUT [--only NAME ...] [--keep FOLDER]

Each checkout runs in a process of its own and a temporary folder, on tiny random targets, in fp32 on one CPU thread,
with fixed seeds; about 4 minutes. A line per value says `equal`, or `DIFFERENT` and in which place first; the exit code
is 1 when any differs or is an error: what was raised is kept as `error: ...`, which equals nothing but itself. Values
have names, as `losses/heads/eagle3/padded/gradients`: --only takes names, or beginnings of them that end before a
slash. --keep writes before.json and after.json; --before and --after take such files too.

Groups (digest_groups.py): `losses`, loss, depths and gradients of every head variant; `drafts`, texts, accepted counts
and drafted tokens of `generate`; `reports`, what `headstart eval` and `plan` write; `training`, metrics and final
weights; `data` and `exports`, files. Left out are figures that are timed, what names machine or version, and texts for
people (LEFT_OUT in digest_world.py).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from digest_groups import Tasks

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def is_wanted(name: str, only: Sequence[str]) -> bool:
    """Whether a name, or the beginning of some, is among those asked for."""
    return not only or any(f"{name}/".startswith(f"{one}/") or f"{one}/".startswith(f"{name}/") for one in only)


def computed(group: str, tasks: "Tasks", only: Sequence[str]) -> dict[str, str]:
    """The values of a group, as JSON; an error under the name of what raised it."""
    found: dict[str, str] = {}
    for name, task in tasks.items() if is_wanted(group, only) else ():
        name = f"{group}/{name}"
        if not is_wanted(name, only):
            continue
        try:
            values = {f"{name}/{key}": json.dumps(value, sort_keys=True) for key, value in task().items()}
        except Exception as error:
            values = {name: f"error: {type(error).__name__}: {error}".replace(os.getcwd(), ".")}
        found |= {key: value for key, value in values.items() if is_wanted(key, only)}
    return found


def compute_here(output: Path, only: Sequence[str]) -> None:
    """All values of the checkout that is imported, into a file; the working folder is filled."""
    import headstart
    import torch
    from digest_groups import GROUPS
    from digest_world import build_world

    place = str(headstart.__file__)
    print(f"values of {place}", file=sys.stderr)
    if not place.startswith(os.environ["PYTHONPATH"]):
        raise SystemExit("another checkout was imported")
    torch.set_num_threads(1)
    build_world()
    found: dict[str, str] = {}
    for group in GROUPS:
        started = time.perf_counter()
        found |= (values := computed(group, GROUPS[group](), only))
        print(f"{group}: {len(values)} values, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    output.write_text(json.dumps(found, indent=1) + "\n")


def values_of(checkout: Path, only: Sequence[str]) -> dict[str, str]:
    """The values of a checkout, by a process in which it is imported; or of a file that --keep wrote."""
    if checkout.is_file():
        return {key: value for key, value in json.loads(checkout.read_text()).items() if is_wanted(key, only)}
    with tempfile.TemporaryDirectory(prefix="digests-") as folder:
        work = Path(folder, "work")
        work.mkdir()
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(checkout.resolve() / ".typings")}
        words = [sys.executable, str(Path(__file__).resolve()), "--into", str(Path(folder, "values.json"))]
        subprocess.run([*words, *(["--only", *only] if only else [])], cwd=work, env=environment, check=True)
        return json.loads(Path(folder, "values.json").read_text())


def is_error(value: str) -> bool:
    return value.startswith("error: ")


def where(before: Any, after: Any, place: str = "") -> str:
    """The first place in which two values differ, and what they are there."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            one, other = before.get(key, "(missing)"), after.get(key, "(missing)")
            if repr(one) != repr(other):  # so that 1 is not 1.0
                return where(one, other, f"{place}.{key}")
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            if repr(one) != repr(other):
                return where(one, other, f"{place}[{i}]")
    return f"{place.lstrip('.')} {str(before)[:60]} -> {str(after)[:60]}".strip()


def compare(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    """Print the table; returns how many values differ or are errors."""
    different = 0
    for name in sorted(before.keys() | after.keys()):
        one, other = before.get(name, "error: no value"), after.get(name, "error: no value")
        if one == other:
            print(f"equal      {name}{f'  {one}' if is_error(one) else ''}")
            continue
        different += 1
        pair = [text if is_error(text) else json.loads(text) for text in (one, other)]
        print(f"DIFFERENT  {name}  {where(*pair)}")
    names = before.keys() | after.keys()
    print(", ".join(f"{group} {count}" for group, count in Counter(name.split("/")[0] for name in names).items()))
    errors = [sum(map(is_error, values.values())) for values in (before, after)]
    print(f"{len(names)} values: {len(names) - different} equal, {different} different; "
          f"errors: {errors[0]} before, {errors[1]} after")  # fmt: skip
    return different + sum(errors)


def main() -> int:
    """Exit code 1 when any value differs or is an error, 2 where there is nothing to compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("--before", "--after", "--into", "--keep"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS if name == "--into" else None)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    given = parser.parse_args()
    if given.into:
        compute_here(given.into, given.only)
        return 0
    if not given.before or not given.after:
        parser.error("--before and --after: two checkouts, or files that --keep wrote")
    both = {side: values_of(getattr(given, side), given.only) for side in ("before", "after")}
    for side, values in both.items() if given.keep else ():
        given.keep.mkdir(parents=True, exist_ok=True)
        (given.keep / f"{side}.json").write_text(json.dumps(values, indent=1) + "\n")
    if not both["before"] and not both["after"]:
        parser.error(f"--only {' '.join(given.only)}: no value has such a name")
    return int(compare(both["before"], both["after"]) > 0)


if __name__ == "__main__":
    sys.exit(main())
