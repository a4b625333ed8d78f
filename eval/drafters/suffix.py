"""Look-ups of what followed the same words before: contexts counted in a trie, for a row's own text and for answers."""

from collections.abc import Sequence
from typing import NamedTuple

from .host import RowText
from .rates import LookupRates


class Match(NamedTuple):
    """A token that followed a context of `length` tokens before. share: its count / (the context's count + 1); 0 for
    the empty context."""

    token: int
    length: int
    share: float


class SuffixTrie:
    """How often each token followed each context of up to max_depth tokens; node 0 is the empty context.

    A text is at the node of the longest context that it ends with; the shorter ones are behind it by `shorter`, as in
    the automaton of Aho and Corasick (1975). Once max_nodes are in use, no node is added, and only existing ones are
    counted.
    """

    def __init__(self, *, max_depth: int, max_nodes: int):
        self.max_depth, self.max_nodes = max_depth, max_nodes
        self.child: dict[tuple[int, int], int] = {}  # (node, token) -> node
        # per node; best: the most frequent child, 0 for none; shorter: the context without its first token
        self.token, self.count, self.best, self.length, self.shorter = [-1], [0], [0], [0], [0]

    def add(self, node: int, token: int) -> int:
        """Count a token that follows a node's context and all shorter ones; returns the node of the text then."""
        contexts = [node]
        while node:
            node = self.shorter[node]
            contexts.append(node)
        reached = 0
        for node in reversed(contexts):
            child = self.child.get((node, token))
            if child is None:
                if len(self.token) >= self.max_nodes:
                    break  # nor is there one behind a longer context
                child = self.child[node, token] = len(self.token)
                self.token.append(token)
                self.count.append(0)
                self.best.append(0)
                self.length.append(self.length[node] + 1)
                self.shorter.append(reached)
            self.count[child] += 1
            if self.count[child] >= self.count[self.best[node]]:  # ties go to the latest
                self.best[node] = child
            reached = child
        return self._within_depth(reached)

    def guess(self, node: int) -> Match:
        """The most frequent token after the longest context that has any; token 0 if none has."""
        while node and not self.best[node]:
            node = self.shorter[node]
        best = self.best[node]
        if not best:
            return Match(0, 0, 0.0)
        share = self.count[best] / (self.count[node] + 1) if node else 0.0
        return Match(self.token[best], self.length[node], share)

    def follow(self, node: int, token: int) -> int:
        """The node after a further token, which is not counted."""
        child = self.child.get((node, token))
        while child is None and node:
            node = self.shorter[node]
            child = self.child.get((node, token))
        return self._within_depth(child or 0)

    def _within_depth(self, node: int) -> int:
        return self.shorter[node] if self.length[node] > self.max_depth else node


class Place(NamedTuple):
    """The nodes at which a text ends, in its own trie and in the trie of answers."""

    own: int  # nodes
    answers: int


class SuffixRow(RowText):
    """One row's text, and what may follow it.

    Two tries are looked up: the row's own text and, if there are any, the target's earlier answers. The guess with the
    higher hit rate for its class of certainty wins.
    """

    def __init__(self, own: SuffixTrie, answers: SuffixTrie | None = None, *, rates: LookupRates):
        self.own, self.answers, self.rates = own, answers, rates
        self.place = Place(0, 0)

    def read_prompt(self, tokens: Sequence[int]) -> None:
        """Append a prompt without counting hit rates: repetition within a prompt says little about the answer."""
        for token in tokens:
            self._append(token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens, and count which guesses would have been right."""
        for token in tokens:
            match = self.own.guess(self.place.own)
            self.rates.own.add(match.length, is_right=match.token == token)
            if self.answers is not None:
                match = self.answers.guess(self.place.answers)
                self.rates.answers.add(match.share, is_right=match.token == token)
            self._append(token)

    def guesses(self, place: Place) -> list[tuple[int, float]]:
        """Each trie's guess and its hit rate, the likelier first."""
        match = self.own.guess(place.own)
        ranked = [(match.token, self.rates.own.at(match.length))]
        if self.answers is not None:
            match = self.answers.guess(place.answers)
            ranked.append((match.token, self.rates.answers.at(match.share)))
            ranked.sort(key=lambda guess: -guess[1])  # stable: ties go to the row's own text
        return ranked

    def follow(self, place: Place, token: int) -> Place:
        """The place after a further token, which is not counted."""
        answers = place.answers if self.answers is None else self.answers.follow(place.answers, token)
        return Place(self.own.follow(place.own, token), answers)

    def copy(self, place: Place, num_tokens: int) -> list[tuple[int, float]]:
        """At each step the token that most likely follows, and the estimated probability that it and all before it are
        right."""
        tokens, chance = list[tuple[int, float]](), 1.0
        for _ in range(num_tokens):
            token, right = self.guesses(place)[0]
            place = self.follow(place, token)
            chance *= right
            tokens.append((token, chance))
        return tokens

    def draft(self, num_tokens: int) -> list[int]:
        return [token for token, _ in self.copy(self.place, num_tokens)]

    def _append(self, token: int) -> None:
        answers = self.place.answers if self.answers is None else self.answers.follow(self.place.answers, token)
        self.place = Place(self.own.add(self.place.own, token), answers)
