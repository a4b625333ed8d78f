"""Long prompts of a folder's texts: `python examples/long_prompts.py MODEL FOLDER PROMPTS.jsonl 2048 8192 32000`.

FOLDER has books, documents or source code, as of an installed package. There are prompts of each of these numbers of
the model's tokens, whose `category` is the number: those of one place in the texts end alike, and a longer one has more
in front, so what `headstart eval` finds by domain is one kind of text behind more or less of it. A model that chats is
asked two questions at each place, to find a number at the beginning (`needle`) and to say what the last text is about;
one without a chat template goes on with the text.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.base.files import write_text
from headstart.targets.loading import TargetConfig, load_tokenizer

NUM_PLACES = 8
KINDS = (".py", ".md", ".rst", ".txt")
FEWEST = 400  # tokens of the last text in front of a place
SUMMARY = "In three sentences: what is the last part of the text above about?"
NEEDLE = "Which number is the access code that the text above names at its beginning? Answer with the number alone."


def texts_of(folder: Path, *, seed: int = 0) -> list[str]:
    """The folder's texts in an order that does not change."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in KINDS)
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    random.Random(seed).shuffle(texts)
    return [text for text in texts if text.strip()]


def places(tokenizer: Any, texts: list[str], *, most: int) -> Iterator[list[int]]:
    """`most` tokens in front of each place: the middle of a text, behind whole other ones."""
    tokens, last = list[int](), 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        middle = len(ids) // 2
        if len(tokens) + middle - last >= most and middle >= FEWEST:
            yield [*tokens, *ids[:middle]][-most:]
            last = len(tokens) + middle
        tokens += [*ids, *tokenizer.encode("\n\n", add_special_tokens=False)]


def prompts(tokenizer: Any, tokens: list[int], place: int, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """The rows of a place. Their texts, tokenised anew, may be a few tokens shorter or longer than they are to be."""
    for length in lengths:
        text, code = tokenizer.decode(tokens[-length:]), 10_000 + 7_919 * (place + 1)
        if not tokenizer.chat_template:
            yield {"id": f"text{place}-{length}", "category": str(length), "prompt": text}
            continue
        needle = f"The access code is {code}.\n\n{text}\n\n{NEEDLE}"
        for kind, content in (("summary", f"{text}\n\n{SUMMARY}"), ("needle", needle)):
            messages = [{"role": "user", "content": content}]
            yield {"id": f"{kind}{place}-{length}", "category": f"{kind} {length}", "messages": messages}


def main(model: str, folder: str, output: str, *lengths: str) -> None:
    tokenizer, wanted = load_tokenizer(TargetConfig(path=model)), sorted(map(int, lengths))
    found = places(tokenizer, texts_of(Path(folder)), most=wanted[-1])
    chosen = [tokens for tokens, _ in zip(found, range(NUM_PLACES), strict=False)]
    rows = [row for place, tokens in enumerate(chosen) for row in prompts(tokenizer, tokens, place, wanted)]
    write_text(Path(output), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{len(rows)} prompts of {len(chosen)} places in {output}")


if __name__ == "__main__":
    main(*sys.argv[1:])
