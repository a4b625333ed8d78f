"""A head's teacher-forced view as deep as it drafts, which a recurrent head may be trained less deep for."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...heads.base import DraftHead


@contextmanager
def unrolled(head: DraftHead, num_depths: int) -> Iterator[None]:
    """The head looks that far ahead within, if it does not by itself: EAGLE-1 is trained one step, and drafts five.

    Args: num_depths: at most head.max_draft_tokens, where the head has such a limit.
    """
    config, trained = head.config, head.config.num_depths
    config.num_depths = max(trained, num_depths)
    try:
        yield
    finally:
        config.num_depths = trained
