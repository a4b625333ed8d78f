"""What differs between engines that serve: how one is started, with drafts and without, and how its counters are
read. Of any other server, `OpenAIEngine`, neither is known."""

import sys
from collections.abc import Sequence
from typing import Any

from ...base.errors import BadInput
from ...targets.weights.served_adapter import ServedAdapter
from ..neutral_sampling import NEUTRAL
from .address import Address
from .asking import Arrived
from .counters import Counters

DEFAULT_K = 4  # of what has no K of its own
LONGEST_MATCH = 3  # tokens at the end of a text that look-ups go by at most, unless they are told a number


class ServerEngine:
    """An engine by its name on the command line: a file of this folder and a line in `registry`."""

    name = ""
    title = ""  # as messages write it
    can_start = True
    program, option = sys.executable, "--engine-python"  # what starts it unless the option names another
    is_salted = True  # whether its prefix cache, where we did not start it, takes a `cache_salt`
    remembers = False  # whether its look-ups keep earlier answers, so that a prompt asked again finds its own
    extra: dict[str, Any] = {}  # further keys of every question; a server that refuses one is asked without it
    # keys with which it samples as the target does, which its defaults may not
    neutral: dict[str, Any] = {key: NEUTRAL[key] for key in ("top_k", "top_p", "min_p", "repetition_penalty")}

    def command(self, python: str, target: str, drafting: Sequence[str], arguments: Sequence[str]) -> list[str]:
        """What starts it, without its address, the user's arguments last. Args: drafting: none: it does not draft."""
        raise BadInput(f"--engine {self.name}: is not started here; name it with --server URL")

    def adapting(self, adapter: ServedAdapter) -> list[str]:
        """Flags by which it serves an adapter of the target too, as a model of the adapter's name."""
        raise BadInput(f"adapter {adapter.path}: is not served with {self.title} here; take vllm, or merge it")

    def room(self, num_slots: int, length: int) -> list[str]:
        """Flags by which it has room for so many questions of such a length at once, where it has not by itself."""
        return []

    def head_file(self, file: str, target: str, num_draft_tokens: int | None) -> tuple[list[str], int] | None:
        """What makes it draft with a head's file as it is, and K; None: heads are exported for it."""
        return None

    def with_length(self, drafting: Sequence[str], num_draft_tokens: int) -> list[str]:
        """What makes it draft, with another K."""
        raise NotImplementedError

    def ngram(self, num_draft_tokens: int, most: int = LONGEST_MATCH) -> list[str]:
        """What makes it look up the last 1 to `most` tokens in the text so far. Raises BadInput if it does not."""
        raise NotImplementedError

    def draft_model(self, folder: str, num_draft_tokens: int) -> list[str]:
        """What makes it draft with a smaller model."""
        raise NotImplementedError

    def counted_in(self, answers: Sequence[Arrived], num_draft_tokens: int | None) -> Counters | None:
        """What its answers say was drafted; None: they do not. Args: num_draft_tokens: K; None: not known."""
        return None

    def counters(self, address: Address) -> Counters | None:
        """What it has counted; None: it does not count, or drafts nothing."""
        return None


class OpenAIEngine(ServerEngine):
    """Any OpenAI-compatible server that runs: its speed and its texts; it is not started here and has no counters. Keys
    of other engines are not sent."""

    name, title, can_start, is_salted = "openai", "The server", False, False
    neutral: dict[str, Any] = {}
