"""Drafters that look up the text so far (n-gram, suffix), and how the command line names a drafter.

Lookups keep the committed texts on the host and read what is new of all rows once per round. They always draft K
tokens: where fewer were found, filler makes up the rest, and is verified like any other draft, so the text stays the
target's.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...configs.errors import BadInput
from ...heads.drafter import Drafter
from ...heads.registry import head_record, load_head
from ...heads.target import Target
from .draft_model import DraftModelDrafter, has_tokenizer_of, load_draft_model
from .host import RowText, TextDrafter
from .sparse_self import SparseSelfDrafter
from .translated import TranslatedDrafter

# what `--drafter` takes; PATH is a folder or a hub id
SPECS = ("ngram", "ngram:MAX", "suffix", "sparse-self", "sparse-self:BUDGET", "draft-model:PATH", "head:PATH")


class NgramRow:
    """A text and, for each n-gram in it that something follows, the position behind its latest occurrence."""

    def __init__(self, *, max_ngram: int, min_ngram: int):
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.text: list[int] = []
        self.behind: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        text = self.text
        for token in tokens:
            end = len(text)
            for size in range(self.min_ngram, min(self.max_ngram, end) + 1):
                self.behind[tuple(text[end - size :])] = end
            text.append(token)

    def draft(self, num_tokens: int) -> list[int]:
        text, found = self.text, self.text[-1:]  # without a match, the last token again
        for size in range(min(self.max_ngram, len(text)), self.min_ngram - 1, -1):
            start = self.behind.get(tuple(text[-size:]))
            if start is not None:
                found = text[start : start + num_tokens]
                break
        return [found[i % len(found)] for i in range(num_tokens)]


class NgramDrafter(TextDrafter):
    """Prompt lookup (Saxena 2023): what followed the latest earlier occurrence of the text's last tokens.

    The longest of max_ngram .. min_ngram last tokens that occurred before decides. Where fewer than K tokens follow,
    these are repeated, which is what a copy of period so many would go on with; without a match, the last token is.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1):
        if not 1 <= min_ngram <= max_ngram:
            raise BadInput(f"n-grams of {min_ngram} to {max_ngram} tokens: expected 1 or more, in ascending order")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def new_rows(self, batch_size: int) -> list[RowText]:
        return [NgramRow(max_ngram=self.max_ngram, min_ngram=self.min_ngram) for _ in range(batch_size)]


class SuffixTrie:
    """How often each token followed each context of up to max_depth tokens; node 0 is the empty context.

    A row is at several nodes at once: the contexts that its text ends with, the shortest first. What was seen when
    max_nodes are in use is counted where a node for it exists, and else forgotten.
    """

    def __init__(self, *, max_depth: int, max_nodes: int):
        self.max_depth, self.max_nodes = max_depth, max_nodes
        self.child: dict[tuple[int, int], int] = {}  # (node, token) -> node
        self.token, self.count, self.best = [-1], [0], [0]  # per node; best: the most frequent child, 0 for none

    @property
    def is_full(self) -> bool:
        return len(self.token) >= self.max_nodes

    def add(self, contexts: list[int], token: int) -> list[int]:
        """Count the token behind these contexts; returns the contexts that the text ends with then."""
        reached = [0]
        for node in contexts:
            child = self.child.get((node, token))
            if child is None:
                if self.is_full:
                    continue
                child = self.child[node, token] = len(self.token)
                self.token.append(token)
                self.count.append(0)
                self.best.append(0)
            self.count[child] += 1
            if self.count[child] >= self.count[self.best[node]]:  # of equals the latest
                self.best[node] = child
            reached.append(child)
        return reached[: self.max_depth + 1]

    def walk(self, contexts: list[int], num_tokens: int) -> list[int]:
        """At each step, the most frequent token behind the longest context that any token followed."""
        tokens: list[int] = []
        for _ in range(num_tokens):
            best = next(self.best[node] for node in reversed(contexts) if self.best[node])
            token = self.token[best]
            tokens.append(token)
            reached = (self.child.get((node, token)) for node in contexts)
            contexts = [0, *(node for node in reached if node is not None)][: self.max_depth + 1]
        return tokens


class SuffixRow:
    """One row's place in a trie."""

    def __init__(self, trie: SuffixTrie):
        self.trie = trie
        self.contexts = [0]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.contexts = self.trie.add(self.contexts, token)

    def draft(self, num_tokens: int) -> list[int]:
        return self.trie.walk(self.contexts, num_tokens)


