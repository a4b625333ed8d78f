"""How the target chooses tokens from logits: in fp32, on the device, without copies to the host.

The same sampling applies to drafted tokens, the bonus token, and every token of the baseline.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...configs.errors import BadInput

BLOCK = 128  # tokens whose probabilities are summed at once when a token is sampled


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters as transformers defines them. The repetition penalty also applies at temperature 0.

    Raises: BadInput on a value out of range."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    repetition_penalty: float = 1.0  # 1: off

    @property
    def takes_best(self) -> bool:
        """Whether the choice is the argmax of the raw logits."""
        return self.temperature == 0 and self.repetition_penalty == 1

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise BadInput(f"temperature {self.temperature}: expected 0 or more")
        if not self.top_k >= 0 or self.top_k != int(self.top_k):
            raise BadInput(f"top_k {self.top_k}: expected a whole number, 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p {self.top_p}: expected more than 0 and at most 1 (off)")
        if not 0 < self.repetition_penalty < math.inf:
            raise BadInput(f"repetition_penalty {self.repetition_penalty}: expected more than 0; 1 is off")


def penalised(logits: Tensor, sampling: Sampling, history: Tensor | None) -> Tensor:
    """fp32 logits after the repetition penalty (Keskar et al. 2019, CTRL; as in transformers)."""
    logits = logits.float()
    penalty = sampling.repetition_penalty
    if penalty == 1:
        return logits
    assert history is not None, "a repetition penalty needs the tokens before each position"
    return torch.where(history, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def target_probs(logits: Tensor, sampling: Sampling, history: Tensor | None = None) -> Tensor:
    """The distribution that the target samples from: penalty, temperature, top-k, top-p, in transformers' order.

    Ties: top-k keeps all that equal the k-th, top-p keeps the lowest ids, temperature 0 is one-hot at the lowest id.

    Args:
        logits: [..., V].
        history: [..., V] bool, the tokens to penalise: those of the prompt and the text before this position, drafted
            ones on the path included. Needed only with a penalty.

    Returns: [..., V] fp32, summing to 1.
    """
    logits = penalised(logits, sampling, history)
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1]))[0][..., -1:]  # [..., 1]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1:
        falling, order = logits.sort(dim=-1, descending=True, stable=True)  # the lowest id first of those that tie
        dropped = (falling.flip(-1).softmax(-1).cumsum(-1) <= 1 - sampling.top_p).flip(-1)
        dropped[..., :1].fill_(False)
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf)
    return logits.softmax(-1)


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token per distribution [..., V], which need not sum to 1: [...] ids; never one of probability 0.

    Takes the first token at which the cumulative sum exceeds one uniform number. It is looked for among the sums of
    blocks, then in one block: on a CPU, torch.multinomial's random number per token of a large vocabulary takes as long
    as the forward. Sums are in float64, as float32 sums over 50,000 tokens would lose the rare ones.
    """
    num_tokens = probs.shape[-1]
    if missing := -num_tokens % BLOCK:
        probs = F.pad(probs, (0, missing))
    blocks = probs.unflatten(-1, (-1, BLOCK))  # [..., N, BLOCK]
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # [..., N]
    total = sums[..., -1:]
    uniform = torch.rand(total.shape, dtype=torch.float64, device=probs.device, generator=generator)
    block, left = first_above(sums, uniform * total)  # [..., 1] each
    at = block[..., None].expand(*block.shape, BLOCK)
    inside = blocks.gather(-2, at).squeeze(-2).cumsum(-1, dtype=torch.float64)  # [..., BLOCK]
    token = block * BLOCK + first_above(inside, left)[0]
    return token.squeeze(-1).clamp_max(num_tokens - 1)  # if all probabilities are 0


def first_above(sums: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The index of the first of the ascending sums [..., N] that exceeds `wanted` [..., 1], and how far the latter is
    above the sum before it: [..., 1] each. If rounding made it reach the last sum, it is taken as slightly less."""
    last = sums[..., -1:]
    wanted = torch.minimum(wanted, last.nextafter(torch.zeros_like(last)))
    index = torch.searchsorted(sums, wanted, right=True).clamp_max(sums.shape[-1] - 1)
    before = sums.gather(-1, (index - 1).clamp_min(0)).where(index > 0, 0.0)
    return index, wanted - before


def choose_tokens(
    logits: Tensor, sampling: Sampling, *, history: Tensor | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """The token that the target itself emits at each position: its argmax, or one sample at temperature > 0.

    Used for every token of every run, the baseline's and the bonus token included, so that ties break the same way.

    Args: as in target_probs. Returns: [...] token ids.
    """
    if sampling.temperature == 0:
        return penalised(logits, sampling, history).argmax(-1)
    return sample(target_probs(logits, sampling, history), generator)


class TokenHistory:
    """Which tokens each row contains so far, for the repetition penalty.

    committed: [B, V] bool; updated in place, so that recorded steps read the current values.
    """

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device):
        self.committed = torch.zeros(batch_size, vocab_size, dtype=torch.bool, device=device)

    def add(self, tokens: Tensor, num_valid: Tensor) -> None:
        """Commit the first num_valid [B] of tokens [B, Q]."""
        valid = torch.arange(tokens.shape[1], device=tokens.device) < num_valid[:, None]  # [B, Q]
        counts = torch.zeros(self.committed.shape, device=tokens.device).scatter_add_(1, tokens, valid.float())
        self.committed |= counts > 0

    def at(self, tokens: Tensor, tree_mask: Tensor | None) -> Tensor:
        """[B, S + 1, V] the tokens up to each of tokens [B, S + 1], the first of which is the last committed one.

        Args: tree_mask: [B, S + 1, S] which drafted nodes each position attends to; None: a chain.
        """
        size = tokens.shape[1]
        if tree_mask is None:
            path = torch.ones(size, size, dtype=torch.bool, device=tokens.device).tril().expand(len(tokens), -1, -1)
        else:  # the root is on every path
            path = torch.cat([torch.ones_like(tree_mask[..., :1]), tree_mask], -1)  # [B, S + 1, S + 1]
        one_hot = torch.zeros(*tokens.shape, self.committed.shape[1], device=tokens.device)
        one_hot = one_hot.scatter_(2, tokens[..., None], 1.0)  # [B, S + 1, V]
        return self.committed[:, None] | (path.float() @ one_hot > 0)
