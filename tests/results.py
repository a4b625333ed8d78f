"""Made-up results of report.json, and figures that tests take down, for tests of several folders."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headstart.eval.measurement.result import RenderedChats, Result

TRAINED = {  # of a head's own record
    "max_length": 256, "num_depths": 3, "template_hash": "aa",
    "prompt_ending": {"token_ids": [4], "text": "<|assistant|>"},
    "target_dtype": "float32", "target_quantization": None,
    "answers": [{"temperature": 0.7, "top_p": 1.0, "top_k": 0, "thinking": True}],
}  # fmt: skip


def made_result(**changes: Any) -> Result:
    """Of EAGLE-3, greedy chains of three on 20 prompts of one suite. Args: changes: fields with other values."""
    settings = {
        "drafter": "eagle3", "suite": "chat", "suite_digest": "0f",
        "rendering": RenderedChats(template_hash="aa"), "tree": "chain", "num_drafted": 3,
        "num_draft_tokens": 3, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "accept": "exact", "steps": "eager",
        "batch_size": 1, "num_prompts": 20, "failed": [], "max_new_tokens": 64,
    }  # fmt: skip
    return Result(**{**settings, **changes})


@contextmanager
def written_down(path: str | None) -> Iterator[list[dict[str, Any]]]:
    """A list to fill, which is then written to a JSON file, if there is one named and something to write."""
    found: list[dict[str, Any]] = []
    yield found
    if path and found:
        Path(path).write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
