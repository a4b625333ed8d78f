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
from ..heads.drafting import StaticTree, Tree
from ..heads.target import Target
from .engine import Engine
from .verify import Sampling


@dataclass
class Round:
    """One propose-verify-commit over a batch; lists have an entry per row.

    seconds: wall time, device synchronised. draft_seconds, verify_seconds: of it, the drafter's share (taking in what
    was committed, and drafting) and the target's (its forward, logits and choice of tokens). num_drafted: tokens
    proposed per row, all nodes of a tree; 0 for the prefill and the baseline. num_accepted: drafted tokens that the
    target confirmed. num_committed: tokens that a target forward gave, the bonus token included and what lies behind an
    end token not. num_emitted: those of them within max_new_tokens. A row that had ended before has num_committed 0.
    """

    seconds: float
    num_drafted: int
    num_accepted: list[int]
    num_committed: list[int]
    num_emitted: list[int]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


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


def check_request(rows: Sequence[list[int]], *, target: Target, max_new_tokens: int) -> None:
    """Raises BadInput on token ids that the target has not, on a prompt and answer beyond the context, on no answer."""
    if max_new_tokens < 1:
        raise BadInput(f"max_new_tokens {max_new_tokens}: expected at least 1")
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


def take(
    engine: Engine, accepted: list[int], chosen: list[list[int]], *, num_drafted: int, eos: frozenset[int]
) -> Round:
    """Commit what the target chose: up to an end token, and emit up to max_new_tokens. Times are yet to be set."""
    done = Round(0.0, num_drafted, [], [], [])
    for i, (num, tokens) in enumerate(zip(accepted, chosen, strict=True)):
        tokens = [] if engine.ended[i] else tokens[: num + 1]
        end = next((j + 1 for j, token in enumerate(tokens) if token in eos), None)
        tokens = tokens[:end]
        room = engine.max_new_tokens - len(engine.new[i])
        done.num_accepted.append(min(num, len(tokens)))
        done.num_committed.append(len(tokens))
        done.num_emitted.append(min(len(tokens), room))
        engine.new[i] += tokens[:room]
        engine.ended[i] |= end is not None or len(engine.new[i]) >= engine.max_new_tokens
    return done


@torch.no_grad()
def generate(
    target: Target,
    drafter: Drafter | None,
    input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    num_draft_tokens: int | None = None,
    tree: Tree | None = None,
    eos_token_ids: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
) -> Generation:
    """Generate with speculation; the text is the target's own, token for token at temperature 0.

    Args:
        drafter: what proposes; None for the autoregressive baseline.
        input_ids: one or several prompts, of any lengths.
        max_new_tokens: per row, exact.
        temperature, top_k, top_p, repetition_penalty: as in `verify.Sampling`; the bonus token is sampled alike.
        num_draft_tokens: K per round; None: the drafter's default.
        tree: draft trees of this shape instead of chains; then K is its depth.
        eos_token_ids: tokens that end a row (emitted); None: the target's own.
        generator: the source of randomness at temperature > 0.

    Raises: BadInput on empty prompts, tokens outside the vocabulary, prompts beyond the context, or a K that the
        drafter cannot draft.
    """
    rows = as_rows(input_ids)
    check_request(rows, target=target, max_new_tokens=max_new_tokens)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty)
    if isinstance(tree, StaticTree) and tree.is_chain:
        num_draft_tokens, tree = tree.depth, None
    num_draft = draft_length(drafter, tree.depth if tree else num_draft_tokens)
    if tree is not None and not hasattr(drafter, "propose_tree"):
        raise BadInput(f"{type(drafter).__name__} drafts chains, not trees")
    eos = target.eos_token_ids if eos_token_ids is None else frozenset(eos_token_ids)
    engine = Engine(
        target,
        drafter,
        rows,
        max_new_tokens=max_new_tokens,
        num_draft=num_draft,
        tree=tree,
        sampling=sampling,
        generator=generator,
    )
    device, longest = target.device, engine.num_committed

    # 1. Prefill: the target reads the prompts, right-padded, and chooses the first token of each row
    started = engine.clock()
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)  # [B, T]
    num_valid = torch.tensor([len(row) for row in rows], device=device)
    start = torch.zeros_like(num_valid)
    output, last = engine.prefill(tokens, num_valid)  # last [B, 1]: committed, not yet read
    rounds = [take(engine, [0] * len(rows), last.tolist(), num_drafted=0, eos=eos)]
    rounds[0].seconds = rounds[0].verify_seconds = engine.clock() - started
    next_tokens = torch.cat([tokens[:, 1:], last], 1).scatter(1, num_valid[:, None] - 1, last)  # [B, T]

    while not all(engine.ended):
        started = engine.clock()
        # 2. Propose: the drafter takes in what was committed, then drafts
        if drafter is not None:
            drafter.commit(engine.state, Reading(tokens, next_tokens, output, start, num_valid))
        proposal = engine.propose()
        drafted = engine.clock() if drafter is not None else started
        # 3. Verify: one forward over the last committed token and the drafted ones
        start = start + num_valid
        accepted, next_tokens, tokens, output = engine.verify(last, proposal, start)
        said = torch.cat([accepted[:, None], next_tokens], 1).tolist()  # the host read
        verified = time.perf_counter()
        # 4. Commit; rows that have ended stay where they are
        accepts, choices = [row[0] for row in said], [row[1:] for row in said]
        done = take(engine, accepts, choices, num_drafted=engine.num_drafted, eos=eos)
        last = next_tokens.gather(1, accepted[:, None])  # [B, 1]
        num_valid = accepted + 1
        if any(engine.ended):
            num_valid = num_valid * torch.tensor([not ended for ended in engine.ended], device=device)
        done.draft_seconds, done.verify_seconds = drafted - started, verified - drafted
        done.seconds = time.perf_counter() - started
        rounds.append(done)
    return Generation(engine.new, rounds)
