"""Drafts with chosen acceptance rates, to see how fast the engine would be before any head is trained."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.errors import BadInput
from ..eval.decoding import generate
from ..heads.base import Proposal
from ..heads.drafting.drafter import Drafter, Reading
from ..targets.target import Target

MOST_DRAFTED = 64  # tokens per round


class BlankDrafter(Drafter):
    """Drafts token 0 at no cost, to time rounds that only verify."""

    def begin(self, *, batch_size: int, max_length: int) -> list[Reading]:
        return []

    def commit(self, state: list[Reading], read: Reading) -> None:
        state[:] = [read]

    def propose(self, state: list[Reading], *, num_draft_tokens: int) -> Proposal:
        return Proposal(torch.zeros_like(state[0].start[:, None].expand(-1, num_draft_tokens)))


@dataclass
class SyntheticState:
    """The state of drafting."""

    texts: Tensor  # [B, T] prompt and the target's own greedy continuation, padded with 0
    position: Tensor  # [B] of the pending token
    uniform: Tensor  # [B, T, MOST_DRAFTED] in [0, 1), per position at which a round starts; fixed for each prompt
    inner: Any = None  # the state of the drafter that is timed


class SyntheticDrafter(Drafter):
    """Drafts the target's own next token at position k with probability rates[min(k, last)], else a wrong one.

    The engine verifies them like any draft, so the text stays the target's, and acceptance_rate[k] comes out as the
    given rate. That holds for greedy decoding of the given prompts; for other prompts drafts are arbitrary, and only
    timings are meaningful. With `inner`, such as an untrained head, that drafter drafts too, which adds its time; its
    drafts are not used.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[list[int]],
        rates: Sequence[float],
        *,
        max_new_tokens: int,
        inner: Drafter | None = None,
    ):
        self.vocab_size, self.device = target.vocab_size, target.device
        self._take(rates, inner)
        self.texts: dict[tuple[int, ...], list[int]] = {}
        for prompt in prompts:  # one by one, as batching could change the rounding
            new = generate(target, None, prompt, max_new_tokens=max_new_tokens).token_ids[0]
            self.texts[tuple(prompt)] = [*prompt, *new]

    def around(self, inner: Drafter | None, rates: Sequence[float]) -> "SyntheticDrafter":
        """A drafter with the same texts and random numbers, but other rates and another inner drafter."""
        other = copy.copy(self)
        other._take(rates, inner)
        return other

    def _take(self, rates: Sequence[float], inner: Drafter | None) -> None:
        if not rates or not all(0 <= rate <= 1 for rate in rates):
            raise BadInput(f"acceptance rates {list(rates)}: expected one or more between 0 and 1")
        rates = [*rates, *[rates[-1]] * (MOST_DRAFTED - len(rates))]
        self.rates = torch.tensor(rates, device=self.device)  # [MOST_DRAFTED]
        self.inner = inner
        self.feature_layers = inner.feature_layers if inner is not None else ()
        self.max_draft_tokens = inner.max_draft_tokens or MOST_DRAFTED if inner is not None else MOST_DRAFTED

    def begin(self, *, batch_size: int, max_length: int) -> SyntheticState:
        uniform = torch.zeros(batch_size, max_length, MOST_DRAFTED, device=self.device)
        texts = torch.zeros(batch_size, max_length, dtype=torch.long, device=self.device)
        inner = self.inner.begin(batch_size=batch_size, max_length=max_length) if self.inner else None
        return SyntheticState(texts, texts[:, 0], uniform, inner)

    def commit(self, state: SyntheticState, read: Reading) -> None:
        if self.inner is not None:
            self.inner.commit(state.inner, read)
        state.position = read.start + read.num_valid

    def commit_prompts(self, state: SyntheticState, read: Reading, *, most: int) -> None:
        """Look up the prompts' texts, and draw their random numbers."""
        if self.inner is not None:
            self.inner.commit_prompts(state.inner, read, most=most)
        known, length = {text: number for number, text in enumerate(self.texts)}, state.texts.shape[1]
        for row, (ids, num_valid) in enumerate(zip(read.tokens.tolist(), read.num_valid.tolist(), strict=True)):
            prompt = tuple(ids[:num_valid])
            text = self.texts.get(prompt, [])[:length]
            state.texts[row] = torch.tensor([*text, *[0] * (length - len(text))], device=self.device)
            source = torch.Generator().manual_seed(known.get(prompt, row))
            state.uniform[row] = torch.rand(length, MOST_DRAFTED, generator=source).to(self.device)

    def propose(self, state: SyntheticState, *, num_draft_tokens: int) -> Proposal:
        if self.inner is not None:
            self.inner.propose(state.inner, num_draft_tokens=num_draft_tokens)
        positions = state.position[:, None] + 1 + torch.arange(num_draft_tokens, device=self.device)  # [B, K]
        true = state.texts.gather(1, positions.clamp(max=state.texts.shape[1] - 1))  # [B, K]
        rows = torch.arange(len(true), device=self.device)
        right = state.uniform[rows, state.position, :num_draft_tokens] < self.rates[:num_draft_tokens]
        return Proposal(torch.where(right, true, (true + 1) % self.vocab_size))
