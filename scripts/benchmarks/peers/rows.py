"""Token rows of chats by the target's own template, as every trainer of the comparison gets them.

python -m headstart.scripts.benchmarks.peers.rows --target T --chats CHATS.jsonl --output ROWS.jsonl --max-length 320
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ....configs.errors import BadInput
from ....configs.jsonl import read_jsonl


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--chats", type=Path, required=True, help="JSONL of messages, the last one the target's answer")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max-length", type=int, required=True, help="tokens of a row, what is behind them left out")
    asked = parser.parse_args(arguments)
    try:
        write_rows(asked)
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        return 2
    return 0


def write_rows(asked: argparse.Namespace) -> None:
    """All chats, in the file's order."""
    chats = read_jsonl(asked.chats)
    tokenizer: Any = AutoTokenizer.from_pretrained(asked.target)
    with asked.output.open("w") as out:
        for chat in chats:
            out.write(json.dumps(token_row(tokenizer, chat["messages"], asked.max_length)) + "\n")


def token_row(tokenizer: Any, messages: list[dict[str, str]], max_length: int) -> dict[str, Any]:
    """`input_ids` of the whole chat and `prompt_length` of what the template puts before the last message's text.

    Raises: BadInput if the template writes the prompt otherwise where an answer follows.
    """
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt_ids, ids = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, whole))
    if ids[: len(prompt_ids)] != prompt_ids:
        raise BadInput(f"the template's prompt is no prefix of the chat: {prompt!r}")
    return {"input_ids": ids[:max_length], "prompt_length": len(prompt_ids)}


if __name__ == "__main__":
    sys.exit(main())
