"""The device side of decoding: caches, and the two steps of a round, drafting and verifying, in fixed shapes."""

from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..configs.errors import BadInput
from ..heads.drafter import Drafter, Reading
from ..heads.drafting import Draws, Proposal, StaticTree, Tree, ancestors
from ..heads.nn.cache import SlotCache
from ..heads.target import Target, TargetOutput
from .measurement.config import draft_length
from .replay import Replay, Tensors
from .seen import SeenTokens
from .verify import (
    Sampling,
    Verdict,
    accept_chain,
    accept_sampled,
    accept_tree,
    accept_typical,
    choose,
    target_probs,
)

ROOM_STEP = 64  # slots of a cache come in multiples of it, so that rows of a mask stay aligned
PREFILL_CHUNK = 2048  # prompt tokens per forward: a mask over all of a long prompt at once would be its length squared
SMALLEST_BUCKET = 128  # recorded steps read a power of two of slots, this many at least

ACCEPT_RULES = ("exact", "typical")


class Verified(NamedTuple):
    """num_accepted: [B]. committed: [B, D + 1], of which the first num_accepted + 1 are committed, bonus token last.
    tokens: [B, D + 1] what the target read along the accepted path, and output its states there."""

    num_accepted: Tensor
    committed: Tensor
    tokens: Tensor
    output: TargetOutput


