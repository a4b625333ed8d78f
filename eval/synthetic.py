"""Drafts that are right as often as one asks: what an engine makes of an acceptance, before any head is trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..configs.errors import BadInput
from ..heads.base import Drafter, Proposal, Reading
from ..heads.target import Target
from .generate import generate

MOST_DRAFTED = 64  # tokens per round


@dataclass
class SyntheticState:
    """texts [B, T]: prompt and the target's own greedy continuation, 0 behind. position [B]: of the pending token.
    luck [B, T, MOST_DRAFTED]: in [0, 1), for each position that a round can start at, so that passes are alike.
    inner: the state of the drafter whose time is paid."""

    texts: Tensor
    position: Tensor
    luck: Tensor
    inner: Any = None


class SyntheticDrafter:
    """Drafts the target's own next tokens, draft position k with probability rates[k], else a wrong one.

    The engine verifies them as it does any draft, so the text stays the target's, and acceptance_rate[k] comes out as
    rates[k] (rates' last one, beyond them). That holds in greedy decoding of the given prompts; behind others, which
    are good for timing only, drafts are arbitrary. With `inner`, an untrained head say, that drafter drafts too, and
    its time counts; what it drafts is not used.
    """

    feature_layers: tuple[int, ...] = ()
    max_draft_tokens: int | None = MOST_DRAFTED
    default_draft_tokens = 5
    on_host = False

    def __init__(
        self,
        target: Target,
        prompts: Sequence[list[int]],
        rates: Sequence[float],
        *,
        max_new_tokens: int,
        inner: Drafter | None = None,
        seed: int = 0,
    ):
        if not rates or not all(0 <= rate <= 1 for rate in rates):
            raise BadInput(f"acceptance rates {list(rates)}: expected one or more between 0 and 1")
        self.vocab_size, self.device, self.inner, self.seed = target.vocab_size, target.device, inner, seed
        rates = [*rates, *[rates[-1]] * (MOST_DRAFTED - len(rates))]
        self.rates = torch.tensor(rates, device=target.device)  # [MOST_DRAFTED]
        if inner is not None:
            self.feature_layers, self.max_draft_tokens = inner.feature_layers, inner.max_draft_tokens or MOST_DRAFTED
        self.texts: dict[tuple[int, ...], list[int]] = {}
        for prompt in prompts:  # alone, as rows of other lengths do not matter
            new = generate(target, None, prompt, max_new_tokens=max_new_tokens).token_ids[0]
            self.texts[tuple(prompt)] = [*prompt, *new]

    def begin(self, *, batch_size: int, max_length: int) -> SyntheticState:
        source = torch.Generator().manual_seed(self.seed)
        luck = torch.rand(batch_size, max_length, MOST_DRAFTED, generator=source).to(self.device)
        texts = torch.zeros(batch_size, max_length, dtype=torch.long, device=self.device)
        inner = self.inner.begin(batch_size=batch_size, max_length=max_length) if self.inner else None
        return SyntheticState(texts, texts[:, 0], luck, inner)

    def commit(self, state: SyntheticState, read: Reading) -> None:
        if self.inner is not None:
            self.inner.commit(state.inner, read)
        if not read.follows_draft:  # the prompts
            self._recall(state.texts, read)
        state.position = read.start + read.num_valid

    def propose(self, state: SyntheticState, *, num_draft_tokens: int) -> Proposal:
        if self.inner is not None:
            self.inner.propose(state.inner, num_draft_tokens=num_draft_tokens)
        places = state.position[:, None] + 1 + torch.arange(num_draft_tokens, device=self.device)  # [B, K]
        true = state.texts.gather(1, places.clamp(max=state.texts.shape[1] - 1))  # [B, K]
        rows = torch.arange(len(true), device=self.device)
        right = state.luck[rows, state.position, :num_draft_tokens] < self.rates[:num_draft_tokens]
        return Proposal(torch.where(right, true, (true + 1) % self.vocab_size))

    def _recall(self, texts: Tensor, read: Reading) -> None:
        for row, (ids, length) in enumerate(zip(read.tokens.tolist(), read.num_valid.tolist(), strict=True)):
            text = self.texts.get(tuple(ids[:length]), [])
            texts[row] = torch.tensor([*text, *[0] * (texts.shape[1] - len(text))], device=self.device)
