"""Speculative decoding on one page: the plain round, without caches, batches or recorded steps. Start here.

A drafter guesses K tokens; the target reads them all in one forward and says at each what it would have chosen itself;
the guesses that agree are kept, and the first that does not is replaced by the target's choice. So each round commits
1 to K + 1 tokens for one forward of the target, and the text is the target's own. `engine` does the same for many rows,
keeps what was read in caches, and never computes a shape twice. tests/eval/decoding/test_one_round.py holds both alike.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...heads.drafting.drafter import Drafter, Reading
from ...targets.target import Target
from .sampling import Sampling, choose_tokens, noise_keys


class Decoded(NamedTuple):
    """new: the tokens behind the prompt. accepted: of each round, how many drafts were kept."""

    new: list[int]
    accepted: list[int]


@torch.no_grad()
def decode_plainly(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    sampling: Sampling,
    seed: Tensor,
) -> Decoded:
    """Write max_new_tokens behind the prompt, end tokens or not. Args: seed: [1] of the noise, as in `noise_keys`."""
    text = [*prompt, *own_choices(target, prompt, 1, sampling, seed)]  # the prompt's own forward gives the first token
    accepted = []
    while len(text) < len(prompt) + max_new_tokens:
        # 1. Draft: the drafter reads what the target has read, all but the last token, and guesses what follows.
        drafts = draft_chain(target, drafter, text, num_draft_tokens)
        # 2. Verify: one forward over text and drafts gives the target's choice behind the text and behind each draft.
        chosen = own_choices(target, [*text, *drafts], len(drafts) + 1, sampling, seed)
        # 3. Commit: the drafts before the first that the target did not choose, and its choice there.
        num = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
        text += chosen[: num + 1]
        accepted.append(num)
    return Decoded(text[len(prompt) :][:max_new_tokens], accepted)


def draft_chain(target: Target, drafter: Drafter, text: Sequence[int], num_draft_tokens: int) -> list[int]:
    """The drafter's best guesses of what follows the text, whose last token the target has not read yet."""
    ids = torch.tensor([text], device=target.device)  # [1, T]
    output = target.forward(ids[:, :-1], feature_layers=drafter.feature_layers)
    start, num_read = torch.zeros_like(ids[:, 0]), torch.full_like(ids[:, 0], len(text) - 1)
    state = drafter.begin(batch_size=1, max_length=len(text) + num_draft_tokens + 1)
    drafter.commit(state, Reading(ids[:, :-1], ids[:, 1:], output, start, num_read))
    return drafter.propose(state, num_draft_tokens=num_draft_tokens).tokens[0].tolist()


def own_choices(target: Target, text: Sequence[int], count: int, sampling: Sampling, seed: Tensor) -> list[int]:
    """What the target itself chooses behind each of the text's last `count` tokens: its argmax, or at temperature > 0
    the token that the noise of this position picks from its distribution, whatever was drafted there."""
    ids = torch.tensor([text], device=target.device)
    logits = target.logits(target.forward(ids).post_norm[:, -count:])  # [1, count, V]
    positions = torch.arange(len(text) - count + 1, len(text) + 1, device=ids.device)[None]  # of the chosen tokens
    return choose_tokens(logits, sampling, keys=noise_keys(seed, positions))[0].tolist()
