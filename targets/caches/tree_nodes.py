"""The nodes of draft trees: which are whose ancestors, and which agree with the target.

A tree of S nodes is stored as in `drafting`: parents [B, S], -1 for the root, parents before their children.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def is_readable(x: Tensor) -> bool:
    """Whether its values can be read at once: on a CPU, and not in a step that is being compiled."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def ancestors(parents: Tensor, depth: int) -> Tensor:
    """[B, S, S] bool, whether node j (last) is node i (middle) or its ancestor. parents [B, S]; depth: of the tree."""
    num_rows, size = parents.shape
    if is_readable(parents):
        rows, above = np.arange(num_rows), parents.numpy()
        seen = np.zeros((num_rows, size + 1, size), dtype=bool)  # the last row, at -1, is the root's
        for node in range(size):
            seen[:, node] = seen[rows, above[:, node]]
            seen[:, node, node] = True
        return torch.from_numpy(seen[:, :size])
    nodes = torch.arange(size, device=parents.device)
    mask = (parents[..., None] == nodes) | (nodes[:, None] == nodes)  # one step up; -1, the root, is no node
    for _ in range(max(depth - 2, 0).bit_length()):
        mask = mask.float() @ mask.float() > 0  # twice as far
    return mask


def agreeing_paths(wanted: Tensor, drafted: Tensor, parents: Tensor, *, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each row the path from the root along nodes that are their parent's wanted child.

    Args: wanted: [B, S + 1] the token that should follow the root, then each node. drafted, parents: [B, S].
    Returns: its number of nodes [B]; these [B, depth], any behind the last one; and the last one's index in `wanted`
        [B, 1].
    """
    if is_readable(wanted):  # a fifth of the time of tensor operations, for small trees
        paths = list(map(agreeing_path, wanted.tolist(), drafted.tolist(), parents.tolist()))
        padded = torch.tensor([path + [0] * (depth - len(path)) for path in paths])
        ends = torch.tensor([[path[-1] + 1 if path else 0] for path in paths])
        return torch.tensor([len(path) for path in paths]), padded, ends
    at = wanted.new_zeros(len(wanted), 1)  # [B, 1] 0: the root
    steps, matched = [], [at[:, :0] > 0]
    for _ in range(depth):
        match = (parents + 1 == at) & (drafted == wanted.gather(1, at))  # [B, S] one at most
        node = match.long().argmax(1, keepdim=True)  # [B, 1]
        matched.append(match.any(1, keepdim=True))
        steps.append(node)
        at = torch.where(matched[-1], node + 1, at)  # a row that has stopped never matches again
    return torch.cat(matched, 1).long().sum(1), torch.cat([at[:, :0], *steps], 1), at


def agreeing_path(wanted: Sequence[int], drafted: Sequence[int], parents: Sequence[int]) -> list[int]:
    """`agreeing_paths` of one row: its nodes."""
    path, at = list[int](), -1
    for node, (token, parent) in enumerate(zip(drafted, parents, strict=True)):
        if parent == at and token == wanted[at + 1]:
            path.append(node)
            at = node
    return path
