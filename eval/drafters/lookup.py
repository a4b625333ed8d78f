"""Drafters that look up the text so far: n-grams and suffixes.

Lookups keep the committed texts on the host and read what is new of all rows once per round. They always draft K
tokens: where fewer were found, filler makes up the rest, and is verified like any other draft, so the text stays the
target's.
"""

from collections.abc import Sequence

from ...configs.errors import BadInput
from .host import RowText, TextDrafter


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
            tokens.append(self.guess(contexts)[0])
            contexts = self.follow(contexts, tokens[-1])
        return tokens

    def guess(self, contexts: list[int]) -> tuple[int, int]:
        """The most frequent token behind the longest context that any token followed, and how long that is; token 0
        where there is no text."""
        for length in range(len(contexts) - 1, -1, -1):
            if best := self.best[contexts[length]]:
                return self.token[best], length
        return 0, 0

    def follow(self, contexts: list[int], token: int) -> list[int]:
        """The contexts behind a token that is not counted."""
        reached = (self.child.get((node, token)) for node in contexts)
        return [0, *(node for node in reached if node is not None)][: self.max_depth + 1]


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
