"""Which chat template a tokenizer has, in a few letters: data manifests and reports name it alike."""

import hashlib
import json
from typing import Any


def short_hash(text: str) -> str:
    """The first 16 hex digits of a text's sha256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def template_hash(tokenizer: Any) -> str:
    """Of the tokenizer's chat template, of all of them where it has several; of `null` where it has none."""
    return short_hash(json.dumps(tokenizer.chat_template, sort_keys=True))
