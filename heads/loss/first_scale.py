"""The scale of a fresh head's logits: as small as what it knows is worth.

A fresh head's output layer has the rows of the target's, and the gain of its final norm where there is one. Rows and
gain fit states that know the next token: then logits lie far apart, and so they do for a state that knows nothing yet.
A wrong guess costs as much as logits lie apart, guessing evenly log(draft vocabulary). So the spread of a fresh head's
logits is measured on tokens that the target draws itself, no data, and scaled down to SPREAD where it is above.
"""

import torch
from torch import Tensor

from ..base import DraftBatch, DraftHead
from ..target import Target

# standard deviation of a fresh head's logits over the vocabulary: Gaussian logits that know nothing of the label cost
# SPREAD ** 2 / 2 nats more than guessing evenly
SPREAD = 0.2
NUM_ROWS, NUM_TOKENS, NUM_DRAWS = 2, 32, 4  # of the tokens that it is measured on
MOST_TRIES = 4


@torch.no_grad()
def tame_logits(head: DraftHead) -> None:
    """Scale the logits of a fresh head, at each depth, so that over the vocabulary they spread by SPREAD at most."""
    ids = probe_tokens(head.target)
    output = head.target.forward(ids, feature_layers=head.feature_layers)
    batch = DraftBatch(ids, torch.ones_like(ids, dtype=torch.bool), output)
    num_depths = min(head.num_depths, NUM_TOKENS // 2)
    for _ in range(MOST_TRIES):  # where logits are capped or layers are not linear, once is not enough
        starts, logits = head.teacher_forced_logits(batch, num_depths=num_depths)  # [B, S, K, Vd]
        spread = logits.var(-1)[starts.valid.all(-1)].mean(0).sqrt()  # [K]
        if not (spread > 1.05 * SPREAD).any():
            return
        factors = (SPREAD / spread).clamp(max=1)
        head.scale_logits(torch.cat([factors, factors[-1:].expand(head.num_depths - num_depths)]))


@torch.no_grad()
def probe_tokens(target: Target) -> Tensor:
    """[B, T] tokens, the same at each call, that the target might write with no text to begin from: each is drawn from
    what the target expects behind the tokens before it, all at once, and that NUM_DRAWS times."""
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (NUM_ROWS, NUM_TOKENS), generator=source).to(target.device)
    for _ in range(NUM_DRAWS):
        below = target.logits(target.forward(ids).post_norm[:, :-1]).softmax(-1).cumsum(-1)  # [B, T - 1, V]
        drawn = torch.rand(*below.shape[:2], 1, generator=source).to(target.device) * below[..., -1:]
        ids = torch.cat([ids[:, :1], torch.searchsorted(below, drawn)[..., 0].clamp(max=target.vocab_size - 1)], 1)
    return ids
