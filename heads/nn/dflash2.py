"""What DFlash2 (2026) adds to a block drafter: convolutions over the slots of a block, and a choice among candidates.

A convolution stands before and behind the attention and the MLP of each layer. It mixes a slot with the one before it
of the same block; its taps are learned, and corrected by the slot's own state for each group of channels. It starts as
the identity.

The selector keeps the `top_k` most probable tokens of each slot and adds to their logits a low-rank term of the token
before, gated by the slot's state: U(b) + <A(a) * H(h), B(b)> for the candidate b behind the token a. It starts as zero.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..decoders.cpu.products import usable_kernels

NUM_TAPS = 2  # the slot itself and the one before it
NEVER = float("-inf")  # the logit of tokens that are not among the candidates


class SlotConvolution(nn.Module):
    """The two convolutions around a sublayer. base_kernel [2, taps, D]: before and behind it."""

    def __init__(self, size: int, *, group_size: int):
        """Args: group_size: channels with one correction; it divides `size`."""
        super().__init__()
        num_groups = size // group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, NUM_TAPS, size))
        self.kernel_projection = nn.Linear(size, 2 * NUM_TAPS * num_groups, bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], *, num_blocks: int) -> Tensor:
        """[B, W * S, D] of S blocks, slot by slot -> the same of the sublayer between its two convolutions."""
        corrections = self.kernel_projection(x).unflatten(-1, (2, NUM_TAPS, -1))  # [B, W * S, 2, taps, groups]
        before, behind = corrections.unbind(-3)
        x = sublayer(convolved(x, self.base_kernel[0], before, num_blocks=num_blocks))
        return convolved(x, self.base_kernel[1], behind, num_blocks=num_blocks)


def convolved(x: Tensor, base: Tensor, corrections: Tensor, *, num_blocks: int) -> Tensor:
    """x [B, W * S, D] -> [B, W * S, D]: sum over taps of (base [taps, D] + corrections [B, W * S, taps, groups]) times
    the slot that the tap reads; zero before a block's first."""
    num_groups = corrections.shape[-1]
    earlier = F.pad(x, (0, 0, num_blocks, 0))[:, : x.shape[1]]
    total = torch.zeros_like(x)
    for tap, values in enumerate((x, earlier)):
        corrected = values.unflatten(-1, (num_groups, -1)) * corrections[:, :, tap, :, None]
        total = total + values * base[tap].to(x.dtype) + corrected.flatten(-2)
    return total


class SlotCandidates(NamedTuple):
    """The tokens that slots choose from."""

    unary: Tensor  # [..., top_k] logits
    ids: Tensor  # [..., top_k] draft ids
    gates: Tensor  # [..., r] H(h)
    successors: Tensor  # [..., top_k, r] B(b)

    def at(self, depth: int) -> "SlotCandidates":
        """Those of a slot [B, 1, ...], of all slots' [B, K, ...]."""
        return SlotCandidates(*(part[:, depth : depth + 1] for part in self))

    def scores(self, previous: Tensor) -> Tensor:
        """[..., top_k] the candidates' logits behind tokens A(a) [..., r]."""
        pairwise = self.successors @ (previous * self.gates)[..., None]  # [..., top_k, 1]
        return self.unary + pairwise[..., 0].to(self.unary.dtype)

    def chain(self, anchors: Tensor, predecessors: Tensor, to_target: Tensor | None) -> tuple[Tensor, Tensor]:
        """Greedy chains of slots [B, K, ...] by one call of the CPU kernels, which must be usable.

        Args: anchors: [B] tokens before them. predecessors: [V, r] A. to_target: [Vd] of draft ids; None: the same.
        Returns target ids [B, K], and the logits [B, K, top_k] by which they were chosen.
        """
        library = usable_kernels(self.gates)
        assert library is not None
        slots = SlotCandidates(*(part.contiguous() for part in self._replace(unary=self.unary.to(self.gates.dtype))))
        predecessors, anchors = predecessors.contiguous(), anchors.contiguous()
        tokens, scores = anchors.new_empty(slots.ids.shape[:2]), torch.empty_like(slots.unary)
        library.choose(
            *(part.data_ptr() for part in (*slots, predecessors)),
            None if to_target is None else to_target.data_ptr(),
            anchors.data_ptr(),
            *(*slots.ids.shape, slots.gates.shape[-1]),
            *(part.data_ptr() for part in (tokens, scores)),
        )
        return tokens, scores


class CandidateSelector(nn.Module):
    """The low-rank term of the selector: predecessor_codebook A [V, r], hidden_projection H, successor_codebook B
    [Vd, r]."""

    def __init__(self, vocab_size: int, num_drafted: int, size: int, *, rank: int, top_k: int):
        super().__init__()
        self.top_k = min(top_k, num_drafted)
        # rows of length 1, as the Markov head's
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(num_drafted, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def previous(self, tokens: Tensor) -> Tensor:
        """[...] target ids -> [..., r]."""
        return F.embedding(tokens, self.predecessor_codebook)

    def read(self, hidden: Tensor, unary: Tensor, ids: Tensor) -> SlotCandidates:
        """What a choice needs, of slots [..., D] and their candidates' logits and draft ids [..., top_k]."""
        return SlotCandidates(unary, ids, self.hidden_projection(hidden), F.embedding(ids, self.successor_codebook))

    def best(self, hidden: Tensor, logits: Tensor) -> SlotCandidates:
        """The most probable tokens of slots [..., D] by their logits [..., Vd]."""
        return self.read(hidden, *logits.topk(self.top_k, -1))


def only(scores: Tensor, ids: Tensor, num_drafted: int) -> Tensor:
    """[..., Vd] the logits that candidates [..., k] are drafted with; all others are never drafted."""
    return scores.new_full((*scores.shape[:-1], num_drafted), NEVER).scatter(-1, ids.expand(scores.shape), scores)
