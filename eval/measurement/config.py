"""How to draft (`DraftSetting`) and how to measure it (`MeasureConfig`)."""

from collections.abc import Iterable
from dataclasses import dataclass

from ...configs.errors import BadInput
from ...heads.drafter import Drafter
from ...heads.drafting import Tree
from ..sampling import Sampling


@dataclass(frozen=True)
class DraftSetting:
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


def chains(drafter: Drafter, lengths: Iterable[int]) -> list[DraftSetting]:
    """Chains of these lengths, as far as the drafter drafts them; at least its longest."""
    most = drafter.max_draft_tokens
    asked = sorted({length if most is None else min(length, most) for length in lengths})
    return [DraftSetting(f"K {length}", draft_length(drafter, length)) for length in asked]


def draft_length(drafter: Drafter | None, num_draft_tokens: int | None) -> int:
    """The chain length K of a run; 0 without a drafter. Raises BadInput where the drafter cannot draft as many."""
    if drafter is None:
        return 0
    default = drafter.max_draft_tokens or drafter.default_draft_tokens
    length = default if num_draft_tokens is None else num_draft_tokens
    if length < 1 or length > (drafter.max_draft_tokens or length):
        raise BadInput(
            f"num_draft_tokens {length}: this drafter drafts 1 to {drafter.max_draft_tokens or 'any'} tokens"
        )
    return length


@dataclass(kw_only=True)
class MeasureConfig:
    """How to measure.

    num_draft_tokens: K of chains; None: the drafter's default. tree: draft trees of this shape instead; tree_name is
    what the report calls it. accept, steps: as `Engine` takes them. stop_strings: texts that end an answer.
    num_repeats: timed passes over the suite per side, after a warm-up, in alternating order.
    """

    num_draft_tokens: int | None = None
    tree: Tree | None = None
    tree_name: str = "chain"
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    accept: str = "exact"
    steps: str = "eager"
    stop_strings: tuple[str, ...] = ()
    batch_size: int = 1
    num_repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_repeats"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} {getattr(self, name)}: expected at least 1")

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
