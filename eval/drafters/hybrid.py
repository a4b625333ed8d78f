"""A head combined with look-ups: a chain of the head's guesses that continues with copies of what followed the
same words before. How to combine them is learnt from how often each was right."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ...heads.base import DraftHead
from ...heads.drafting.drafter import Drafter, Reading
from ...heads.drafting.trees import Proposal
from ..decoding.replay import Replay
from .answers import Answers
from .asking import Asking
from .guessing import Chain, Guessing
from .host import RowText, commit_texts
from .lookup import ANSWERED_DRAFT_TOKENS, suffix_rows
from .rates import PROBABILITIES, PROBABILITY_RATES, HitRates, LookupRates
from .suffix import SuffixRow
from .unread import Unread

MOST_KEPT = 512  # positions of a prompt whose states are kept until the head is asked; it reads longer ones at once


class HybridRow(RowText):
    """One row's look-ups, and how they combine with the head's guesses.

    Args: guessed: how often the head's guesses were right, by their probability.
    """

    def __init__(self, text: SuffixRow, guessed: HitRates):
        self.text, self.guessed = text, guessed
        self.latest: Chain = []  # the head's guesses for the tokens that are committed next

    def read_prompt(self, tokens: Sequence[int]) -> None:
        self.text.read_prompt(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens, and count which guesses would have been right."""
        for token, guess in zip(tokens, self.latest, strict=False):
            self.guessed.add(guess.probability, is_right=guess.token == token)
            if guess.token != token:  # later guesses were for another text
                break
        self.latest = []
        self.text.extend(tokens)

    def chain(self, head: Chain, num_tokens: int) -> list[int]:
        """The chain with the largest expected number of accepted tokens, of those that start with the head's first j
        tokens and continue as a copy."""
        self.latest = head
        place, chance, expected = self.text.place, 1.0, 0.0
        own: list[int] = []
        best, most = own, -1.0
        for num_guessed in range(len(head) + 1):
            copied = self.text.copy(place, num_tokens - num_guessed)
            whole = expected + chance * sum(certainty for _, certainty in copied)
            if whole > most:
                best, most = [*own, *(token for token, _ in copied)], whole
            if num_guessed < len(head):
                guess = head[num_guessed]
                chance *= self.guessed.at(guess.probability)
                expected += chance
                place = self.text.follow(place, guess.token)
                own.append(guess.token)
        return best


@dataclass
class Learnt:
    """What an engine's texts have told so far: how often look-ups and the head's guesses were right, and whether asking
    pays."""

    rates: LookupRates = field(default_factory=LookupRates)
    guessed: HitRates = field(default_factory=partial(HitRates, PROBABILITIES, PROBABILITY_RATES))
    asking: Asking = field(default_factory=Asking)


@dataclass
class HybridState:
    """rows: texts. guessing: the head, which keeps its caches from batch to batch, as learnt is kept. active: rows that
    still grow."""

    rows: list[HybridRow]
    guessing: Guessing
    learnt: Learnt
    active: list[bool] = field(default_factory=list)


class HybridDrafter(Drafter):
    """A head, and look-ups in suffix tries where these are expected to be accepted more.

    The head is asked where that is expected to raise tokens per time (`Asking`), and reads only then. A
    chain is j tokens of the head, at most as many as it was trained to draft, then K - j copied ones; the j is that for
    which most tokens are expected to be accepted: the sum over depths of the product of the tokens' hit rates.
    Drafts are deterministic, so the text is the target's own at temperature > 0 too.

    Args: head: the one that is asked. answers: as in `SuffixDrafter`.
    """

    on_host = True

    def __init__(self, head: DraftHead, *, answers: Answers | None = None):
        self.head, self.answers = head, answers
        self.answers_digest = answers.digest if answers else None  # tells measurements apart
        self.feature_layers, self.adapts_target = head.feature_layers, head.adapts_target
        self.reach = head.num_depths  # largest number of tokens requested from the head
        self.default_draft_tokens = max(self.reach, ANSWERED_DRAFT_TOKENS) if answers else self.reach

    def begin(self, *, batch_size: int, max_length: int) -> HybridState:
        head = self.head.begin(batch_size=batch_size, max_length=max_length)
        guessing = Guessing(self.head, head, Unread.of(batch_size, max_length=max_length))
        learnt = Learnt()
        return HybridState(self._new_rows(batch_size, learnt), guessing, learnt)

    def restart(self, state: HybridState, *, batch_size: int, max_length: int) -> HybridState:
        state.guessing.unread = Unread.of(batch_size, max_length=max_length)
        return HybridState(self._new_rows(batch_size, state.learnt), state.guessing, state.learnt)

    def _new_rows(self, batch_size: int, learnt: Learnt) -> list[HybridRow]:
        return [HybridRow(text, learnt.guessed) for text in suffix_rows(batch_size, self.answers, learnt.rates)]

    def rehearse(self, state: HybridState, replay: Replay, *, extent: int, depth: int) -> None:
        state.guessing.record(replay, extent=extent, width=depth + 1, num_tokens=min(depth, self.reach))

    def commit(self, state: HybridState, read: Reading) -> None:
        state.active = commit_texts(state.rows, read)
        starts, counts = read.start.tolist(), read.num_valid.tolist()
        read_rows = [row for row, count in enumerate(counts) if count]
        state.learnt.asking.count({row: counts[row] for row in read_rows if starts[row] > 0})
        is_prompt = any(starts[row] == 0 for row in read_rows)
        guessing = state.guessing
        if is_prompt or not guessing.unread.follows(read):
            guessing.read()
        guessing.unread.add(read)
        if is_prompt and read.tokens.shape[1] > MOST_KEPT:
            guessing.read(is_asked=True)

    def leave_out(self, prompts: Sequence[Sequence[int]], questions: Sequence[str] = ()) -> None:
        if self.answers is not None:
            self.answers.leave_out(prompts, questions)

    def propose(self, state: HybridState, *, num_draft_tokens: int) -> Proposal:
        copies = [row.text.copy(row.text.place, num_draft_tokens) for row in state.rows]
        drafts, depth = [[token for token, _ in copied] for copied in copies], min(num_draft_tokens, self.reach)
        growing = (row for row, active in enumerate(state.active) if active)
        expected = {row: sum(chance for _, chance in copies[row]) for row in growing}
        if state.learnt.asking.decide(expected, rate=state.learnt.guessed.mean, depth=depth):
            chains = state.guessing.chains(depth)
            rows = zip(state.rows, chains, drafts, state.active, strict=True)
            drafts = [row.chain(own, num_draft_tokens) if active else copied for row, own, copied, active in rows]
        return Proposal(torch.tensor(drafts))  # [B, K]
