"""How to draft: a chain of K tokens or a tree."""

from collections.abc import Iterable
from dataclasses import dataclass

from ...configs.errors import BadInput
from ...heads.drafter import Drafter
from ...heads.drafting import Tree


@dataclass(frozen=True)
class DraftSetting:
    """How to draft."""

    name: str  # `K 3`, or a tree's, `static:16`
    num_draft_tokens: int  # K, or the depth of a tree
    tree: Tree | None = None  # None: a chain
    verify_cost: float | None = None  # of one more token, in rounds that verify none; None: all drafts are verified

    @property
    def num_drafted(self) -> int:
        """Tokens that a round drafts per row, all nodes of a tree."""
        return self.tree.num_nodes if self.tree else self.num_draft_tokens

    @property
    def tree_name(self) -> str:
        """`chain`, or the tree's name, also if no prompt was left to shape that tree."""
        return "chain" if self.tree is None and self.name == f"K {self.num_draft_tokens}" else self.name


def chain(num_draft_tokens: int) -> DraftSetting:
    """A chain of that length."""
    return DraftSetting(f"K {num_draft_tokens}", num_draft_tokens)


def chains(drafter: Drafter, lengths: Iterable[int]) -> list[DraftSetting]:
    """Chains of these lengths, each cut to what the drafter can draft."""
    most = drafter.max_draft_tokens
    reachable = sorted({length if most is None else min(length, most) for length in lengths})
    return [chain(draft_length(drafter, length)) for length in reachable]


def draft_length(drafter: Drafter | None, num_draft_tokens: int | None) -> int:
    """The chain length K of a run; 0 without a drafter. Raises BadInput if the drafter cannot draft that many."""
    if drafter is None:
        return 0
    default = drafter.max_draft_tokens or drafter.default_draft_tokens
    length = default if num_draft_tokens is None else num_draft_tokens
    if length < 1 or length > (drafter.max_draft_tokens or length):
        raise BadInput(
            f"num_draft_tokens {length}: this drafter drafts 1 to {drafter.max_draft_tokens or 'any'} tokens"
        )
    return length
