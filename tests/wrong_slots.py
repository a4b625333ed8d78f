"""Faults of decoding that a check of a target has to see: a wrong mask, a wrong position."""

import torch
from headstart.targets.caches import cache as caches
from headstart.targets.target import Target

VISIBILITY, READ = caches.visibility_mask, Target.read_slots


def hiding_a_slot(positions, **how):
    """In place of `visibility_mask`: no query sees the second token."""
    mask = VISIBILITY(positions, **how)
    mask[..., 1] = torch.finfo(mask.dtype).min
    return mask


def one_further(self, input_ids, positions, *rest, **how):
    """In place of `read_slots`: behind the prompt, each token believes to be one further on."""
    return READ(self, input_ids, positions + (positions.shape[1] == 1), *rest, **how)
