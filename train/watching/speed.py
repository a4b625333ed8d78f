"""The speed of a run's steps, and their memory."""

import resource
from dataclasses import dataclass

import torch

LIMITED = 0.05  # share of the time: a run that waits less for its server is limited by training


@dataclass(frozen=True)
class StepSpeed:
    """The figures of a step that differ between identical runs."""

    tokens_per_second: float  # positions read, over all processes
    data_wait: float  # share of the time in which it waited for data
    peak_bytes: int  # see `peak_bytes`

    @classmethod
    def of(cls, device: torch.device, *, num_positions: int, seconds: float, waited: float) -> "StepSpeed":
        """Args: num_positions: of all processes. seconds: in all. waited: seconds of them waiting for data."""
        return cls(round(num_positions / seconds, 1), round(waited / seconds, 4), peak_bytes(device))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int:
    """The most GPU memory that tensors held so far; on a CPU, the most memory that the process held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_of(waited: float) -> str:
    """Which side limits a run, in words. Args: waited: share of the time in which it waited for the server, 0..1."""
    side = "training limits" if waited < LIMITED else "the server limits"
    return f"waited for the server {waited:.0%} of the time: {side}"
