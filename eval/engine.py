"""The state of one batch in decoding: what is committed, the caches, and one draft-and-verify over them."""

import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..heads.base import Drafter
from ..heads.cache import SlotCache
from ..heads.drafting import Draws, Proposal, Tree, ancestors
from ..heads.target import Target, TargetOutput
from .verify import Sampling, Verdict, accept_chain, accept_sampled, accept_tree, choose, target_probs


class Verified(NamedTuple):
    """num_accepted: [B]. committed: [B, D + 1], of which the first num_accepted + 1 are committed, bonus token last.
    tokens: [B, D + 1] what the target read along the accepted path, and output its states there."""

    num_accepted: Tensor
    committed: Tensor
    tokens: Tensor
    output: TargetOutput


class Engine:
    """Fixed shapes throughout: every round drafts `num_drafted` tokens per row and verifies them in one forward."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rows: list[list[int]],
        *,
        max_new_tokens: int,
        num_draft: int,
        tree: Tree | None,
        sampling: Sampling,
        generator: torch.Generator | None,
    ):
        """Args: rows: the prompts. num_draft: K of chains; a tree brings its own size and depth."""
        self.target, self.drafter, self.tree = target, drafter, tree
        self.sampling, self.generator = sampling, generator
        self.num_drafted = tree.num_nodes if tree else num_draft
        self.depth = tree.depth if tree else num_draft
        self.layers = drafter.feature_layers if drafter else ()
        self.rows, self.max_new_tokens = rows, max_new_tokens
        self.new: list[list[int]] = [[] for _ in rows]
        self.ended = [False] * len(rows)
        longest = max(len(row) for row in rows)
        room = longest + max_new_tokens + 1
        self.cache: SlotCache = target.new_cache(room + self.num_drafted)
        spare = max(self.num_drafted, tree.num_expanded + 1 if tree else 0)
        self.state = drafter.begin(batch_size=len(rows), max_length=room + spare) if drafter else None
        self.offsets = torch.arange(max(longest, self.num_drafted + 1), device=target.device)
        self.nothing = Proposal(torch.zeros(len(rows), 0, dtype=torch.long, device=target.device))
        self.none_accepted = torch.zeros(len(rows), dtype=torch.long, device=target.device)
        self.seen: Tensor | None = None  # [B, V] bool: tokens read so far, for a repetition penalty

    @property
    def num_committed(self) -> int:
        """Tokens of the longest row, prompt included."""
        return max(len(row) + len(new) for row, new in zip(self.rows, self.new, strict=True))

    def clock(self) -> float:
        """Seconds, with everything done that was asked of the device."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def prefill(self, tokens: Tensor, num_valid: Tensor) -> tuple[TargetOutput, Tensor]:
        """Read right-padded prompts [B, T] of num_valid [B] tokens: the states, and each row's first token [B, 1]."""
        start = torch.zeros_like(num_valid)
        output = self._forward(tokens, start[:, None] + self.offsets[: tokens.shape[1]], extent=tokens.shape[1])
        if self.sampling.repetition_penalty != 1:
            self.seen = torch.zeros(len(tokens), self.target.vocab_size, dtype=torch.bool, device=tokens.device)
            self._mark(tokens, num_valid)
        logits = self.target.logits(output.at(num_valid - 1).post_norm)  # [B, 1, V]
        seen = None if self.seen is None else self.seen[:, None]
        return output, choose(logits, sampling=self.sampling, seen=seen, generator=self.generator)

    def propose(self) -> Proposal:
        """Draft a chain or a tree; nothing without a drafter."""
        if self.drafter is None:
            return self.nothing
        if self.tree is None:
            return self.drafter.propose(self.state, num_draft_tokens=self.num_drafted)
        warm = self.sampling.temperature > 0
        draws = Draws(self.sampling.temperature, self.target.vocab_size, self.generator) if warm else None
        return self.drafter.propose_tree(self.state, self.tree, draws=draws)  # type: ignore[attr-defined]

    def verify(self, last: Tensor, proposal: Proposal, start: Tensor) -> Verified:
        """One forward over the last committed token [B, 1] at start [B] and everything drafted behind it."""
        tokens = torch.cat([last, proposal.tokens], 1) if self.num_drafted else last  # [B, S + 1]
        if proposal.parents is None:
            positions = start[:, None] + self.offsets[: tokens.shape[1]]  # [B, K + 1]
            output = self._forward(tokens, positions, extent=self.num_committed + self.num_drafted)
            chosen = self._choose(self.target.logits(output.post_norm), tokens, None)
            accepted = accept_chain(chosen, proposal.tokens) if self.num_drafted else self.none_accepted
            verified = Verified(accepted, chosen, tokens, output)
        else:
            verified = self._verify_tree(tokens, proposal, start)
        if self.seen is not None:
            self._mark(verified.tokens, verified.num_accepted + 1)
        return verified

    def _verify_tree(self, tokens: Tensor, proposal: Proposal, start: Tensor) -> Verified:
        parents = proposal.parents
        assert parents is not None
        seen = ancestors(parents, self.depth)  # [B, S, S]
        seen = torch.cat([torch.zeros_like(seen[:, :1]), seen], 1)  # [B, S + 1, S]: the root attends to no node
        extent = self.num_committed + self.num_drafted
        output = self._forward(tokens, start[:, None] + seen.sum(-1), extent=extent, seen=seen)
        logits = self.target.logits(output.post_norm)  # [B, S + 1, V]
        if proposal.draft_probs is not None:
            probs = target_probs(logits, self.sampling, self._seen_at(tokens, seen))
            verdict = accept_sampled(
                probs, proposal.draft_probs, proposal.tokens, parents, depth=self.depth, generator=self.generator
            )
        else:
            chosen = self._choose(logits, tokens, seen)  # [B, S + 1]
            verdict = accept_tree(chosen, proposal.tokens, parents, depth=self.depth)
        return self._keep_path(verdict, tokens, output, start)

    def _keep_path(self, verdict: Verdict, tokens: Tensor, output: TargetOutput, start: Tensor) -> Verified:
        """Move the accepted path up behind the last committed token, in the cache and in what the drafter reads."""
        behind = start[:, None] + 1  # [B, 1] slot of node 0
        self.cache.move(behind + verdict.path, behind + self.offsets[: self.depth])
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        kept = torch.cat([torch.zeros_like(verdict.path[:, :1]), verdict.path + 1], 1)  # [B, D + 1]
        tokens = tokens[rows, kept]
        accepted = verdict.num_accepted
        committed = tokens.roll(-1, 1).scatter(1, accepted[:, None], verdict.bonus[:, None])  # [B, D + 1]
        output = TargetOutput(output.features[rows, kept], output.post_norm[rows, kept])
        return Verified(accepted, committed, tokens, output)

    def _forward(self, tokens: Tensor, positions: Tensor, *, extent: int, seen: Tensor | None = None) -> TargetOutput:
        return self.target.forward(
            tokens,
            feature_layers=self.layers,
            cache=self.cache,
            positions=positions,
            extent=extent,
            seen=seen,
            is_newest=self.drafter is None and tokens.shape == (1, 1),
        )

    def _choose(self, logits: Tensor, tokens: Tensor, seen: Tensor | None) -> Tensor:
        before = self._seen_at(tokens, seen)
        return choose(logits, sampling=self.sampling, seen=before, generator=self.generator)

    def _seen_at(self, tokens: Tensor, seen: Tensor | None) -> Tensor | None:
        """[B, S + 1, V] tokens read up to each position; None without a penalty. seen: of a tree, [B, S + 1, S]."""
        if self.seen is None:
            return None
        size = tokens.shape[1]
        if seen is None:
            line = torch.ones(size, size, dtype=torch.bool, device=tokens.device).tril().expand(len(tokens), -1, -1)
        else:  # the root is on every path
            line = torch.cat([torch.ones_like(seen[..., :1]), seen], -1)  # [B, S + 1, S + 1]
        each = F.one_hot(tokens, self.target.vocab_size).float()  # [B, S + 1, V]
        return self.seen[:, None] | (line.float() @ each > 0)

    def _mark(self, tokens: Tensor, num_valid: Tensor) -> None:
        """Remember the first num_valid [B] of tokens [B, Q] as read."""
        assert self.seen is not None
        valid = torch.arange(tokens.shape[1], device=tokens.device) < num_valid[:, None]  # [B, Q]
        counts = torch.zeros(self.seen.shape, device=tokens.device).scatter_add_(1, tokens, valid.float())
        self.seen |= counts > 0
