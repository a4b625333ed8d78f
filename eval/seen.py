"""Which tokens each row has read so far: what a repetition penalty falls on."""

import torch
from torch import Tensor


class SeenTokens:
    """tokens: [B, V] bool, what is committed; written in place, so that recorded steps read the latest."""

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device):
        self.tokens = torch.zeros(batch_size, vocab_size, dtype=torch.bool, device=device)

    def mark(self, tokens: Tensor, num_valid: Tensor) -> None:
        """Remember the first num_valid [B] of tokens [B, Q]."""
        valid = torch.arange(tokens.shape[1], device=tokens.device) < num_valid[:, None]  # [B, Q]
        counts = torch.zeros(self.tokens.shape, device=tokens.device).scatter_add_(1, tokens, valid.float())
        self.tokens |= counts > 0

    def at(self, tokens: Tensor, seen: Tensor | None) -> Tensor:
        """[B, S + 1, V] tokens read up to each of tokens [B, S + 1], of which the first is the last committed one.

        Args: seen: of a tree, [B, S + 1, S] which drafted nodes each position has read; None: a chain.
        """
        size = tokens.shape[1]
        if seen is None:
            line = torch.ones(size, size, dtype=torch.bool, device=tokens.device).tril().expand(len(tokens), -1, -1)
        else:  # the root is on every path
            line = torch.cat([torch.ones_like(seen[..., :1]), seen], -1)  # [B, S + 1, S + 1]
        each = torch.zeros(*tokens.shape, self.tokens.shape[1], device=tokens.device)
        each = each.scatter_(2, tokens[..., None], 1.0)  # [B, S + 1, V]
        return self.tokens[:, None] | (line.float() @ each > 0)
