"""A drafter that knows the text to come, and plants faults in its drafts: rounds accept none, some or all of them."""

from collections.abc import Sequence

import torch
from headstart.eval.drafters.host import RowText, TextDrafter, TextState
from headstart.heads.drafting.trees import Draws, Proposal, Tree

WORDS = 509  # at most the tokens of any kind
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0))  # of the nodes of its trees, by rank


class PlantedRow(RowText):
    def __init__(self, texts: list[list[int]]):
        self.texts, self.text = texts, []

    def extend(self, tokens: Sequence[int]) -> None:
        self.text += list(tokens)

    def known(self, num_tokens: int) -> list[int]:
        """What follows in the text that begins like this one; of no use in texts that are not known."""
        length = len(self.text)
        text = next((text for text in self.texts if text[:length] == self.text), [])
        return [*text[length:], *[3] * num_tokens][:num_tokens]

    def is_right(self, depth: int) -> bool:
        """Whether the draft at this depth is left right: rounds then accept none, some or all of four."""
        return (len(self.text) + depth) % 9 not in (2, 3, 8)

    def draft(self, num_tokens: int) -> list[int]:
        known = self.known(num_tokens)
        return [token if self.is_right(i) else (token + 1) % WORDS for i, token in enumerate(known)]

    def node(self, path: tuple[int, ...], known: list[int]) -> int:
        """Right on one path, by turns through the first or the second child of the root, down to a planted fault."""
        depth, turn = len(path) - 1, len(self.text) % 2
        is_right = path == (turn, *[0] * depth) and all(self.is_right(i) for i in range(len(path)))
        return known[depth] if is_right else (known[depth] + 1 + path[-1]) % WORDS


class Planted(TextDrafter):
    """Drafts the texts that are expected, with faults planted in them."""

    drafts_trees = True

    def __init__(self, texts: list[list[int]]):
        self.texts = texts

    def new_rows(self, batch_size: int) -> list[RowText]:
        return [PlantedRow(self.texts) for _ in range(batch_size)]

    def propose_tree(self, state: TextState, tree: Tree, *, draws: Draws | None = None) -> Proposal:
        tokens = [[row.node(path, row.known(tree.depth)) for path in PATHS] for row in state.rows]
        parents = [PATHS.index(path[:-1]) if path[:-1] else -1 for path in PATHS]
        return Proposal(torch.tensor(tokens), torch.tensor(parents).expand(len(tokens), -1))
