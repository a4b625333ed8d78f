"""Drafters that look up the text so far, and perhaps earlier answers of the target: n-grams and suffixes.

They keep the committed texts on the host and copy the new tokens of all rows from the device once per round. They
always draft K tokens: if fewer were found, filler tokens follow, which are verified like any other draft.
"""

from collections.abc import Sequence

import torch

from ...configs.errors import BadInput
from ...heads.drafting import Draws, Proposal, Tree
from .answers import Answers
from .host import RowText, TextDrafter, TextState
from .rates import LookupRates
from .suffix import SuffixRow, SuffixTrie, dynamic_only, padded_tree

ANSWERED_DRAFT_TOKENS = 7  # default K with answers to look up, as drafting costs nothing and only verifying does


class NgramRow(RowText):
    """A text and, for each n-gram in it, the position after its latest occurrence that is followed by a token."""

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
        text, guess = self.text, self.text[-1:]  # without a match, the last token again
        for size in range(min(self.max_ngram, len(text)), self.min_ngram - 1, -1):
            start = self.behind.get(tuple(text[-size:]))
            if start is not None:
                guess = text[start : start + num_tokens]
                break
        return [guess[i % len(guess)] for i in range(num_tokens)]


class NgramDrafter(TextDrafter):
    """Prompt lookup (Saxena 2023): what followed the latest earlier occurrence of the text's last tokens.

    The longest match decides, from max_ngram down to min_ngram tokens. If fewer than K tokens follow it, they are
    repeated, as a text with that period would continue; without a match, the last token is repeated.
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
        max_depth: length of the longest suffix in tokens.
        is_shared: count over all rows and prompts in this drafter's lifetime, not only the row's own text. A prompt
            that is repeated then finds its own answer: right for a server, wrong for a benchmark that repeats prompts.
        max_nodes: of all rows' tries together, about 150 bytes each; a full shared trie is replaced by an empty one at
            the next batch.
        answers: the target's answers to other prompts, also looked up; `SuffixRow` chooses between both sources.

    Raises: BadInput if max_depth or max_nodes is too small.
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
        self.rates = LookupRates()
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
        tokens, parents = zip(*(padded_tree(path, tree) for path in paths), strict=True)
        return Proposal(torch.tensor(tokens), torch.tensor(parents))  # [B, S] each

    def leave_out(self, prompts: Sequence[Sequence[int]], questions: Sequence[str] = ()) -> None:
        if self.answers is not None:
            self.answers.leave_out(prompts, questions)

    def _new_trie(self, batch_size: int) -> SuffixTrie:
        return SuffixTrie(max_depth=self.max_depth, max_nodes=max(2, self.max_nodes // batch_size))
