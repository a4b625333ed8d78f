"""The GPU suite's text: all sources and documents that the machine carries, and of them functions to complete."""

import ast
import hashlib
import random
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SUFFIXES = {".py", ".md", ".rst", ".txt", ".pyi"}
LONGEST_FILE = 400_000  # characters; longer ones are tables
NUM_SHARES = 8  # of the files: one is held out to measure on, heads learn from prompts of one, the target from the rest
BODY_LINES = range(3, 31)  # of a function worth completing
Chat = list[dict[str, str]]


@dataclass
class Corpus:
    """Texts by use, no text in two: pretrain, prompts (whose answers heads learn from), held_out."""

    pretrain: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Corpus":
        """The same text always comes to the same use."""
        corpus = cls()
        uses = {0: corpus.held_out, 1: corpus.prompts}
        for text in texts:
            uses.get(digest(text)[0] % NUM_SHARES, corpus.pretrain).append(text)
        return corpus


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def installed_texts(num_chars: int) -> Iterator[str]:
    """Sources and documents of Python and its packages here, each once, in an order that mixes them."""
    roots = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")}
    paths = {path: path.relative_to(root) for root in sorted(roots) for path in root.rglob("*")}
    paths = {path: within for path, within in paths.items() if path.suffix in SUFFIXES and path.is_file()}
    known: set[bytes] = set()
    for path in sorted(paths, key=lambda path: digest(str(paths[path]))):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if not text.strip() or len(text) > LONGEST_FILE or digest(text) in known:
            continue
        known.add(digest(text))
        yield text
        num_chars -= len(text)
        if num_chars <= 0:
            return


def completions(texts: Sequence[str], count: int, *, contexts: Sequence[int], seed: int) -> list[Chat]:
    """Chats that complete functions: the user's turn ends with a signature and docstring, the answer is the body.

    Args:
        texts: files; those that are no Python give none. count: of chats at most, at most four of a file.
        contexts: characters of the user's turn, at least half of them there; one of these is drawn for each chat.
    """
    rng, chats = random.Random(f"completions {seed}"), []
    for text in rng.sample(texts, len(texts)):
        lines = text.splitlines(keepends=True)
        bodies = function_bodies(text)
        for start, end in rng.sample(bodies, min(4, len(bodies))):
            size = rng.choice(contexts)
            before = "".join(lines[:start])[-size:]
            if len(before) >= size / 2:
                body = "".join(lines[start:end]).rstrip()
                chats.append([{"role": "user", "content": before}, {"role": "assistant", "content": body}])
        if len(chats) >= count:
            break
    return chats[:count]


def function_bodies(text: str) -> list[tuple[int, int]]:
    """(first line of the body behind the docstring, line behind its end), from 0, of a source's functions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    bodies = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            if body and body[0].lineno > node.lineno and node.end_lineno is not None:
                start, end = body[0].lineno - 1, node.end_lineno
                if end - start in BODY_LINES:
                    bodies.append((start, end))
    return bodies
