"""Which chat template a tokenizer renders with, told apart by a hash of its text."""

import hashlib
import json
from typing import Any


def template_hash(tokenizer: Any) -> str:
    """16 hex digits of the sha256 of the template's text; of a tokenizer without one, of null."""
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()[:16]
