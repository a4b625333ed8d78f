"""What DFlash2 (2026) adds to a block drafter: convolutions over the slots of a block, and a choice among candidates.

A convolution stands before and behind the attention and the MLP of each layer. It mixes a slot with the one before it
of the same block; its taps are learned, and corrected by the slot's own state for each group of channels. It starts as
the identity.

The selector keeps the `top_k` most probable tokens of each slot and adds to their logits a low-rank term of the token
before, gated by the slot's state: U(b) + <A(a) * H(h), B(b)> for the candidate b behind the token a. It starts as zero.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...targets.cpu.products import usable_kernels
from .candidates import Chooser, SlotCandidates

NUM_TAPS = 2  # the slot itself and the one before it


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


@dataclass(frozen=True)
class GatedCandidates(SlotCandidates):
    """Candidates that a low-rank term scores."""

    unary: Tensor  # [..., top_k] logits
    gates: Tensor  # [..., r] H(h)
    successors: Tensor  # [..., top_k, r] B(b)

    def scores(self, previous: Tensor) -> Tensor:
        """Args: previous: [..., r] A(a)."""
        pairwise = self.successors @ (previous * self.gates)[..., None]  # [..., top_k, 1]
        return self.unary + pairwise[..., 0].to(self.unary.dtype)


class CandidateSelector(Chooser[GatedCandidates]):
    """The low-rank term of the selector: predecessor_codebook A [V, r], hidden_projection H, successor_codebook B
    [Vd, r]."""

    def __init__(self, vocab_size: int, num_drafted: int, size: int, *, rank: int, top_k: int):
        super().__init__(top_k=top_k)
        # rows of length 1, as the Markov head's
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(num_drafted, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def previous(self, tokens: Tensor) -> Tensor:
        """[...] target ids -> [..., r]."""
        return F.embedding(tokens, self.predecessor_codebook)

    def read(self, hidden: Tensor, unary: Tensor, ids: Tensor) -> GatedCandidates:
        """What a choice needs, of slots [..., D] and their candidates' logits and draft ids [..., top_k]."""
        return GatedCandidates(ids, unary, self.hidden_projection(hidden), F.embedding(ids, self.successor_codebook))

    def best(self, hidden: Tensor, logits: Tensor, *, anchors: Tensor, context: Tensor) -> GatedCandidates:
        return self.read(hidden, *logits.topk(self.top_k, -1))

    def chain(self, candidates: GatedCandidates, anchors: Tensor, to_target: Tensor | None) -> tuple[Tensor, Tensor]:
        library = usable_kernels(candidates.gates)
        if library is None:
            return super().chain(candidates, anchors, to_target)
        unary, (batch_size, num_slots, top_k) = candidates.unary.to(candidates.gates.dtype), candidates.ids.shape
        parts = [unary, candidates.ids, candidates.gates, candidates.successors, self.predecessor_codebook]
        parts, anchors = [part.contiguous() for part in parts], anchors.contiguous()
        tokens, scores = anchors.new_empty(batch_size, num_slots), torch.empty_like(parts[0])
        library.choose(
            *(part.data_ptr() for part in parts),
            None if to_target is None else to_target.data_ptr(),
            anchors.data_ptr(),
            *(batch_size, num_slots, top_k, candidates.gates.shape[-1]),
            *(part.data_ptr() for part in (tokens, scores)),
        )
        return tokens, scores
