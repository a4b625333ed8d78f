"""What followed the same words before: contexts counted in a trie, and a row's look-ups in its text and in answers."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ...configs.errors import BadInput
from ...heads.drafting import DynamicTree, Tree
from .host import RowText

# Matches in a row's own text are told apart by their length in tokens, from these on, and guesses that have a
# probability by it. Counts begin with these rates, as if seen so often; answers of SmolLM2-135M-Instruct gave those of
# matches.
MATCHES = (0, 1, 2, 3, 5, 8, 12)
MATCH_RATES = (0.05, 0.4, 0.5, 0.55, 0.65, 0.72, 0.87)
PROBABILITIES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
PROBABILITY_RATES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.94, 0.985)
WEIGHT = 6.0

Contexts = list[int]  # nodes of a trie: the contexts that a text ends with, the shortest first


class Match(NamedTuple):
    """A token that followed a context of so many tokens before, and its share of what did: its count / (all
    counts + 1), and 0 behind no context at all."""

    token: int
    length: int
    share: float


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

    def add(self, contexts: Contexts, token: int) -> Contexts:
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

    def guess(self, contexts: Contexts) -> Match:
        """The most frequent token behind the longest context that any token followed; token 0 where there is none."""
        for length in range(len(contexts) - 1, -1, -1):
            node = contexts[length]
            if best := self.best[node]:
                return Match(self.token[best], length, self.count[best] / (self.count[node] + 1) if node else 0.0)
        return Match(0, 0, 0.0)

    def follow(self, contexts: Contexts, token: int) -> Contexts:
        """The contexts behind a token that is not counted."""
        reached = (self.child.get((node, token)) for node in contexts)
        return [0, *(node for node in reached if node is not None)][: self.max_depth + 1]


class HitRates:
    """How often guesses were right, by their certainty: the length of a match in tokens, or a probability.

    Args: edges: the least certainty of each class, ascending from 0. rates: of each class before anything is counted.
    """

    def __init__(self, edges: Sequence[float], rates: Sequence[float]):
        self.edges = edges
        self.hits, self.totals = [WEIGHT * rate for rate in rates], [WEIGHT] * len(rates)

    def at(self, certainty: float) -> float:
        """The rate, 0 to 1, of guesses of that certainty."""
        place = bisect_right(self.edges, certainty) - 1
        return self.hits[place] / self.totals[place]

    @property
    def mean(self) -> float:
        """The rate of all guesses."""
        return sum(self.hits) / sum(self.totals)

    def add(self, certainty: float, *, is_right: bool) -> None:
        """Count a guess."""
        place = bisect_right(self.edges, certainty) - 1
        self.hits[place] += is_right
        self.totals[place] += 1


class Rates:
    """How often look-ups were right, in all rows of a drafter's life: those in a row's own text by the length of the
    match, those in answers by the guess's share."""

    def __init__(self) -> None:
        self.own = HitRates(MATCHES, MATCH_RATES)
        self.answers = HitRates(PROBABILITIES, PROBABILITY_RATES)


class Place(NamedTuple):
    """Where a text ends, in the trie of its own words and in that of answers."""

    own: Contexts
    answers: Contexts


Path = tuple[int, ...]  # the tokens of a tree's node and of those above it


class Node(NamedTuple):
    """A node of a tree, where it leads, and the chance that it and those above it are right."""

    chance: float
    path: Path
    place: Place


class SuffixRow(RowText):
    """One row's text, and what may follow it.

    Two tries are looked up, the row's own text and, where there are any, answers that the target gave before; the one
    whose guesses of that certainty were right more often so far decides.
    """

    def __init__(self, own: SuffixTrie, answers: SuffixTrie | None = None, *, rates: Rates):
        self.own, self.answers, self.rates = own, answers, rates
        self.place = Place([0], [0])

    def read_prompt(self, tokens: Sequence[int]) -> None:
        """Append a prompt, from which no rate is counted: what is copied within it says little of the answer."""
        for token in tokens:
            self._append(token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens, and count what would have been right."""
        for token in tokens:
            match = self.own.guess(self.place.own)
            self.rates.own.add(match.length, is_right=match.token == token)
            if self.answers is not None:
                match = self.answers.guess(self.place.answers)
                self.rates.answers.add(match.share, is_right=match.token == token)
            self._append(token)

    def guesses(self, place: Place) -> list[tuple[int, float]]:
        """The tokens that each trie expects there, and the chance that it is right; the likelier first."""
        match = self.own.guess(place.own)
        found = [(match.token, self.rates.own.at(match.length))]
        if self.answers is not None:
            match = self.answers.guess(place.answers)
            found.append((match.token, self.rates.answers.at(match.share)))
            found.sort(key=lambda guess: -guess[1])  # of equals the row's own
        return found

    def guess(self, place: Place) -> tuple[int, float]:
        """The token that most likely follows there, and the chance that it does."""
        return self.guesses(place)[0]

    def follow(self, place: Place, token: int) -> Place:
        """The place behind a token that is not counted."""
        answers = place.answers if self.answers is None else self.answers.follow(place.answers, token)
        return Place(self.own.follow(place.own, token), answers)

    def draft(self, num_tokens: int) -> list[int]:
        """At each step, the token that most likely follows."""
        tokens, place = list[int](), self.place
        for _ in range(num_tokens):
            tokens.append(self.guess(place)[0])
            place = self.follow(place, tokens[-1])
        return tokens

    def tree(self, seeds: Iterable[Node] = (), *, num_nodes: int, depth: int) -> list[Path]:
        """The nodes that are most likely to be accepted: what both tries expect behind the text, and behind the seeds;
        parents first, and as many fewer as there are no more within the depth.

        Args: seeds: other nodes, each with those above it among them.
        """
        waiting = [Node(1.0, (), self.place), *seeds]
        heap = [(-node.chance, len(node.path), node.path, node.place) for node in waiting]
        heapify(heap)
        found: dict[Path, None] = {}
        while heap and len(found) <= num_nodes:  # the root is one of them
            chance, length, path, place = heappop(heap)
            if path in found:
                continue
            found[path] = None
            if length < depth:
                for token, right in self.guesses(place):
                    heappush(heap, (chance * right, length + 1, (*path, token), self.follow(place, token)))
        return sorted(list(found)[1:], key=len)

    def _append(self, token: int) -> None:
        answers = self.place.answers if self.answers is None else self.answers.follow(self.place.answers, token)
        self.place = Place(self.own.add(self.place.own, token), answers)


def filled(paths: Sequence[Path], tree: DynamicTree) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree's nodes; where there are fewer, the root's most likely token again makes up."""
    index = {path: i for i, path in enumerate(paths)}
    num_left = tree.num_nodes - len(paths)
    tokens = [path[-1] for path in paths] + [paths[0][0]] * num_left
    return tokens, [index.get(path[:-1], -1) for path in paths] + [-1] * num_left


def dynamic_only(tree: Tree) -> DynamicTree:
    """Raises BadInput on a fixed shape."""
    if not isinstance(tree, DynamicTree):
        raise BadInput("look-ups draft chains and dynamic trees")
    return tree
