"""Choosing the tree to draft, from how often each guess at each depth was right and from a node's cost on this machine;
and measuring what verifying a token of a chain costs."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ...configs.errors import BadInput
from ...heads.base import DraftBatch, DraftHead
from ...heads.drafter import Drafter
from ...heads.drafting import DynamicTree, StaticTree, Tree
from ...heads.target import Target
from ..decoding import generate
from ..decoding.draft_setting import DraftSetting, chains, draft_length
from ..suites.prompts import Suite
from .config import MeasureConfig
from .step_times import interpolate, measure_step_times, most_new_tokens

Accuracies = list[list[float]]  # [depth][rank]: P(the rank-th guess at a depth is right | the path to it is right)


@torch.no_grad()
def rank_accuracies(
    target: Target, head: DraftHead, texts: Sequence[tuple[Sequence[int], Sequence[int]]], *, num_ranks: int = 8
) -> Accuracies:
    """How often each of the head's best guesses is the target's own token, teacher-forced on the target's texts.

    As deep as the head was trained, and at least as deep as it drafts by default.

    Args: texts: (prompt, new tokens) pairs that the target wrote.
    """
    num_depths = max(head.num_depths, draft_length(head, None))
    num_ranks = min(num_ranks, target.vocab_size if head.vocabulary is None else len(head.vocabulary.to_target))
    right = torch.zeros(num_depths, num_ranks)
    count = torch.zeros(num_depths)
    for prompt, new in texts:
        ids = torch.tensor([[*prompt, *new]], device=target.device)  # [1, T]
        mask = torch.arange(ids.shape[1], device=target.device)[None] >= len(prompt)
        batch = DraftBatch(ids, mask, target.read_texts(ids, feature_layers=head.feature_layers))
        starts, logits = head.teacher_forced_logits(batch, num_depths=num_depths)  # [1, S, K, Vd]
        guesses = head.to_target(logits.topk(num_ranks, -1).indices)  # [1, S, K, ranks]
        for depth in range(num_depths):
            labels = starts.take(ids, offset=depth + 2)  # [1, S]
            hits = (guesses[:, :, depth] == labels[..., None]) & starts.valid[..., depth, None]  # [1, S, ranks]
            right[depth] += hits.sum((0, 1)).cpu()
            count[depth] += int(starts.valid[..., depth].sum())
    return (right / count.clamp(min=1)[:, None]).tolist()


def best_nodes(accuracies: Accuracies, num_nodes: int) -> list[tuple[tuple[int, ...], float]]:
    """The num_nodes paths most likely to be accepted, with that likelihood, best first.

    A node's likelihood is the product of its path's accuracies (Medusa, section 2.3.3), so it never exceeds its
    parent's nor its better sibling's, and greedily adding the best neighbour gives the best tree of each size: that of
    Sequoia's dynamic program for likelihoods that depend on depth and rank (Chen et al. 2024, section 3).
    """
    chosen: list[tuple[tuple[int, ...], float]] = []
    open_nodes: dict[tuple[int, ...], float] = {(0,): accuracies[0][0]}
    likelihood: dict[tuple[int, ...], float] = {(): 1.0}
    while open_nodes and len(chosen) < num_nodes:
        path = max(open_nodes, key=lambda node: (open_nodes[node], -len(node)))
        likelihood[path] = open_nodes.pop(path)
        chosen.append((path, likelihood[path]))
        depth, rank = len(path) - 1, path[-1]
        if rank + 1 < len(accuracies[depth]):
            open_nodes[(*path[:-1], rank + 1)] = likelihood[path[:-1]] * accuracies[depth][rank + 1]
        if depth + 1 < len(accuracies):
            open_nodes[(*path, 0)] = likelihood[path] * accuracies[depth + 1][0]
    return chosen


def static_tree(accuracies: Accuracies, *, num_nodes: int) -> StaticTree:
    """Medusa's sparse tree: the num_nodes most likely paths."""
    return as_tree([path for path, _ in best_nodes(accuracies, num_nodes)])


def optimal_tree(
    accuracies: Accuracies, *, verify_ms: Callable[[int], float], draft_ms: Callable[[int], float], max_nodes: int = 63
) -> tuple[StaticTree, float]:
    """Sequoia's hardware-aware choice: the size and depth with the least expected time per token.

    Args:
        verify_ms: nodes -> milliseconds of verifying them. draft_ms: depth -> milliseconds of drafting the tree.

    Returns: the tree, and its expected milliseconds per token.
    """
    best: tuple[float, list[tuple[int, ...]]] | None = None
    for depth in range(1, len(accuracies) + 1):
        nodes = best_nodes(accuracies[:depth], max_nodes)
        expected = 1.0  # the bonus token
        for count, (_, likelihood) in enumerate(nodes, 1):
            expected += likelihood
            cost = (draft_ms(depth) + verify_ms(count)) / expected
            if best is None or cost < best[0]:
                best = cost, [path for path, _ in nodes[:count]]
    assert best is not None
    return as_tree(best[1]), best[0]


def as_tree(paths: list[tuple[int, ...]]) -> StaticTree:
    """A tree from paths in any order."""
    return StaticTree(tuple(sorted(paths, key=lambda path: (len(path), path))))


def sampled_chain(length: int) -> StaticTree:
    """A chain of tokens sampled from the draft's distribution: Leviathan et al. 2023, Algorithm 1."""
    return StaticTree(tuple((0,) * depth for depth in range(1, length + 1)), sampled=True)


