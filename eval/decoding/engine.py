"""The device side of decoding: the round of `one_round` for many rows, with caches, and as two steps of fixed shape,
drafting and verifying, which may be recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...base.errors import BadInput
from ...heads.drafting.drafter import Drafter, Reading
from ...heads.drafting.trees import Draws, DynamicTree, Proposal, Tree
from ...targets.caches.cache import EXTENT_STEP, SlotCache, in_steps
from ...targets.caches.tree_nodes import ancestors
from ...targets.images.image_rows import shifts_positions
from ...targets.layers.target_output import TargetOutput
from ...targets.prefill import read_prompts
from ...targets.target import Target
from .draft_setting import draft_length
from .replay import Replay, Tensors, on_device
from .sampling import Sampling, choose_tokens, noise_keys, random_keys
from .verify import AcceptedPath, AcceptRule, Candidates, accept_rule
from .widths import Widths

SMALLEST_BUCKET = 128  # recorded steps read a power of two of slots, at least this many


@dataclass(frozen=True)
class DecodeState:
    """The start of a round. read: what the drafter commits first; None: the baseline, which drafts nothing. last:
    [B, 1] each row's last committed token, not yet read by the target. start: [B] its position."""

    read: Reading | None
    last: Tensor
    start: Tensor


class Verified(NamedTuple):
    """The result of verification, for drafts of depth D. num_accepted: [B]. committed: [B, D + 1], of which the first
    num_accepted + 1 are committed, bonus token last. tokens: [B, D + 1] the tokens read along the accepted path; output
    has the target's states there. path: [B, D] for a tree, the node at each depth. num_offered: as in `Round`."""

    num_accepted: Tensor
    committed: Tensor
    tokens: Tensor
    output: TargetOutput
    path: Tensor | None
    num_offered: list[int]


