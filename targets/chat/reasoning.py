"""What a tokenizer and its chat template say: the markers of a reasoning trace, and a hash of the template."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

MARKERS = (  # of the beginning and the end of a trace
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, GLM-4.5, Kimi-K2-Thinking
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
)
CHANNEL = ("<|channel|>analysis<|message|>", "<|end|>")  # gpt-oss: the trace is a message of its own
CHANNEL_TOKENS = {"<|channel|>", "<|message|>", "<|end|>"}


def think_markers(tokenizer: Any) -> tuple[str, str] | None:
    """The texts that open and close a trace: those that are tokens, else those in the chat template, else None."""
    vocabulary = tokenizer.get_vocab()
    for pair in MARKERS:
        if vocabulary.keys() >= set(pair):
            return pair
    if vocabulary.keys() >= CHANNEL_TOKENS:
        return CHANNEL
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return next((pair for pair in MARKERS if all(text in template for text in pair)), None)


def think_tokens(tokenizer: Any) -> tuple[int, int] | None:
    """The ids of the tokens that open and close a trace; None if there are no markers or they are not single tokens."""
    vocabulary, markers = tokenizer.get_vocab(), think_markers(tokenizer)
    if markers is None or not vocabulary.keys() >= set(markers):
        return None
    return vocabulary[markers[0]], vocabulary[markers[1]]


def trace_finder(tokenizer: Any) -> Callable[[Sequence[int]], list[bool]]:
    """A function that says of a text of n token ids where it is inside a trace: n + 1 flags, after 0 to n tokens.

    Markers that are single tokens are looked for as tokens, others in the decoded text. Where neither tokenizer nor
    template has markers, those of MARKERS[0] are looked for: a model may have been trained to write them.
    """
    tokens = think_tokens(tokenizer)
    opening, closing = think_markers(tokenizer) or MARKERS[0]
    longest = max(len(opening), len(closing))

    def by_token(ids: Sequence[int]) -> list[bool]:
        flags = [False]
        for token in ids:
            flags.append(token == tokens[0] if tokens and token in tokens else flags[-1])
        return flags

    def by_text(ids: Sequence[int]) -> list[bool]:
        flags, tail = [False], ""
        for piece in tokenizer.batch_decode([[token] for token in ids]):
            tail = tail[-longest:] + piece
            opened, closed = tail.rfind(opening), tail.rfind(closing)
            flags.append(flags[-1] if opened == closed else opened > closed)  # equal: neither is there
        return flags

    return by_token if tokens else by_text


def short_hash(text: str) -> str:
    """The first 16 hex digits of a text's sha256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_hash(tokenizer: Any) -> str:
    """`short_hash` of all that turns text into ids."""
    words = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.all_special_tokens])
    backend = getattr(tokenizer, "backend_tokenizer", None)  # only fast tokenizers have one
    return short_hash(words if backend is None else backend.to_str())


def template_hash(tokenizer: Any) -> str:
    """`short_hash` of the tokenizer's chat template, or of all if it has several; of `null` if it has none."""
    return short_hash(json.dumps(tokenizer.chat_template, sort_keys=True))
