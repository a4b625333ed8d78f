"""From sources to a clean data set: mixed, filtered, each conversation once, split, with a card of what was dropped."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ..configs.errors import BadInput
from .digests import Digests
from .filters import FilterConfig, reason_to_drop
from .formats import one_line
from .mixture import UNTIL
from .parallel import chunks, in_order
from .prepared import SPLITS, SplitFile, check_unchanged, read_card, unfinished, write_card
from .row_shapes import conversation_of, digest
from .sources import Row, iter_rows, read_sources

NUM_EXAMPLES = 5  # dropped rows that the card names, for each reason
ONCE = ("conversation", "prompt", "none")  # what is kept once


@dataclass(kw_only=True)
class PrepareConfig:
    """`headstart data prepare`: which rows become which data set.

    sources: what sources.py's `Source` says, or a list of such. num_rows: only the first rows of the mixture. seed,
    until: of the mixture, see `iter_rows`. output: the folder that is written.
    exclude: sources with `prompt`, `messages` or `turns` whose first questions must not be trained on: those that heads
    are evaluated with.
    as_messages: prompts with responses become chats; false: they stay plain text. once: of equal conversations, or of
    those with an equal prompt, the first is kept, or all (`none`). validation_share: of the rows, chosen by their
    prompts. tokenizer: a folder or hub id, for filters that count tokens. num_workers: processes that judge rows.
    """

    sources: str | list[str | dict[str, Any]]
    output: str
    num_rows: int | None = None
    seed: int = 0
    until: str = "first"
    exclude: str | list[str | dict[str, Any]] | None = None
    as_messages: bool = True
    filters: FilterConfig = field(default_factory=FilterConfig)
    once: str = "conversation"
    validation_share: float = 0.01
    tokenizer: str | None = None
    num_workers: int = 1

    def __post_init__(self) -> None:
        for name, known in (("once", ONCE), ("until", UNTIL)):
            if getattr(self, name) not in known:
                raise BadInput(f"{name} {getattr(self, name)!r}: expected {' or '.join(known)}")
        if not 0 <= self.validation_share < 1:
            raise BadInput(f"validation_share {self.validation_share}: expected 0 or more, below 1")
        for name in ("num_rows", "num_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"{name} should be at least 1, got {value}")
        if self.filters.counts_tokens and self.tokenizer is None:
            raise BadInput("filters.min_tokens and filters.max_tokens need a tokenizer")

    def recorded(self) -> dict[str, Any]:
        """What the result depends on, as JSON has it."""
        kept = {key: value for key, value in asdict(self).items() if key not in ("output", "num_workers")}
        return json.loads(json.dumps(kept))

    def files(self) -> dict[str, int]:
        """The local files that are read, with their bytes."""
        sources = [*read_sources(self.sources), *(read_sources(self.exclude) if self.exclude else ())]
        return {str(file): file.stat().st_size for source in sources for file in source.files()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to become of one row, as far as it shows by itself.

    reason: what it is dropped for, and `more` about it; None: it is kept. key: equal for rows of which one is kept.
    prompt, question: digests of all before the first answer, and of the first user turn. line: as written.
    """

    row: tuple[str, str, int]  # source, origin, epoch
    reason: str | None = None
    more: str = ""
    key: bytes = b""
    prompt: bytes = b""
    question: bytes = b""
    line: bytes = b""
    num_turns: int = 0
    num_characters: int = 0
    num_answer_characters: int = 0


def prepare(config: PrepareConfig, *, on_rows: Callable[[int], object] = lambda count: None) -> dict[str, Any]:
    """Writes OUTPUT/train.jsonl, validation.jsonl, card.json and README.md; returns the card.

    Rows are `{id, source, source_id, ...}` with `messages` and `tools`, `prompt`, `prompt` and `response`, or `text`;
    the id is a hash of the conversation, the source's own id, and the epoch. The side of the split is a hash of the
    prompt: it depends neither on the order nor on other rows, and two answers to one prompt are on one side. Memory:
    21 to 43 bytes a conversation (see `Digests`), and a few thousand rows.

    All is written to a folder beside OUTPUT that takes its name at the end. Where OUTPUT is there, prepared by the same
    config from the same files, nothing is done. on_rows: told how many rows have been judged.
    BadInput: as `iter_rows`; an OUTPUT that is anything else; no row left for training.
    """
    card = prepared_before(config)
    if card is not None:
        return card
    tally = _Tally([source.called for source in read_sources(config.sources)])
    excluded = _questions_of(config.exclude)
    seen = Digests()
    rows = iter_rows(config.sources, num_rows=config.num_rows, seed=config.seed, until=config.until)
    with unfinished(Path(config.output)) as folder:
        files = [SplitFile(folder / f"{split}.jsonl") for split in SPLITS]
        for verdicts in in_order(partial(judge, config=config), chunks(rows), num_workers=config.num_workers):
            for verdict in verdicts:
                is_validation = int.from_bytes(verdict.prompt[:8], "big") < config.validation_share * 2**64
                reason = verdict.reason or _reason_beside_others(verdict, config, is_validation, excluded, seen)
                tally.count(verdict, reason)
                if reason is None:
                    counts = verdict.num_turns, verdict.num_characters, verdict.num_answer_characters
                    files[is_validation].write(verdict.line, counts)
            on_rows(tally.num_read)
        if not files[0].num_rows:
            raise BadInput(f"no row is left for training: {tally.told()}")
        splits = {split: file.close() for split, file in zip(SPLITS, files, strict=True)}
        card = {**tally.card(), "splits": splits, "files": config.files(), "config": config.recorded()}
        write_card(folder, card, name=Path(config.output).name)
    return card