class Engine:
    """Drafts `num_drafted` tokens per row in every round and verifies them in one forward, always of the same shape.

    One engine decodes any number of batches, so that steps are recorded only once. Without a drafter it is the
    baseline: one token per round, with the same caches, masks and choice of token.
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
        accept: str | AcceptRule = "exact",
        steps: str = "eager",
        generator: torch.Generator | None = None,
        verify_cost: float | None = None,
    ):
        """Args:
            max_length: tokens of the longest row, prompt and answer.
            num_draft_tokens: K of chains; None: the drafter's default. Ignored with a tree.
            accept: a name in `verify.ACCEPT_RULES`, or a rule.
            steps: `eager`, `graph` (CUDA graphs) or `compile`: see `replay`.
            generator: the source of the seed of each batch's noise, and of what sampled drafts and rules draw.
            verify_cost: of one more token, see `Widths`; for chains. None: verify all drafts.

        Raises: BadInput if the chain is longer than the drafter can draft, or it drafts no trees.
        """
        self.depth = draft_length(drafter, tree.depth if tree else num_draft_tokens)
        if tree is not None and (drafter is None or not drafter.drafts_trees):
            raise BadInput(f"{type(drafter).__name__} drafts chains, not trees")
        self.is_chain = not isinstance(tree, DynamicTree)
        if not self.is_chain and not target.decodes_trees:
            raise BadInput(f"target {target.name}: decodes chains, not trees: its layers read one text at a time")
        self.target, self.drafter, self.tree = target, drafter, tree
        self.sampling, self.generator = sampling or Sampling(), generator
        self.seed = torch.zeros(1, dtype=torch.long, device=target.device)  # of the noise; recorded steps read it
        self.rule = accept_rule(accept)
        if steps == "compile" and self.sampling.temperature > 0:
            raise BadInput(
                "steps compile: greedy only; drafts may be drawn from a generator that compiled code cannot read"
            )
        self.batch_size = batch_size
        self.num_drafted = tree.num_nodes if tree else self.depth
        self.widths = Widths(self.num_drafted, verify_cost if self.is_chain else None, steps)
        self.layers = drafter.feature_layers if drafter else ()
        # slots after the committed tokens that a round may write, the drafter's own expansions included
        self.num_spare = 1 + max(self.num_drafted, tree.num_expanded + 1 if tree else 0)
        self.num_slots = in_steps(max_length + 1 + self.num_spare)
        self.cache: SlotCache = target.new_cache(self.num_slots, num_rows=batch_size, width=1 + self.num_drafted)
        if steps != "eager" and shifts_positions(target):  # recorded steps read it where it is
            self.cache.shift = torch.zeros(batch_size, self.num_slots, dtype=torch.long, device=target.device)
        self.replay = Replay(steps, target.device, generator)
        self.compiles_layers = steps == "graph"  # its shapes repeat
        self.drafts_on_host = drafter is not None and drafter.on_host
        self.state = drafter.begin(batch_size=batch_size, max_length=self.num_slots) if drafter else None
        self.recorded_prompts = 0  # tokens, padding included, up to which the reading of prompts is recorded
        self.num_kept = 0  # tokens before those
        # a single query that sees the whole cache needs no mask; growing shapes cost nothing on a CPU
        self.is_newest = drafter is None and batch_size == 1 and steps == "eager" and target.device.type == "cpu"
        self.extent = 0  # number of slots that this round's attention reads
        self.offsets = torch.arange(max(self.num_slots, self.num_drafted + 1), device=target.device)
        self.chain_parents = (self.offsets[: self.num_drafted] - 1).expand(batch_size, -1)
        self.no_tokens = torch.zeros(batch_size, 0, dtype=torch.long, device=target.device)

    @on_device
    def prefill(
        self, tokens: Tensor, num_valid: Tensor, *, num_kept: int = 0, pictures: Sequence[Sequence[str]] = ()
    ) -> tuple[TargetOutput, Tensor]:
        """States of right-padded prompts [B, T] behind `num_kept` tokens in the cache; their first tokens [B, 1].

        Args: pictures: of each row; empty: none has any."""
        if self.drafts_on_host and self.drafter is not None:  # its state has the texts of the last batch
            self.state = self.drafter.restart(self.state, batch_size=self.batch_size, max_length=self.num_slots)
        if self.replay.steps == "eager" and not any(pictures):
            self.cache.shift = None  # of a batch before; without one our kernels read and draft chains as they are
        run = partial(self._read_prompts, pictures=pictures)
        if tokens.numel() <= self.recorded_prompts and not any(pictures):  # in steps, so that few shapes occur
            num_kept -= num_kept % EXTENT_STEP
            tokens = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % EXTENT_STEP))
            run = partial(self.replay, ("prompts", tokens.shape[1], num_kept), self._read_prompts)
        self.num_kept, self.extent = num_kept, tokens.shape[1]
        output = TargetOutput(*cast(list[Tensor], run(tokens, num_valid)))
        if self.sampling.temperature > 0:
            self.seed.copy_(random_keys([1], self.seed.device, self.generator))
        return output, self._chosen(output.at(num_valid - 1 - num_kept), num_valid[:, None])

    def _read_prompts(self, tokens: Tensor, num_valid: Tensor, pictures: Sequence[Sequence[str]] = ()) -> Tensors:
        how = {"num_kept": self.num_kept, "feature_layers": self.layers, "pictures": pictures}
        output = read_prompts(self.target, tokens, num_valid, self.cache, **how)
        return output.features, output.post_norm

    @on_device
    def commit_prompts(self, read: Reading) -> Reading | None:
        """Let the drafter read the prompts; returns the Reading for its first round, in the shape of all rounds.

        That Reading repeats each prompt's last position, which does not change the drafter's state. Drafters on the
        host accept any shape and read the prompts in their first round. None without a drafter.
        """
        if self.drafter is None:
            return None
        if self.drafts_on_host:
            start, num_valid = read.start.cpu(), read.num_valid.cpu()
            tokens = read.tokens.cpu(), read.next_tokens.cpu()
            return Reading(*tokens, read.output, start, num_valid, shift=read.shift)
        prompts = replace(read, extent=self.extent + self.num_spare)
        self.drafter.commit_prompts(self.state, prompts, most=self.target.prompt_chunk)
        return read.again(self.depth + 1)

    def begin_round(self, num_committed: int) -> None:
        """Set how many slots attention reads: num_committed tokens of the longest row, plus those of a round."""
        extent = num_committed if self.is_newest else num_committed + self.num_spare
        if self.replay.steps != "eager":
            extent = max(SMALLEST_BUCKET, 1 << (extent - 1).bit_length())
        self.extent = min(extent, self.num_slots)

    @on_device
    def rehearse(self, state: DecodeState) -> None:
        """Record or compile this round's steps, if needed, by running them; commits nothing, restores the generator."""
        if self.drafter is not None and self.drafts_on_host and self.replay.steps != "eager":
            self.drafter.rehearse(self.state, self.replay, extent=self.extent, depth=self.depth)
        if self.replay.has(("verify", self.extent)):  # recorded last
            return
        generator_state = None if self.generator is None else self.generator.get_state()
        nothing = self.no_tokens.new_zeros(self.batch_size, self.num_drafted)
        proposal = Proposal(nothing, None if self.is_chain else nothing - 1)
        if state.read is not None and not self.drafts_on_host:
            proposal = self.draft(state.read)
        for width in self.widths.known:
            self._run_verify(state, proposal, [width] * self.batch_size)
        if generator_state is not None and self.generator is not None:
            self.generator.set_state(generator_state)

    @on_device
    def draft(self, read: Reading | None) -> Proposal:
        """Commit the Reading to the drafter, and draft; an empty Proposal without a drafter."""
        if self.drafter is None or read is None:
            return Proposal(self.no_tokens)
        if self.drafts_on_host:
            self.drafter.commit(self.state, replace(read, extent=self.extent))
            drafted = self.drafter.propose_chain_or_tree(self.state, self.num_drafted, self.tree)
            if drafted.draft_probs is not None and self.replay.steps != "eager":
                raise BadInput(f"steps {self.replay.steps}: not with draft probabilities from the host; eager works")
            return drafted.to(self.target.device)
        tokens, parents, draft_probs, estimates = self.replay(("draft", self.extent), self._draft, *read.tensors)
        assert tokens is not None
        return Proposal(tokens, parents, draft_probs, confidence=estimates)

    @on_device
    def verify(self, state: DecodeState, proposal: Proposal, ended: Sequence[bool]) -> Verified:
        """One forward over each row's last committed token and its drafts, all or those worth verifying.

        Args: ended: by row, whether it has ended; then none of its drafts is.
        """
        num_offered = self.widths.offered(proposal.confidence, ended)
        return self._run_verify(state, proposal, num_offered)

    def _run_verify(self, state: DecodeState, proposal: Proposal, num_offered: list[int]) -> Verified:
        width, limit = self.widths.of(num_offered), None
        if self.widths.cost is not None:
            proposal, limit = proposal.first(width), torch.tensor(num_offered, device=state.start.device)
        key = ("verify", self.extent) if width == self.num_drafted else ("verify", self.extent, width)
        arguments = (state.last, proposal.tokens, proposal.parents, proposal.draft_probs, state.start, limit)
        accepted, *results, path = cast(list[Tensor], self.replay(key, self._verify, *arguments))
        committed, tokens, features, post_norm = map(self.widths.filled, results)
        return Verified(accepted, committed, tokens, TargetOutput(features, post_norm), path, num_offered)

    @on_device
    def choose_behind(self, last: Tensor, nodes: Tensor, parents: Tensor | None, start: Tensor) -> Tensor:
        """[B, S + 1] the target's own next token after `last` and after each of S nodes: `verify` without a rule.

        Args: last, start: as in `DecodeState`. nodes [B, S], parents: as in this engine's proposals.
        """
        key = ("choose", self.extent, nodes.shape[1])
        return cast(Tensor, self.replay(key, self._choose, last, nodes, parents, start)[0])

    def _choose(self, last: Tensor, nodes: Tensor, parents: Tensor | None, start: Tensor) -> Tensors:
        _, positions, output = self._read_nodes(last, nodes, parents, start)
        return (self._chosen(output, positions + 1),)

    def _chosen(self, output: TargetOutput, positions: Tensor) -> Tensor:
        """[B, Q] the target's own next token after each state; positions: [B, Q] of these tokens in their texts."""
        states, target, sampling = output.post_norm, self.target, self.sampling
        if sampling.takes_best:
            return target.best(states) if output.best is None else output.best
        return choose_tokens(target.logits(states), sampling, keys=self._keys(positions))

    def _keys(self, positions: Tensor) -> Tensor | None:
        """The random keys [B, Q] with which `choose_tokens` chooses the tokens at these positions [B, Q]."""
        return None if self.sampling.temperature == 0 else noise_keys(self.seed, positions)

    def _draft(self, *tensors: Tensor) -> Tensors:
        """`Reading.tensors` -> the tensors of a Proposal; like `_verify`, without copies to the host."""
        assert self.drafter is not None
        read = Reading.of(tensors, extent=self.extent, follows_draft=self.is_chain)
        self.drafter.commit(self.state, read)
        is_greedy = self.sampling.temperature == 0
        draws = None if is_greedy else Draws(self.sampling.temperature, self.target.vocab_size, self.generator)
        proposal = self.drafter.propose_chain_or_tree(self.state, self.num_drafted, self.tree, draws=draws)
        estimates = None if self.widths.cost is None else proposal.estimates()
        return proposal.tokens, proposal.parents, proposal.draft_probs, estimates

    def _verify(
        self,
        last: Tensor,
        drafted: Tensor,
        parents: Tensor | None,
        draft_probs: Tensor | None,
        start: Tensor,
        limit: Tensor | None,
    ) -> Tensors:
        """The step of `verify`. limit: [B] drafts to verify; None: all."""
        tokens, positions, output = self._read_nodes(last, drafted, parents, start)
        read, num_drafted = (tokens, output.features, output.post_norm), drafted.shape[1]
        if num_drafted == 0:
            return torch.zeros_like(start), self._chosen(output, positions + 1), *read, None
        if self.rule.needs_draft_probs and draft_probs is None:
            raise BadInput("this accept rule needs draft probabilities, and the drafter gives none")
        candidates = Candidates(
            tokens=drafted,
            parents=self.chain_parents[:, :num_drafted] if parents is None else parents,
            depth=min(self.depth, num_drafted),
            is_chain=parents is None,
            read_logits=partial(self.target.logits, output.post_norm),
            read_best=partial(self._chosen, output, positions + 1) if self.sampling.takes_best else None,
            draft_probs=draft_probs,
            sampling=self.sampling,
            keys=self._keys(positions + 1),
            generator=self.generator,
            offered=limit,
        )
        accepted = self.rule(candidates)
        if parents is None:
            results = accepted.committed(tokens), *read, None
        else:
            results = self._keep_path(accepted, tokens, output, start)
        return accepted.num_accepted, *results

    def _keep_path(self, accepted: AcceptedPath, tokens: Tensor, output: TargetOutput, start: Tensor) -> Tensors:
        """Move the accepted path right after the last committed token, in the cache and in what the drafter reads."""
        behind, path = start[:, None] + 1, accepted.path  # [B, 1] slot of node 0; [B, D]
        self.cache.move(behind + path, behind + self.offsets[: path.shape[1]], num=accepted.num_accepted)
        kept_at = self.cache.rows, torch.cat([torch.zeros_like(path[:, :1]), path + 1], 1)  # [B, 1], [B, D + 1]
        read, features, post_norm = (one[kept_at] for one in (tokens, output.features, output.post_norm))
        return accepted.committed(read), read, features, post_norm, path

    def _read_nodes(
        self, last: Tensor, nodes: Tensor, parents: Tensor | None, start: Tensor
    ) -> tuple[Tensor, Tensor, TargetOutput]:
        """The tokens read [B, S + 1], their positions, and the states."""
        tokens, mask = torch.cat([last, nodes], 1), None
        positions = start[:, None] + self.offsets[: tokens.shape[1]]
        if parents is not None and nodes.shape[1] > 0:
            mask = torch.nn.functional.pad(ancestors(parents, self.depth), (0, 0, 1, 0))  # the root attends to no node
            positions = start[:, None] + mask.sum(-1)
        output = self.target.forward(
            tokens,
            feature_layers=self.layers,
            cache=self.cache,
            positions=positions,
            extent=self.extent,
            seen=mask,
            is_newest=self.is_newest and tokens.shape[1] == 1,
            is_round=self.compiles_layers,
            chooses=self.sampling.takes_best,
        )
        return tokens, positions, output