def costs(
    target: Target, head: DraftHead, text: Sequence[int], *, context: int, max_nodes: int
) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Functions nodes -> milliseconds of verifying, and depth -> milliseconds of drafting, for one row after a context.

    Measured on this machine: verifying on trees of one level, drafting on chains (a tree's level costs slightly more).
    """
    deepest = chains(head, {1, head.max_draft_tokens or head.num_depths})
    ranks = min(max_nodes, target.vocab_size if head.vocabulary is None else len(head.vocabulary.to_target))
    sizes = sorted({max(1, round(ranks * share)) for share in (0.1, 0.25, 0.5, 1)})
    wide = [DraftSetting(f"{size}", 1, StaticTree(tuple((rank,) for rank in range(size)))) for size in sizes]
    context = min(context, target.max_positions - most_new_tokens(deepest[-1]))
    settings, config = [*deepest, *wide], MeasureConfig()
    times = measure_step_times(target, head, settings, config, batch_sizes=[1], contexts=[context], text=text)
    verify = sorted({time.num_tokens: time.verify_ms + time.overhead_ms for time in times}.items())
    draft = [(time.num_draft_tokens, time.draft_ms) for time in times[1 : 1 + len(deepest)]]
    return lambda nodes: interpolate(verify, nodes + 1), lambda depth: interpolate(draft, depth)


def verify_cost(
    target: Target,
    drafter: Drafter,
    setting: DraftSetting,
    text: Sequence[int],
    config: MeasureConfig,
    *,
    context: int,
) -> float:
    """The cost of verifying one more token of each row, in rounds that draft all tokens of a chain and verify none.

    It is (verification of all drafts - baseline step) / length, relative to such a round, both measured at the
    config's batch size and sampling: above temperature 0, verifying takes longer per token.
    """
    plain, drafted = measure_step_times(
        target,
        drafter,
        [setting],
        config,
        batch_sizes=[config.batch_size],
        contexts=[min(context, target.max_positions - most_new_tokens(setting))],
        text=text,
    )
    more = max(drafted.verify_ms - plain.verify_ms, 0.0)
    return more / setting.num_draft_tokens / (drafted.round_ms - more)


TREE_NAMES = ("chain", "static", "dynamic", "optimal", "sampled", "sampled-chain")
SHAPED_TREES = ("static", "optimal", "sampled")  # shaped by the head's accuracies on texts
NUM_CALIBRATION = 8  # largest number of prompts whose texts shape trees


def hold_out(suite: Suite) -> Suite:
    """The suite with a third of its prompts, at most eight, moved to `calibration`, where they shape trees; chats are
    moved with all their turns.

    Raises: BadInput if there is only one prompt."""
    chats = list(dict.fromkeys(source.first for source in suite.sources))
    count = len(chats)
    if count == 1:
        raise BadInput(f"--tree: {suite.name} has one prompt; a tree is shaped on others than it is measured on")
    num = min(NUM_CALIBRATION, max(1, count // 3))
    chosen = {chats[i * count // num] for i in range(num)} if count else set()
    rest = suite.subset([i for i, source in enumerate(suite.sources) if source.first not in chosen])
    pairs = zip(suite.sources, suite.prompts, strict=True)
    return replace(rest, calibration=[prompt for source, prompt in pairs if source.first in chosen])


def drafts_tree(target: Target, drafter: Drafter, name: str) -> bool:
    """Whether a drafter drafts the tree of that name for this target: other trees than dynamic ones need a head's
    ranked guesses."""
    both = target.decodes_trees and drafter.drafts_trees
    return name == "chain" or (both and (name == "dynamic" or isinstance(drafter, DraftHead)))


def named_tree(
    name: str,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    num_nodes: int,
    num_draft_tokens: int | None = None,
    texts: list[list[int]] | None = None,
) -> Tree | None:
    """The tree of that name for a drafter; None for a chain.

    static, optimal and sampled are shaped by the head's accuracies on what the target writes behind the first
    NUM_CALIBRATION prompts; optimal also by step times measured here, with at most num_nodes nodes. dynamic is
    num_draft_tokens deep, and sampled-chain one path of as many as chain has.

    Args: texts: what the target writes behind these prompts, where that is known.

    Raises: BadInput on an unknown name, for a drafter that does not draft it, and on a num_draft_tokens beyond it.
    """
    if name not in TREE_NAMES:
        raise BadInput(f"--tree {name}: expected one of {', '.join(TREE_NAMES)}")
    if name == "chain":
        return None
    if not drafts_tree(target, drafter, name):
        if not target.decodes_trees:
            raise BadInput(f"--tree {name}: target {target.name} decodes chains only")
        what = "chains and dynamic trees" if drafter.drafts_trees else "chains"
        raise BadInput(f"--tree {name}: {type(drafter).__name__} drafts {what} only")
    if name == "dynamic":
        depth = draft_length(drafter, num_draft_tokens)
        return DynamicTree(num_nodes=num_nodes, depth=depth, top_k=max(4, round(num_nodes**0.5)))
    assert isinstance(drafter, DraftHead)
    if name == "sampled-chain":
        return sampled_chain(draft_length(drafter, num_draft_tokens))
    prompts = list(prompts[:NUM_CALIBRATION])
    texts = texts or generate(target, None, prompts, max_new_tokens=max_new_tokens).token_ids
    accuracies = rank_accuracies(target, drafter, list(zip(prompts, texts, strict=True)))
    if name == "optimal":
        longest = max(range(len(prompts)), key=lambda row: len(prompts[row]))
        text, context = [*prompts[longest], *texts[longest]], len(prompts[longest])
        verify_ms, draft_ms = costs(target, drafter, text, context=context, max_nodes=num_nodes)
        return optimal_tree(accuracies, verify_ms=verify_ms, draft_ms=draft_ms, max_nodes=num_nodes)[0]
    tree = static_tree(accuracies, num_nodes=num_nodes)
    return replace(tree, sampled=True) if name == "sampled" else tree
