"""Drafters that look up the text so far, or earlier answers of the target too: n-grams and suffixes.

Lookups keep the committed texts on the host and read what is new of all rows once per round. They always draft K
tokens: where fewer were found, filler makes up the rest, and is verified like any other draft, so the text stays the
target's.
"""

from collections.abc import Sequence

import torch

from ...configs.errors import BadInput
from ...heads.drafting import Draws, Proposal, Tree
from .answers import Answers
from .host import RowText, TextDrafter, TextState
from .suffix import Rates, SuffixRow, SuffixTrie, dynamic_only, filled

ANSWERED_DRAFT_TOKENS = 7  # K where there are answers to look up: what is drafted costs nothing but its verification


class NgramRow(RowText):
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


class SuffixDrafter(TextDrafter):
    """The most frequent continuation of the longest suffix seen before (after SuffixDecoding, Oliaro et al. 2024).

    Args:
        max_depth: longest suffix, in tokens, that is told apart.
        is_shared: count over all rows and prompts of this drafter's life, not only a row's own text. A prompt that is
            asked twice then finds its own answer: right for a server, wrong for a benchmark that repeats.
        max_nodes: of all rows' tries together, about 150 bytes each; a shared trie that is full starts afresh with the
            next batch.
        answers: of the target to other prompts, looked up beside the row's own text; `SuffixRow` has who is believed.
    """

    drafts_trees = True

    def __init__(
        self,
        max_depth: int = 16,
        *,
        is_shared: bool = False,
        max_nodes: int = 2**20,
        answers: Answers | None = None,
    ):
        if max_depth < 1 or max_nodes < 2:
            raise BadInput(f"suffixes of {max_depth} tokens in {max_nodes} nodes: expected at least 1 and 2")
        self.max_depth, self.max_nodes, self.answers = max_depth, max_nodes, answers
        self.answers_digest = answers.digest if answers else None  # tells measurements apart
        self.rates = Rates()
        self.shared = self._new_trie(1) if is_shared else None
        if answers is not None:
            self.default_draft_tokens = ANSWERED_DRAFT_TOKENS

    def new_rows(self, batch_size: int) -> list[RowText]:
        answers = self.answers.trie if self.answers else None
        if self.shared is not None and self.shared.is_full:
            self.shared = self._new_trie(1)
        tries = (self.shared or self._new_trie(batch_size) for _ in range(batch_size))
        return [SuffixRow(trie, answers, rates=self.rates) for trie in tries]

    def propose_tree(self, state: TextState, tree: Tree, *, draws: Draws | None = None) -> Proposal:
        """A dynamic tree of that many nodes; BadInput on a fixed shape."""
        tree = dynamic_only(tree)
        paths = (row.tree(num_nodes=tree.num_nodes, depth=tree.depth) for row in state.rows)
        tokens, parents = zip(*(filled(each, tree) for each in paths), strict=True)
        return Proposal(torch.tensor(tokens), torch.tensor(parents))  # [B, S] each

    def leave_out(self, prompts: Sequence[Sequence[int]], questions: Sequence[str] = ()) -> None:
        if self.answers is not None:
            self.answers.leave_out(prompts, questions)

    def _new_trie(self, batch_size: int) -> SuffixTrie:
        return SuffixTrie(max_depth=self.max_depth, max_nodes=max(2, self.max_nodes // batch_size))
