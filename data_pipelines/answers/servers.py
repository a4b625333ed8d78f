"""A server of an OpenAI-compatible API: its address, how its last requests went, and what its refusals say."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ...configs.errors import BadInput, first_line

if TYPE_CHECKING:
    import openai

FAILURES_IN_A_ROW = 3  # after which a server is paused; fewer may be the fault of one bad request
REFUSED_STATUSES = (400, 422)  # of a request with a key that the server does not take
UNKNOWN_KEY = (
    r"(?i)\b(extra|unknown|unrecogni[sz]ed|unsupported|unexpected)\b.*\b(arguments?|fields?|inputs?|keys?|param\w+)\b"
)


@dataclass
class Server:
    """A server, and how its last requests went."""

    url: str
    client: "openai.OpenAI"
    num_busy: int = 0
    num_failures: int = 0  # in a row
    rests_until: float = 0.0  # time.monotonic(), in seconds
    problem: str = ""
    refused: set[str] = field(default_factory=set)  # optional keys of a request that it does not take

    @property
    def is_failing(self) -> bool:
        return self.num_failures >= FAILURES_IN_A_ROW

    def is_free(self, now: float, concurrency: int) -> bool:
        return self.rests_until <= now and self.num_busy < (1 if self.is_failing else concurrency)


def check_url(url: str, *, where: str) -> None:
    """Raises BadInput if this is not an http(s) URL, or contains a password, which the message does not repeat."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        raise BadInput(f"{where}: not a URL") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise BadInput(
            f"{where}: a URL with a password or parameters; name the variable of a key in client.api_key_env"
        )
    if not is_good:
        raise BadInput(f"{where} {url!r}: expected a URL such as http://localhost:8000/v1")


def refused_keys(error: "openai.APIStatusError", sent: set[str]) -> set[str]:
    """Which of the keys that were sent a refusal is about: those that it names, or all if it speaks of unknown keys
    without a name."""
    if error.status_code not in REFUSED_STATUSES:
        return set()
    text = error.response.text
    named = {key for key in sent if re.search(rf"\b{key}\b", text)}
    return named or (sent if re.search(UNKNOWN_KEY, text) else set())


def not_reached(server: Server, error: Exception) -> str:
    return f"{server.url}: cannot be reached: {first_line(error.__cause__ or error)}"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds until a retry, from the header Retry-After, which has a number or a date; None: there is none."""
    value = headers.get("Retry-After", "")
    try:
        is_number = value.replace(".", "", 1).isdigit()
        return float(value) if is_number else max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
