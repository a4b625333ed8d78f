"""What was drafted with, as far as the figures depend on it: the tree, the draft vocabulary, how prompts end."""

from collections.abc import Iterable, Sequence
from typing import Any

from ...heads.base import DraftHead
from ...heads.drafter import Drafter
from ...heads.drafting import StaticTree, Tree


def tree_shape(tree: Tree | None) -> dict[str, Any] | None:
    """The report's form of a tree; None for a chain.

    A tree of fixed shape: `parents`, for each node the index of the node before it, -1 for the last committed token; of
    a parent's children the likelier come first. A dynamic one, whose shape is another in every round: its limits.
    """
    if tree is None:
        return None
    if isinstance(tree, StaticTree):
        return {"parents": tree.parents}
    return {"num_nodes": tree.num_nodes, "depth": tree.depth, "top_k": tree.top_k}


def draft_vocabulary(drafter: Drafter, texts: Iterable[Iterable[int]]) -> dict[str, Any] | None:
    """Size of a head's cut vocabulary, and the share of these tokens that it holds; None for a drafter without one.

    Args: texts: new tokens that the target chose. A token outside the vocabulary cannot be drafted.
    """
    if not isinstance(drafter, DraftHead) or drafter.vocabulary is None:
        return None
    known = set(drafter.vocabulary.to_target.tolist())
    inside = [token in known for text in texts for token in text]
    return {"size": len(known), "coverage": round(sum(inside) / len(inside), 4) if inside else None}


def asked_as_trained(training: dict[str, Any] | None, prompts: Sequence[Sequence[int]]) -> float | None:
    """The share of prompts that end with the tokens with which all prompts in training ended; None: there are none."""
    ending = ((training or {}).get("prompt_ending") or {}).get("token_ids")
    if not ending or not prompts:
        return None
    return sum(list(prompt[-len(ending) :]) == ending for prompt in prompts) / len(prompts)


def beyond_training(training: dict[str, Any] | None, by_context: dict[str, Any]) -> dict[str, Any] | None:
    """How a head drafts in contexts that none of its training rows reached, beside shorter ones.

    Args: by_context: of a result, split behind the training length (`breakdown.context_label`).

    Returns: None where no context was longer, or nothing is known of the training.
    """
    trained_length = (training or {}).get("max_length")
    if trained_length is None:
        return None
    parts: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for name, part in by_context.items():
        parts[int(name.partition("-")[0]) > trained_length].append(part)
    if not parts[True]:
        return None
    rounds = {which: sum(part["num_rounds"] for part in parts[which]) for which in parts}
    tokens = {which: sum(part["num_rounds"] * part["acceptance_length"] for part in parts[which]) for which in parts}
    lengths = {which: round(tokens[which] / rounds[which], 4) if rounds[which] else None for which in parts}
    return {"num_rounds": rounds[True], "acceptance_length": lengths[True], "acceptance_length_within": lengths[False]}
