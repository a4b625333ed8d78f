"""How to draft: a chain of K tokens, a tree, or a chain whose tokens are drawn."""

from collections.abc import Iterable
from dataclasses import dataclass

from ...base.errors import BadInput
from ...heads.drafting.drafter import Drafter
from ...heads.drafting.trees import DynamicTree, SampledChain, Tree
from ...targets.target import Target

TREE_NAMES = ("chain", "dynamic", "sampled-chain")
MOST_NODES = 1024  # of a dynamic tree


@dataclass(frozen=True)
class DraftSetting:
    """How to draft."""

    name: str  # `K 3`, or a tree's, `dynamic:16`
    num_draft_tokens: int  # K, or the depth of a tree
    tree: Tree | None = None  # None: a chain
    verify_cost: float | None = None  # of one more token, in rounds that verify none; None: all drafts are verified

    @property
    def num_drafted(self) -> int:
        """Tokens that a round drafts per row, all nodes of a tree."""
        return self.tree.num_nodes if self.tree else self.num_draft_tokens

    @property
    def tree_name(self) -> str:
        """`chain`, or the tree's name."""
        return "chain" if self.tree is None else self.name


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


def drafts_tree(target: Target, drafter: Drafter, name: str) -> bool:
    """Whether a drafter drafts the tree of that name for this target: only heads draft trees, and draw chains."""
    return name == "chain" or (drafter.drafts_trees and (name != "dynamic" or target.decodes_trees))


def named_tree(
    name: str, target: Target, drafter: Drafter, *, num_nodes: int, num_draft_tokens: int | None = None
) -> Tree | None:
    """The tree of that name for a drafter, num_draft_tokens deep; None for a chain.

    Raises: BadInput on an unknown name, for a drafter that does not draft it, and on a num_draft_tokens beyond it.
    """
    if name not in TREE_NAMES:
        raise BadInput(f"--tree {name}: expected one of {', '.join(TREE_NAMES)}")
    if name == "chain":
        return None
    if not drafts_tree(target, drafter, name):
        who = type(drafter).__name__ if target.decodes_trees or name != "dynamic" else f"target {target.name}"
        raise BadInput(f"--tree {name}: not with {who}")
    depth = draft_length(drafter, num_draft_tokens)
    if name == "sampled-chain":
        return SampledChain(depth)
    return DynamicTree(num_nodes=num_nodes, depth=depth, top_k=max(4, round(num_nodes**0.5)))