class SuffixDrafter(TextDrafter):
    """The most frequent continuation of the longest suffix seen before (after SuffixDecoding, Oliaro et al. 2024).

    Args:
        max_depth: longest suffix, in tokens, that is told apart.
        is_shared: count over all rows and prompts of this drafter's life, not only a row's own text. A prompt that is
            asked twice then finds its own answer: right for a server, wrong for a benchmark that repeats.
        max_nodes: of all rows' tries together, about 150 bytes each; a shared trie that is full starts afresh with the
            next batch.
    """

    def __init__(self, max_depth: int = 16, *, is_shared: bool = False, max_nodes: int = 2**20):
        if max_depth < 1 or max_nodes < 2:
            raise BadInput(f"suffixes of {max_depth} tokens in {max_nodes} nodes: expected at least 1 and 2")
        self.max_depth, self.max_nodes = max_depth, max_nodes
        self.shared = self._new_trie(1) if is_shared else None

    def new_rows(self, batch_size: int) -> list[RowText]:
        if self.shared is None:
            return [SuffixRow(self._new_trie(batch_size)) for _ in range(batch_size)]
        if self.shared.is_full:
            self.shared = self._new_trie(1)
        return [SuffixRow(self.shared) for _ in range(batch_size)]

    def _new_trie(self, batch_size: int) -> SuffixTrie:
        return SuffixTrie(max_depth=self.max_depth, max_nodes=max(2, self.max_nodes // batch_size))


def parse_drafter(spec: str) -> tuple[str, str]:
    """`ngram:4` -> (`ngram`, `4`). Raises BadInput, before anything big is loaded, on what cannot be built."""
    kind, _, argument = spec.partition(":")
    counts = {"ngram": "MAX", "sparse-self": "BUDGET"}  # may be left out
    needs = {"draft-model": True, "head": True, "suffix": False, **dict.fromkeys(counts, bool(argument))}
    if kind not in needs:
        near = [one for one in SPECS if one.partition(":")[0] in get_close_matches(kind, needs, n=1)][-1:]
        near = [f"head:{spec}"] if Path(spec, "config.json").is_file() else near
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadInput(f"drafter {spec!r}: expected one of {', '.join(SPECS)}{hint}")
    if needs[kind] != bool(argument):
        raise BadInput(f"drafter {spec!r}: expected {[one for one in SPECS if one.startswith(kind)][-1]}")
    if kind in counts and argument and not (argument.isdecimal() and int(argument) > 0):
        raise BadInput(f"drafter {spec!r}: {counts[kind]} should be a whole number from 1 on")
    if kind == "head":
        head_record(argument)
    return kind, argument


def build_drafter(spec: str, target: Target) -> tuple[str, Drafter]:
    """A drafter for a target from one of SPECS; MAX: the longest n-gram, BUDGET: keys, PATH: a folder or a hub id.

    Returns: its name in reports, `ngram`, `suffix`, `sparse-self`, `draft-model` or the head's family; and the drafter.

    Raises: BadInput.
    """
    kind, argument = parse_drafter(spec)
    if kind == "ngram":
        return kind, NgramDrafter(int(argument)) if argument else NgramDrafter()
    if kind == "suffix":
        return kind, SuffixDrafter()
    if kind == "sparse-self":
        return kind, SparseSelfDrafter(target, int(argument)) if argument else SparseSelfDrafter(target)
    if kind == "draft-model":
        model = load_draft_model(argument, target)
        if has_tokenizer_of(target, model):
            return kind, DraftModelDrafter(model, target_vocab_size=target.vocab_size)
        return kind, TranslatedDrafter(model, target)
    head: Any = load_head(argument, target)
    return head.config.type, head


def build_drafters(specs: Sequence[str], target: Target) -> list[tuple[str, Drafter]]:
    """Several drafters under names of their own: where two are alike, with what tells them apart.

    Raises: BadInput where one of several adapts the target: the others would be measured on a model not their own.
    """
    built = [build_drafter(spec, target) for spec in specs]
    if target.is_adapted and len(specs) > 1:
        names = [name for name, drafter in built if drafter.adapts_target]
        raise BadInput(f"drafter {names[0]}: computes with adapters on the target; measure it by itself")
    names = [name for name, _ in built]
    for i, (spec, name) in enumerate(zip(specs, list(names), strict=True)):
        argument = spec.partition(":")[2]
        if argument and [one for one, _ in built].count(name) > 1:
            names[i] = f"{name}:{argument}"
    return [
        (f"{name}#{names[:i].count(name) + 1}" if name in names[:i] else name, drafter)
        for i, (name, (_, drafter)) in enumerate(zip(names, built, strict=True))
    ]


def trained(spec: str) -> dict[str, Any] | None:
    """What a head says of its own training, as docs/run_folder.md has it; None: nothing, or it is no head."""
    kind, argument = parse_drafter(spec)
    return head_record(argument).get("training") if kind == "head" else None
