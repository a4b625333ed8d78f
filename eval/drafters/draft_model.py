"""A smaller language model that drafts for the target (Leviathan et al. 2023), with its own cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...base.errors import BadInput, naming
from ...heads.base import Proposal
from ...heads.drafting.drafter import Drafter, Reading
from ...targets.caches.cache import SlotCache
from ...targets.caches.state_cache import StateCache
from ...targets.prefill import read_prompts
from ...targets.same_vocabulary import differing_word
from ...targets.target import Target


@dataclass
class DraftModelState:
    """The state of drafting. The pending token is the last committed one, which the target has not read yet."""

    cache: SlotCache  # what the draft model has read
    extent: int  # upper bound on the slots in use
    position: Tensor  # [B] of the pending token
    hidden: Tensor  # [B, 1, D] the draft model's final state there


class DraftModelDrafter(Drafter):
    """K greedy steps of a model with the target's tokenizer, from the pending token on.

    Vocabularies may differ in padding: ids that only one of the two has are never drafted, and ids that the draft
    model lacks are read as its last one. A draft costs K forwards, the first of them over two tokens, so that all
    rounds have the same shape. Cache slots of rejected drafts are overwritten before they are read.
    """

    def __init__(self, model: Target, *, target_vocab_size: int | None = None):
        """Args: target_vocab_size: V of the target; None: that of the draft model."""
        self.model = model
        self.num_tokens = min(model.vocab_size, target_vocab_size or model.vocab_size)

    def begin(self, *, batch_size: int, max_length: int) -> DraftModelState:
        position = torch.zeros(batch_size, dtype=torch.long, device=self.model.device)
        hidden = position.new_zeros(batch_size, 1, self.model.hidden_size, dtype=self.model.dtype)
        return DraftModelState(self.model.new_cache(max_length, num_rows=batch_size), 0, position, hidden)

    @torch.no_grad()
    def commit_prompts(self, state: DraftModelState, read: Reading, *, most: int) -> None:
        if isinstance(state.cache, StateCache):  # which needs to know where a prompt ends
            tokens = read.tokens.clamp(max=self.model.vocab_size - 1)
            num = read.num_valid - 1  # the first round reads the last token, from the states before it
            read_prompts(self.model, tokens, num.clamp(min=0), state.cache)
        else:
            super().commit_prompts(state, read, most=most)

    @torch.no_grad()
    def commit(self, state: DraftModelState, read: Reading) -> None:
        pending = read.next_tokens.gather(1, read.last[:, None])  # [B, 1]
        state.extent = read.extent or state.cache.max_length
        state.position = read.start + read.num_valid
        # drafting has read all drafted tokens but the last, so two tokens are enough, where it has kept what it read
        if read.follows_draft and not isinstance(state.cache, StateCache):
            tokens = torch.cat([read.tokens.gather(1, read.last[:, None]), pending], 1)  # [B, 2]
            state.hidden = self._read(state, tokens, state.position - 1)[:, -1:]
            return
        tokens = torch.cat([read.tokens, pending], 1).scatter(1, read.num_valid[:, None], pending)  # [B, Q + 1]
        hidden = self._read(state, tokens, read.start)  # [B, Q + 1, D]
        state.hidden = hidden[torch.arange(len(hidden), device=hidden.device), read.num_valid][:, None]

    @torch.no_grad()
    def propose(self, state: DraftModelState, *, num_draft_tokens: int) -> Proposal:
        hidden, tokens = state.hidden, []
        with state.cache.ahead(state.position + 1):
            for depth in range(num_draft_tokens):
                if depth > 0:
                    hidden = self._read(state, tokens[-1], state.position + depth)
                tokens.append(self.model.best(hidden, self.num_tokens))  # [B, 1]
        return Proposal(torch.cat(tokens, 1))

    def _read(self, state: DraftModelState, tokens: Tensor, start: Tensor) -> Tensor:
        """tokens [B, Q] at positions start [B], start + 1, ... Returns [B, Q, D]."""
        positions = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # [B, Q]
        tokens = tokens.clamp(max=self.model.vocab_size - 1)
        return self.model.forward(tokens, cache=state.cache, positions=positions, extent=state.extent).post_norm


def load_draft_model(path: str, target: Target) -> DraftModelDrafter:
    """Load a draft model in the target's dtype, on its device. One of the two may have additional tokens.

    Raises: BadInput if it cannot be loaded, has no tokenizer, or one with other ids for the same tokens."""
    dtype = str(target.dtype).removeprefix("torch.")
    with naming(f"drafter draft-model:{path}: "):
        model = Target.load(path, dtype=dtype, device=target.device)
        words = model.tokenizer.get_vocab()
    if differing_word(target.tokenizer.get_vocab(), words) is not None:
        raise BadInput(f"draft model {path}: has another tokenizer than target {target.name}")
    return DraftModelDrafter(model, target_vocab_size=target.vocab_size)
