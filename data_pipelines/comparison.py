"""Whether extracting the target's states pays off, compared with running the target in every epoch."""

import math
from dataclasses import dataclass

from .plan import ExtractionRates, Survey


@dataclass(frozen=True)
class Online:
    """The cost of running the target in every epoch, over all processes."""

    tokens_per_second: float
    seconds_per_epoch: float


@dataclass(frozen=True)
class Extracted:
    """The cost of extracting the target's states once, in one storage dtype."""

    storage_dtype: str
    bytes_per_token: float
    bytes: int  # of all states
    fits: bool  # whether the disk has that many bytes free
    extraction_hours: float
    extraction_over_forward: float  # `ExtractionRates.ratio`
    seconds_saved_per_epoch: float
    pays_off_after_epochs: int | None  # None: never


@dataclass(frozen=True)
class Comparison:
    """Running the target in every epoch compared with each storage dtype; `asdict` of it is the JSON output."""

    num_rows: int
    num_tokens: int
    num_supervised_tokens: int
    free_bytes: int
    num_processes: int
    num_measured: int  # samples that rates were measured on
    spread: float  # the largest `ExtractionRates.spread`
    num_measured_tokens: int
    num_passes: int  # passes that the rates are computed from, the fewest of any storage dtype
    one_row_of: int  # N: every Nth row was counted; above 1 if counting all rows would exceed the time limit
    online: Online
    extracted: list[Extracted]


def compare_storages(
    survey: Survey, rates: dict[str, ExtractionRates], *, free_bytes: int, num_processes: int = 1
) -> Comparison:
    """Compare disk space and time, and compute after how many epochs extraction pays off.

    Args:
        rates: of one process, by storage dtype.
        free_bytes: of the disk.
        num_processes: processes that share the work.
    """
    forward = sum(rate.forward for rate in rates.values()) / len(rates)
    online = Online(
        tokens_per_second=round(forward * num_processes, 1),
        seconds_per_epoch=round(survey.num_tokens / forward / num_processes, 3),
    )
    extracted = []
    for name, rate in rates.items():
        size, tokens = survey.num_bytes[name], survey.num_tokens / num_processes
        once, saved = tokens / rate.extraction, tokens / rate.forward - tokens / rate.reading
        extracted.append(
            Extracted(
                storage_dtype=name,
                bytes_per_token=round(size / max(1, survey.num_tokens), 2),
                bytes=size,
                fits=size <= free_bytes,
                extraction_hours=round(once / 3600, 5),
                extraction_over_forward=round(rate.ratio, 4),
                seconds_saved_per_epoch=round(saved, 3),
                pays_off_after_epochs=math.ceil(once / saved) if saved > 0 else None,
            )
        )
    return Comparison(
        num_rows=survey.num_rows,
        num_tokens=survey.num_tokens,
        num_supervised_tokens=survey.num_supervised_tokens,
        free_bytes=free_bytes,
        num_processes=num_processes,
        num_measured=len(survey.drawn),
        spread=round(max(rate.spread for rate in rates.values()), 4),
        num_measured_tokens=sum(map(len, survey.drawn)),
        num_passes=min(rate.num_passes for rate in rates.values()),
        one_row_of=survey.stride,
        online=online,
        extracted=extracted,
    )
