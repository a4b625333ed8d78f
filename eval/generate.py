"""Decoding: propose -> verify -> commit, with the target's and the drafter's caches; one host read per round.

The baseline is this same loop without a drafter: one token per round, same caches, masks and choice of token.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..configs.errors import BadInput
from ..heads.base import Drafter, Reading
from ..heads.cache import SlotCache
from ..heads.target import Target
from .verify import accept_chain, choose


@dataclass
class Round:
    """One propose-verify-commit over a batch; lists have an entry per row.

    seconds: wall time, device synchronised. num_drafted: tokens proposed per row; 0 for the prefill and the baseline.
    num_accepted: drafted tokens that the target confirmed. num_committed: tokens that a target forward gave, the bonus
    token included and what lies behind an end token not. num_emitted: those of them within max_new_tokens. A row that
    had ended before the round has num_committed 0.
    """

    seconds: float
    num_drafted: int
    num_accepted: list[int]
    num_committed: list[int]
    num_emitted: list[int]


class Generation(NamedTuple):
    """token_ids: new tokens of each row, the prompt left out. rounds: the prefill first, then every round."""

    token_ids: list[list[int]]
    rounds: list[Round]


def as_rows(input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """One prompt or several, as a tensor [T] or [B, T] or as lists of ids, to a list of rows."""
    rows: Any = input_ids.tolist() if isinstance(input_ids, Tensor) else input_ids
    rows = [list(rows)] if len(rows) and isinstance(rows[0], int) else [list(row) for row in rows]
    if not rows or not all(rows):
        raise BadInput("empty prompt: at least one token per row is needed")
    return rows


def check_request(rows: Sequence[list[int]], *, target: Target, max_new_tokens: int, temperature: float) -> None:
    """Raises BadInput on token ids that the target has not, on a prompt and answer beyond the context, on no answer."""
    if max_new_tokens < 1:
        raise BadInput(f"max_new_tokens {max_new_tokens}: expected at least 1")
    if not temperature >= 0:
        raise BadInput(f"temperature {temperature}: expected 0 or more")
    for i, row in enumerate(rows):
        wrong = next((token for token in row if not 0 <= token < target.vocab_size), None)
        if wrong is not None:
            raise BadInput(f"prompt {i}: token id {wrong} is outside the vocabulary of {target.vocab_size}")
        if len(row) + max_new_tokens > target.max_positions:
            raise BadInput(
                f"prompt {i}: {len(row)} tokens + {max_new_tokens} new exceed the context of {target.max_positions}"
            )


def draft_length(drafter: Drafter | None, num_draft_tokens: int | None) -> int:
    """The chain length K of a run; 0 without a drafter. Raises BadInput where the drafter cannot draft as many."""
    if drafter is None:
        return 0
    default = getattr(drafter, "default_draft_tokens", 5)
    length = (drafter.max_draft_tokens or default) if num_draft_tokens is None else num_draft_tokens
    if length < 1 or length > (drafter.max_draft_tokens or length):
        raise BadInput(
            f"num_draft_tokens {length}: this drafter drafts 1 to {drafter.max_draft_tokens or 'any'} tokens"
        )
    return length


class Engine:
    """The state of one batch: what is committed, the caches, and where each row stands."""

    def __init__(
        self, target: Target, drafter: Drafter | None, rows: list[list[int]], *, max_new_tokens: int, num_draft: int
    ):
        self.target, self.drafter, self.num_draft = target, drafter, num_draft
        self.layers = drafter.feature_layers if drafter else ()
        self.rows, self.max_new_tokens = rows, max_new_tokens
        self.new: list[list[int]] = [[] for _ in rows]
        self.ended = [False] * len(rows)
        longest = max(len(row) for row in rows)
        max_length = longest + max_new_tokens + num_draft + 1
        self.cache: SlotCache = target.new_cache(max_length)
        self.state = drafter.begin(batch_size=len(rows), max_length=max_length) if drafter else None
        self.offsets = torch.arange(max(longest, num_draft + 1), device=target.device)

    @property
    def num_committed(self) -> int:
        """Tokens of the longest row, prompt included."""
        return max(len(row) + len(new) for row, new in zip(self.rows, self.new, strict=True))

    def read(self, tokens: Tensor, start: Tensor, *, extent: int) -> Any:
        """The target reads tokens [B, Q] at positions start [B], start + 1, ..."""
        positions = start[:, None] + self.offsets[: tokens.shape[1]]  # [B, Q]
        return self.target.forward(
            tokens, feature_layers=self.layers, cache=self.cache, positions=positions, extent=extent
        )

    def take(
        self,
        accepted: list[int],
        chosen: list[list[int]],
        *,
        num_drafted: int,
        eos: frozenset[int],
        started: float,
    ) -> Round:
        """Commit what the target chose: up to an end token, and emit up to max_new_tokens."""
        done = Round(0.0, num_drafted, [], [], [])
        for i, (num, tokens) in enumerate(zip(accepted, chosen, strict=True)):
            tokens = [] if self.ended[i] else tokens[: num + 1]
            end = next((j + 1 for j, token in enumerate(tokens) if token in eos), None)
            tokens = tokens[:end]
            room = self.max_new_tokens - len(self.new[i])
            done.num_accepted.append(min(num, len(tokens)))
            done.num_committed.append(len(tokens))
            done.num_emitted.append(min(len(tokens), room))
            self.new[i] += tokens[:room]
            self.ended[i] |= end is not None or len(self.new[i]) >= self.max_new_tokens
        done.seconds = time.perf_counter() - started
        return done


@torch.no_grad()
def generate(
    target: Target,
    drafter: Drafter | None,
    input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    num_draft_tokens: int | None = None,
    eos_token_ids: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
) -> Generation:
    """Generate with speculation; the text is the target's own, token for token at temperature 0.

    Args:
        drafter: what proposes; None for the autoregressive baseline.
        input_ids: one or several prompts, of any lengths.
        max_new_tokens: per row, exact.
        num_draft_tokens: K per round; None: the drafter's default.
        eos_token_ids: tokens that end a row (emitted); None: the target's own.
        generator: the source of randomness at temperature > 0.

    Raises: BadInput on empty prompts, tokens outside the vocabulary, prompts beyond the context, or a K that the
        drafter cannot draft.
    """
    rows = as_rows(input_ids)
    check_request(rows, target=target, max_new_tokens=max_new_tokens, temperature=temperature)
    num_draft = draft_length(drafter, num_draft_tokens)
    eos = target.eos_token_ids if eos_token_ids is None else frozenset(eos_token_ids)
    engine = Engine(target, drafter, rows, max_new_tokens=max_new_tokens, num_draft=num_draft)
    device, longest = target.device, engine.num_committed

    # 1. Prefill: the target reads the prompts, right-padded, and chooses the first token of each row
    started = time.perf_counter()
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)  # [B, T]
    num_valid = torch.tensor([len(row) for row in rows], device=device)
    start = torch.zeros_like(num_valid)
    output = engine.read(tokens, start, extent=longest)
    first = target.logits(output.at(num_valid - 1).post_norm)  # [B, 1, V]
    chosen = choose(first, temperature=temperature, generator=generator)  # [B, 1]
    rounds = [engine.take([0] * len(rows), chosen.tolist(), num_drafted=0, eos=eos, started=started)]
    next_tokens = torch.cat([tokens[:, 1:], chosen], 1).scatter(1, num_valid[:, None] - 1, chosen)  # [B, T]
    last = chosen  # [B, 1] committed, not yet read

    while not all(engine.ended):
        started = time.perf_counter()
        # 2. Propose: the drafter takes in what was committed, then drafts K tokens
        drafted = last[:, :0]  # [B, 0]
        if drafter is not None:
            drafter.commit(engine.state, Reading(tokens, next_tokens, output, start, num_valid))
            drafted = drafter.propose(engine.state, num_draft_tokens=num_draft).tokens  # [B, K]
        # 3. Verify: one forward over the last committed token and the drafted ones
        start = start + num_valid
        tokens = torch.cat([last, drafted], 1)  # [B, K + 1]
        output = engine.read(tokens, start, extent=engine.num_committed + num_draft)
        chosen = choose(target.logits(output.post_norm), temperature=temperature, generator=generator)  # [B, K + 1]
        accepted = accept_chain(chosen, drafted)  # [B]
        # 4. Commit; rows that have ended stay where they are
        said = torch.cat([accepted[:, None], chosen], 1).tolist()  # the host read
        accepts, choices = [row[0] for row in said], [row[1:] for row in said]
        rounds.append(engine.take(accepts, choices, num_drafted=num_draft, eos=eos, started=started))
        last = chosen.gather(1, accepted[:, None])  # [B, 1]
        next_tokens, num_valid = chosen, accepted + 1
        if any(engine.ended):
            num_valid = num_valid * torch.tensor([not ended for ended in engine.ended], device=device)
    return Generation(engine.new, rounds)
