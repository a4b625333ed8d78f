"""What people call a drafter that a report names in one word: `suffix+answers` is "look-ups in answers"."""

import re

from ....heads.families import HEADS

WITH_ANSWERS = "+answers"  # behind the name of a drafter that looks up the target's earlier answers too
WORDS = {
    "ngram": "n-gram look-ups",
    "suffix": "look-ups in the text",
    f"suffix{WITH_ANSWERS}": "look-ups in answers",
    "draft-model": "draft model",
}


def drafter_words(name: str) -> str:
    """Of a drafter's name in reports, which may have an evaluation's name before it and an argument or a number behind
    it; a name that is not known stays as it is."""
    evaluation, colon, rest = name.rpartition(": ")
    kind, at, argument = rest.partition(":")
    kind, hash_sign, number = kind.partition("#")
    where = f" ({argument})" if at else f" {number}" if hash_sign else ""
    return f"{evaluation}{colon}{kind_words(kind)}{where}"


def served_words(name: str) -> str:
    """Of what drafts in a server: `head:runs/a/final at K 4` or `...@4` is "head a/final, 4 drafts", `head:runs/a/final
    window 256 at K 4` "head a/final, window 256, 4 drafts"."""
    counted = re.fullmatch(r"(.+?)(?: at K |@)(\d+)", name)
    spec, num = counted.groups() if counted else (name, "")
    spec, _, window = spec.partition(" window ")
    kind, colon, path = spec.partition(":")
    if kind == "ngram":
        words = "look-ups"
    elif colon and kind in ("head", "draft-model"):
        parts = path.rstrip("/").split("/")
        where = "/".join(parts[-2:] if parts[-1] in ("final", "best") else parts[-1:])
        words = f"{kind.replace('-', ' ')} {where}"
    else:
        words = spec
    words += f", window {window}" if window else ""
    return f"{words}, {num} draft{'s' * (num != '1')}" if num else words


def kind_words(kind: str) -> str:
    """Of a drafter's kind: a key of WORDS, a family of heads, or `hybrid+FAMILY`, perhaps with WITH_ANSWERS."""
    if kind in WORDS:
        return WORDS[kind]
    if kind.split("+")[0] == "hybrid":
        family = kind.removesuffix(WITH_ANSWERS).partition("+")[2]
        where = "look-ups" if kind.endswith(WITH_ANSWERS) else "look-ups in the text"
        return f"{kind_words(family) if family else 'a head'} with {where}"
    return (HEADS[kind].title if kind in HEADS else "") or kind
