"""Compares the ids that a target wrote with those that tokenising their text gives; says where only text is there."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import islice
from typing import Any

from ...base.errors import BadInput
from ...targets.chat.written_ids import KEY
from ..rows.config import DataConfig
from ..rows.samples import FROM_ROW, FROM_TEXT, NOT_ITS_IDS
from ..rows.sources import Row
from .chat import ids_of
from .segments import token_table

MOST_TRIED = 200  # rows with ids whose text is tokenised too
Place = tuple[list[int], list[int]]  # ids as the target wrote them; those of their text


def share_retokenised(rows: Iterable[Row], tokenizer: Any, config: DataConfig, *, vocab_size: int) -> str:
    """Says how many rows with ids would get other ids if their text were tokenised again."""
    found = [first_retokenised(row, tokenizer, config, vocab_size=vocab_size) for row in rows]
    differs = [bool(places) for places in found if places is not None]
    if not differs:
        return "in how many the target wrote other tokens is not known, as no row has ids"
    share = sum(differs) / len(differs)
    return f"of {len(differs)} rows with ids, {sum(differs)} ({share:.0%}) have other tokens if tokenised again"


def first_retokenised(row: Row, tokenizer: Any, config: DataConfig, *, vocab_size: int) -> list[Place] | None:
    """Where the last sequence of a row's `written_ids` has other ids than its text; None if its ids are not used."""
    table = token_table(tokenizer)
    if KEY not in row.data:
        return None
    try:
        sequences, source = ids_of(row, table, config, vocab_size)
        if source != FROM_ROW:
            return None
        wrote = sequences[-1].input_ids
        text, _ = ids_of(replace(row, data={**row.data, KEY: None}), table, config, vocab_size)
    except BadInput:
        return None
    ids = text[-1].input_ids if text else []
    if ids[: len(wrote)] == wrote:  # a template may write more behind the end token
        return []
    runs = SequenceMatcher(None, wrote, ids, autojunk=False).get_opcodes()
    places = [(wrote[a:b], ids[c:d]) for kind, a, b, c, d in runs if kind != "equal"]
    return places[:-1] if not places[-1][0] and len(places) > 1 else places


def line_on_sources(
    sources: Counter[str], rows: Iterable[Row], tokenizer: Any, config: DataConfig, *, vocab_size: int
) -> str:
    """What there is to say of samples whose ids the target may not have written; empty: nothing.

    Args: sources: the number of samples by `Sample.source`. rows: those rows again; up to MOST_TRIED with ids are read.
    """
    parts = []
    if sources[NOT_ITS_IDS]:
        why = "`written_ids` of another tokenizer, template or text, so their text is tokenised"
        parts.append(f"{sources[NOT_ITS_IDS]} have {why}")
    if sources[FROM_TEXT]:
        with_ids = islice((row for row in rows if row.data.get(KEY)), MOST_TRIED if sources[FROM_ROW] else 0)
        tried = share_retokenised(with_ids, tokenizer, config, vocab_size=vocab_size)
        parts.append(f"{sources[FROM_TEXT]} have text alone ({tried})")
    return f"of {sources.total()} samples {'; '.join(parts)}" if parts else ""