class Engine:
    """Every round drafts `num_drafted` tokens per row and verifies them in one forward, of the same shape each time.

    One engine decodes any number of texts, one batch after the other, so that recorded steps are recorded once. Without
    a drafter it is the baseline: one token per round, the same caches, masks and choice of token.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        batch_size: int,
        max_length: int,
        num_draft_tokens: int | None = None,
        tree: Tree | None = None,
        sampling: Sampling | None = None,
        accept: str = "exact",
        steps: str = "eager",
        generator: torch.Generator | None = None,
    ):
        """Args:
            max_length: tokens of the longest row, prompt and answer.
            num_draft_tokens: K of chains; None: the drafter's default. A tree brings its own size and depth.
            accept: `exact`, or `typical`, which is NOT lossless (`verify.accept_typical`).
            steps: `eager`, `graph` (CUDA graphs) or `compile`: see `replay`.

        Raises: BadInput on more drafts than the drafter has, on a tree for a drafter of chains.
        """
        if isinstance(tree, StaticTree) and tree.is_chain:
            num_draft_tokens, tree = tree.depth, None
        num_draft = draft_length(drafter, tree.depth if tree else num_draft_tokens)
        if tree is not None and not hasattr(drafter, "propose_tree"):
            raise BadInput(f"{type(drafter).__name__} drafts chains, not trees")
        self.target, self.drafter, self.tree = target, drafter, tree
        self.sampling, self.accept, self.generator = sampling or Sampling(), accept, generator
        if accept not in ACCEPT_RULES:
            raise BadInput(f"accept {accept!r}: expected one of {', '.join(ACCEPT_RULES)}")
        if steps == "compile" and self.sampling.temperature > 0:
            raise BadInput("steps compile: greedy only; sampling draws from a generator that compiled code cannot read")
        self.batch_size, self.max_length = batch_size, max_length
        self.num_drafted = tree.num_nodes if tree else num_draft
        self.depth = tree.depth if tree else num_draft
        self.layers = drafter.feature_layers if drafter else ()
        # slots that one round may touch behind the committed tokens, the drafter's own expansions included
        self.spare = 1 + max(self.num_drafted, tree.num_expanded + 1 if tree else 0)
        self.room = -(-(max_length + 1 + self.spare) // ROOM_STEP) * ROOM_STEP
        self.cache: SlotCache = target.new_cache(self.room)
        self.replay = Replay(steps, target.device, generator)
        self.drafts_on_host = drafter is not None and drafter.on_host
        self.state = drafter.begin(batch_size=batch_size, max_length=self.room) if drafter else None
        # one query that sees all there is needs no mask; shapes that grow by one each step cost nothing on a CPU
        self.is_newest = drafter is None and batch_size == 1 and steps == "eager" and target.device.type == "cpu"
        self.extent = 0  # slots that this round's attention reads
        has_penalty = self.sampling.repetition_penalty != 1
        self.seen = SeenTokens(batch_size, target.vocab_size, target.device) if has_penalty else None
        self.offsets = torch.arange(max(self.room, self.num_drafted + 1), device=target.device)
        self.nothing = torch.zeros(batch_size, 0, dtype=torch.long, device=target.device)
        self.none_accepted = torch.zeros(batch_size, dtype=torch.long, device=target.device)

    # one text after the other

    @torch.no_grad()
    def prefill(self, tokens: Tensor, num_valid: Tensor) -> tuple[TargetOutput, Tensor]:
        """Read right-padded prompts [B, T] of num_valid [B] tokens: the states, and each row's first token [B, 1]."""
        if self.drafts_on_host and self.drafter is not None:  # the texts of the last batch are forgotten
            self.state = self.drafter.begin(batch_size=self.batch_size, max_length=self.room)
        parts, start = [], 0
        for chunk in tokens.split(PREFILL_CHUNK, 1):
            self.extent = start + chunk.shape[1]
            parts.append(self._forward(chunk, self.offsets[start : self.extent].expand_as(chunk)))
            start = self.extent
        output = TargetOutput(torch.cat([p.features for p in parts], 1), torch.cat([p.post_norm for p in parts], 1))
        if self.seen is not None:
            self.seen.tokens.zero_()
            self.seen.mark(tokens, num_valid)
        logits = self.target.logits(output.at(num_valid - 1).post_norm)  # [B, 1, V]
        seen = None if self.seen is None else self.seen.tokens[:, None]
        return output, choose(logits, sampling=self.sampling, seen=seen, generator=self.generator)

    @torch.no_grad()
    def take_in(self, read: Reading) -> Reading | None:
        """Let the drafter read the prompts; returns what its first round reads, of the shape that all rounds have.

        That is each prompt's last position once more, which leaves its state as it is. Drafters on the host read texts
        of any shape, the prompts in their first round.
        """
        if self.drafter is None:
            return None
        if self.drafts_on_host:
            start, num_valid = read.start.cpu(), read.num_valid.cpu()
            return Reading(read.tokens.cpu(), read.next_tokens.cpu(), read.output, start, num_valid)
        self.drafter.commit(self.state, replace(read, extent=self.extent + self.spare, cache=self.cache))
        last, width = read.last[:, None], self.depth + 1
        tail = read.output.at(read.last)
        return Reading(
            read.tokens.gather(1, last).repeat(1, width),
            read.next_tokens.gather(1, last).repeat(1, width),
            TargetOutput(tail.features.repeat(1, width, 1, 1), tail.post_norm.repeat(1, width, 1)),
            read.start + read.last,
            torch.ones_like(read.num_valid),
        )

    def begin_round(self, num_committed: int) -> None:
        """Name how far attention must read: num_committed tokens of the longest row, and what a round puts behind."""
        extent = num_committed if self.is_newest else num_committed + self.spare
        if self.replay.way != "eager":
            extent = max(SMALLEST_BUCKET, 1 << (extent - 1).bit_length())
        self.extent = min(extent, self.room)

    def is_recorded(self) -> bool:
        """Whether this round's steps run at once; where not, `rehearse` records them."""
        draws = self.drafter is not None and not self.drafts_on_host
        return self.replay.knows(("verify", self.extent)) and not (
            draws and not self.replay.knows(("draft", self.extent))
        )

    def rehearse(self, read: Reading | None, last: Tensor, start: Tensor) -> None:
        """Record this round's steps by running them: nothing is committed, so the round itself comes out the same."""
        kept = None if self.generator is None else self.generator.get_state()
        proposal = Proposal(self.nothing.new_zeros(self.batch_size, self.num_drafted))
        if read is not None and not self.drafts_on_host:
            proposal = self.draft(read)
        self._run_verify(last, proposal, start)
        if kept is not None and self.generator is not None:
            self.generator.set_state(kept)

    @torch.no_grad()
    def draft(self, read: Reading | None) -> Proposal:
        """Take in what was committed, and draft behind it; nothing without a drafter."""
        if self.drafter is None or read is None:
            return Proposal(self.nothing)
        if self.drafts_on_host:
            self.drafter.commit(self.state, read)
            proposal = self.drafter.propose(self.state, num_draft_tokens=self.num_drafted)
            return Proposal(proposal.tokens.to(self.target.device))
        output = read.output
        arguments = (read.tokens, read.next_tokens, output.features, output.post_norm, read.start, read.num_valid)
        tokens, parents, draft_probs = self.replay(("draft", self.extent), self._draft, *arguments)
        assert tokens is not None
        return Proposal(tokens, parents, draft_probs)

    @torch.no_grad()
    def verify(self, last: Tensor, proposal: Proposal, start: Tensor) -> Verified:
        """One forward over the last committed token [B, 1] at start [B] and everything drafted behind it."""
        verified = self._run_verify(last, proposal, start)
        if self.seen is not None:
            self.seen.mark(verified.tokens, verified.num_accepted + 1)
        return verified

    def _run_verify(self, last: Tensor, proposal: Proposal, start: Tensor) -> Verified:
        arguments = (last, proposal.tokens, proposal.parents, proposal.draft_probs, start)
        accepted, committed, tokens, *states = self.replay(("verify", self.extent), self._verify, *arguments)
        return Verified(accepted, committed, tokens, TargetOutput(*states))  # type: ignore[arg-type]

    # the two steps: tensors in, tensors out, no host read

    def _draft(self, *tensors: Tensor | None) -> Tensors:
        """From the six tensors of a Reading to those of a Proposal."""
        assert self.drafter is not None
        tokens, next_tokens, features, post_norm, start, num_valid = cast(tuple[Tensor, ...], tensors)
        output = TargetOutput(features, post_norm)
        is_chain = self.tree is None
        read = Reading(tokens, next_tokens, output, start, num_valid, self.extent, is_chain, self.cache)
        self.drafter.commit(self.state, read)
        if self.tree is None:
            return self.drafter.propose(self.state, num_draft_tokens=self.num_drafted).tokens, None, None
        warm = self.sampling.temperature > 0
        draws = Draws(self.sampling.temperature, self.target.vocab_size, self.generator) if warm else None
        proposal = self.drafter.propose_tree(self.state, self.tree, draws=draws)  # type: ignore[attr-defined]
        return proposal.tokens, proposal.parents, proposal.draft_probs

    def _verify(
        self, last: Tensor, drafted: Tensor, parents: Tensor | None, draft_probs: Tensor | None, start: Tensor
    ) -> Tensors:
        tokens = torch.cat([last, drafted], 1)  # [B, S + 1]
        if parents is None:
            output = self._forward(tokens, start[:, None] + self.offsets[: tokens.shape[1]])
            accepted, committed = self._accept_chain(self.target.logits(output.post_norm), tokens, drafted)
            return accepted, committed, tokens, output.features, output.post_norm
        seen = ancestors(parents, self.depth)  # [B, S, S]
        seen = torch.cat([torch.zeros_like(seen[:, :1]), seen], 1)  # [B, S + 1, S]: the root attends to no node
        output = self._forward(tokens, start[:, None] + seen.sum(-1), seen)
        logits = self.target.logits(output.post_norm)  # [B, S + 1, V]
        return self._keep_path(self._judge(logits, tokens, parents, draft_probs, seen), tokens, output, start)

    def _accept_chain(self, logits: Tensor, tokens: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
        """num_accepted [B] and committed [B, K + 1] of a chain, logits [B, K + 1, V]."""
        if self.num_drafted == 0:
            return self.none_accepted, self._choose(logits, tokens, None)
        if self.accept == "exact":
            chosen = self._choose(logits, tokens, None)
            return accept_chain(chosen, drafted), chosen
        probs = target_probs(logits, self.sampling, self._seen_at(tokens, None))
        parents = (self.offsets[: self.num_drafted] - 1).expand_as(drafted)
        verdict = accept_typical(probs, drafted, parents, depth=self.depth)
        behind = torch.cat([drafted, verdict.bonus[:, None]], 1)  # [B, K + 1]
        return verdict.num_accepted, behind.scatter(1, verdict.num_accepted[:, None], verdict.bonus[:, None])

    def _judge(
        self, logits: Tensor, tokens: Tensor, parents: Tensor, draft_probs: Tensor | None, seen: Tensor
    ) -> Verdict:
        """What stands of a tree."""
        drafted = tokens[:, 1:]
        if self.accept == "exact" and draft_probs is None:
            return accept_tree(self._choose(logits, tokens, seen), drafted, parents, depth=self.depth)
        probs = target_probs(logits, self.sampling, self._seen_at(tokens, seen))
        if self.accept == "typical":
            return accept_typical(probs, drafted, parents, depth=self.depth)
        assert draft_probs is not None
        return accept_sampled(probs, draft_probs, drafted, parents, depth=self.depth, generator=self.generator)

    def _keep_path(self, verdict: Verdict, tokens: Tensor, output: TargetOutput, start: Tensor) -> Tensors:
        """Move the accepted path up behind the last committed token, in the cache and in what the drafter reads."""
        behind = start[:, None] + 1  # [B, 1] slot of node 0
        self.cache.move(behind + verdict.path, behind + self.offsets[: self.depth])
        rows = self.cache.rows
        kept = torch.cat([torch.zeros_like(verdict.path[:, :1]), verdict.path + 1], 1)  # [B, D + 1]
        tokens = tokens[rows, kept]
        accepted = verdict.num_accepted
        committed = tokens.roll(-1, 1).scatter(1, accepted[:, None], verdict.bonus[:, None])  # [B, D + 1]
        return accepted, committed, tokens, output.features[rows, kept], output.post_norm[rows, kept]

    def _forward(self, tokens: Tensor, positions: Tensor, seen: Tensor | None = None) -> TargetOutput:
        return self.target.forward(
            tokens,
            feature_layers=self.layers,
            cache=self.cache,
            positions=positions,
            extent=self.extent,
            seen=seen,
            is_newest=self.is_newest and tokens.shape[1] == 1,
        )

    def _choose(self, logits: Tensor, tokens: Tensor, seen: Tensor | None) -> Tensor:
        before = self._seen_at(tokens, seen)
        return choose(logits, sampling=self.sampling, seen=before, generator=self.generator)

    def _seen_at(self, tokens: Tensor, seen: Tensor | None) -> Tensor | None:
        return None if self.seen is None else self.seen.at(tokens, seen)
