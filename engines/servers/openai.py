"""Any OpenAI-compatible server that runs: its speed and its texts; it is not started here and has no counters."""

from typing import Any

from .engine import ServerEngine


class OpenAIEngine(ServerEngine):
    """Keys of other engines are not sent."""

    name, title, can_start, is_salted = "openai", "The server", False, False
    neutral: dict[str, Any] = {}
