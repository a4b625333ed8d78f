"""Accept rules as pure functions on logits: fp32, on the device, without a host read."""

import torch
from torch import Tensor


def choose(logits: Tensor, *, temperature: float = 0.0, generator: torch.Generator | None = None) -> Tensor:
    """The token that the target itself emits at each position: its argmax, or one sample at temperature > 0.

    Used for every token of every run, the baseline's and the bonus token included, so that ties break alike.

    Args: logits: [..., V]. Returns [...] token ids.
    """
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(-1)
    probs = (logits / temperature).softmax(-1)
    return torch.multinomial(probs.flatten(0, -2), 1, generator=generator).view(logits.shape[:-1])


def accept_chain(chosen: Tensor, drafted: Tensor) -> Tensor:
    """How many tokens of a drafted chain stand: those that equal the target's own choice, up to the first that differs.

    Lossless for greedy drafts at any temperature: the target's choice given the accepted prefix is emitted at every
    position, whether the draft guessed it or not, so the text is distributed as the target's own. A drafted token x is
    accepted with probability p(x), the most that a deterministic draft allows (Leviathan et al. 2023 with q one-hot).

    Args:
        chosen: [B, K + 1] the target's choices at the last committed token and behind each drafted one.
        drafted: [B, K].

    Returns: [B] number of accepted tokens a, 0..K. chosen[:, : a + 1] are the tokens to commit, bonus token last.
    """
    return (chosen[:, : drafted.shape[1]] == drafted).long().cumprod(1).sum(1)