def prepared_before(config: PrepareConfig) -> dict[str, Any] | None:
    """The card of an OUTPUT that this config has written before; None: there is none. BadInput as `prepare`."""
    card = read_card(Path(config.output))
    if card is not None:
        check_unchanged(card, config=config.recorded(), files=config.files(), output=Path(config.output))
    return card


class _Tally:
    """Rows read, kept and dropped, by source and reason, and where some of the dropped stood."""

    def __init__(self, sources: list[str]):
        for source in sources:
            if sources.count(source) > 1:
                raise BadInput(f"sources: two are called {source}; give each a `name`")
        self.counts: dict[str, Counter[str]] = {source: Counter() for source in sources}
        self.examples: dict[str, list[str]] = {}
        self.num_read = 0

    def count(self, verdict: Verdict, reason: str | None) -> None:
        source, origin, _ = verdict.row
        self.num_read += 1
        self.counts[source][reason or "kept"] += 1
        if reason is not None and len(self.examples.setdefault(reason, [])) < NUM_EXAMPLES:
            self.examples[reason].append(verdict.more or origin)

    def card(self) -> dict[str, Any]:
        """Counts over all sources, and of each."""
        sources = {source: _counts_of(counts) for source, counts in self.counts.items()}
        whole = _counts_of(sum(self.counts.values(), Counter()))
        return {**whole, "sources": sources, "examples": dict(sorted(self.examples.items()))}

    def told(self) -> str:
        """The same in one line, with an example."""
        counts = sum(self.counts.values(), Counter())
        told = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
        reason = next((reason for reason, _ in counts.most_common() if reason in self.examples), None)
        return f"{self.num_read} read, {told}" + (f"; for example {self.examples[reason][0]}" if reason else "")


def _counts_of(counts: Counter[str]) -> dict[str, Any]:
    dropped = {reason: count for reason, count in sorted(counts.items()) if reason != "kept"}
    return {"read": counts.total(), "kept": counts["kept"], "dropped": dropped}


def judge(rows: list[Row], config: PrepareConfig) -> list[Verdict]:
    """What each row is and whether it is dropped, as far as one row shows it: the work that processes share."""
    return [_judge_one(row, config) for row in rows]


def _judge_one(row: Row, config: PrepareConfig) -> Verdict:
    place = row.source, row.origin, row.epoch
    try:
        conversation = conversation_of(row, as_messages=config.as_messages)
    except BadInput as error:
        return Verdict(row=place, reason="malformed", more=str(error))
    count_tokens = _token_counter(config.tokenizer) if config.tokenizer and config.filters.counts_tokens else None
    reason = reason_to_drop(conversation, config.filters, count_tokens=count_tokens)
    if reason is not None:
        return Verdict(row=place, reason=reason)
    own_id = row.data.get("id")
    written: dict[str, Any] = {"id": conversation.id(own_id, row.epoch), "source": row.source}
    written |= {} if own_id is None else {"source_id": str(own_id)}
    written |= {"truncated": True} if conversation.truncated else {}
    try:
        line = (json.dumps(written | conversation.data, ensure_ascii=False, default=str) + "\n").encode()
    except UnicodeEncodeError:  # JSON can hold half of a surrogate pair; UTF-8 and tokenizers cannot
        return Verdict(row=place, reason="half_character")
    prompt = digest(conversation.prompt)
    return Verdict(
        row=place,
        key=prompt if config.once == "prompt" else digest([*conversation.turns, ("tools", conversation.tools)]),
        prompt=prompt,
        question=digest(conversation.question) if config.exclude else b"",
        line=line,
        num_turns=len(conversation.turns),
        num_characters=conversation.num_characters,
        num_answer_characters=sum(map(len, conversation.answers)),
    )


def _reason_beside_others(
    verdict: Verdict, config: PrepareConfig, is_validation: bool, excluded: frozenset[bytes], seen: Digests
) -> str | None:
    """What a row is dropped for beside other rows. Later epochs repeat the first one's rows, but for validation."""
    epoch = verdict.row[2]
    if verdict.question in excluded:
        return "excluded"
    if epoch and is_validation:
        return "repeated_validation"
    key = bytes(a ^ b for a, b in zip(verdict.key, epoch.to_bytes(16, "big"), strict=True)) if epoch else verdict.key
    return "duplicate" if config.once != "none" and not seen.add(key) else None


def _questions_of(specs: str | list[str | dict[str, Any]] | None) -> frozenset[bytes]:
    """Digests of the first user turns of rows with `prompt`, `messages`, or `turns`, a list of texts."""
    found = set()
    for row in iter_rows(specs) if specs else ():
        turns = row.data.get("turns")
        first = {"prompt": turns[0]} if isinstance(turns, list) and turns else row.data
        found.add(digest(conversation_of(replace(row, data=first)).question))
    return frozenset(found)


@lru_cache(maxsize=1)
def _token_counter(name: str) -> Callable[[str], int]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise BadInput(f"tokenizer {name}: cannot be loaded: {one_line(error)}") from error
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
