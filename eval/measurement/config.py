"""What a deployment chooses: chains of K tokens, or a tree; by the names that commands take."""

from collections.abc import Iterable
from dataclasses import dataclass

from ...heads.base import Drafter
from ...heads.drafting import Tree
from ..engine import draft_length


@dataclass(frozen=True)
class Setting:
    """How to draft. name: `K 3`, or a tree's, `static:16`. tree: its shape; None for a chain of num_draft_tokens."""

    name: str
    num_draft_tokens: int
    tree: Tree | None = None

    @property
    def num_drafted(self) -> int:
        """Tokens that a round drafts per row, all nodes of a tree."""
        return self.tree.num_nodes if self.tree else self.num_draft_tokens

    @property
    def tree_name(self) -> str:
        """`chain`, or the name of the tree."""
        return self.name if self.tree else "chain"


def chains(drafter: Drafter, lengths: Iterable[int]) -> list[Setting]:
    """Chains of these lengths, as far as the drafter drafts them; at least its longest."""
    most = drafter.max_draft_tokens
    asked = sorted({length if most is None else min(length, most) for length in lengths})
    return [Setting(f"K {length}", draft_length(drafter, length)) for length in asked]
