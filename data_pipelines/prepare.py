"""`headstart data prepare`: mixes, filters, deduplicates and splits rows, with a card that counts dropped rows."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ..base.errors import BadInput
from ..base.files import LocalPath, replacing, sha256_of
from ..base.owned import OwnedFolder, check_owner
from ..targets.chat.prompts import rendered
from ..targets.chat.rows import UnusableRow, chat_of, of_request
from .dataset_card import SPLITS, Card, RowCounts, check_unchanged, read_card, write_card
from .rows.config import check_at_least_one
from .rows.filters import FilterConfig, reason_to_drop
from .rows.formats import one_line
from .rows.joined_chats import SHORTEST, ChatJoiner
from .rows.parallel import ROWS_AT_A_TIME, in_order
from .rows.row_shapes import conversation_of, turns_digest
from .rows.sources import Row, iter_rows, read_sources
from .rows.traffic import of_log

COMMAND = "headstart data prepare"
NUM_EXAMPLES = 5  # dropped rows that the card lists for each reason
REFUSED = "refused_by_template"  # the reason of rows that the chat template of `tokenizer` refuses


@dataclass(kw_only=True)
class PrepareConfig:
    """The config of `headstart data prepare`."""

    sources: str | list[str | dict[str, Any]]  # a `Source` of sources.py, or a list of them
    output: LocalPath  # the folder to write
    num_rows: int | None = None  # only the first rows of the mixture; None: all
    seed: int = 0  # of the mixture
    # evaluation prompts: rows with the same question are dropped
    exclude: str | list[str | dict[str, Any]] | None = None
    filters: FilterConfig = field(default_factory=FilterConfig)
    validation_share: float = 0.01  # share of rows for validation, selected by a hash of the first question
    tokenizer: LocalPath | None = None  # a folder or hub id: drops chats that its chat template refuses
    # chats of the same system prompt are joined to rows of up to so many tokens, for heads that draft in long contexts
    join_tokens: int | None = None
    num_workers: int = 1  # processes that filter and convert rows

    def __post_init__(self) -> None:
        if not 0 <= self.validation_share < 1:
            raise BadInput(f"validation_share {self.validation_share}: expected 0 or more, below 1")
        check_at_least_one(num_rows=self.num_rows, num_workers=self.num_workers)
        if self.join_tokens is not None and self.tokenizer is None:
            raise BadInput("join_tokens needs a tokenizer")
        if self.join_tokens is not None and self.join_tokens < SHORTEST:
            raise BadInput(f"join_tokens {self.join_tokens}: expected {SHORTEST} or more")

    def recorded(self) -> dict[str, Any]:
        """The keys that the result depends on, as JSON returns them."""
        settings = {key: value for key, value in asdict(self).items() if key not in ("output", "num_workers")}
        return json.loads(json.dumps(settings))

    def files(self) -> dict[str, str]:
        """The local files that are read, with the first 16 hex digits of their sha256."""
        sources = [*read_sources(self.sources), *(read_sources(self.exclude) if self.exclude else ())]
        paths = [file for source in sources for file in source.files()]
        if self.tokenizer is not None:  # the weights beside it, if any, are not read
            paths += sorted(file for file in Path(self.tokenizer).glob("*token*") if file.is_file())
        return {str(file): sha256_of(file)[:16] for file in paths}


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRow:
    """The outcome of filtering and converting one row, as far as it does not depend on other rows."""

    source: str
    origin: str
    reason: str | None = None  # why it is dropped; None: it is kept
    problem: str = ""  # the error message of a malformed row
    key: bytes = b""  # digest for deduplication: of rows with equal keys only the first is kept
    question: bytes = b""  # digest of `Conversation.question`
    line: bytes = b""  # the line to write
    num_tokens: int = 0  # of a chat as its template renders it, where chats are joined


def prepare(config: PrepareConfig, *, on_rows: Callable[[int], object] = lambda count: None) -> Card:
    """Writes OUTPUT/train.jsonl, validation.jsonl and card.json.

    Rows are `{id, source, source_id, ...}` with `messages` and `tools`, `prompt`, or `text`; the id is a hash of the
    conversation and the source's own id. A row's split depends only on a hash of its first question, so that all that
    asks the same is in one split. Memory: about 100 bytes per conversation, and a few thousand rows.

    If OUTPUT was prepared before with the same config from the same files, nothing is done.

    Args: on_rows: called with the number of rows processed so far.
    Raises: BadInput as `iter_rows`, if OUTPUT is any other folder, if no row is left for training, or if rows are to be
        split and all ask the same first question.
    """
    with OwnedFolder(config.output, command=COMMAND, settings=config.recorded()) as folder:
        try:
            return prepared_before(config) or _written(config, folder.path, on_rows)
        except OSError as error:
            raise BadInput(f"{config.output}: cannot be written: {error.strerror or error}") from error


def _written(config: PrepareConfig, folder: Path, on_rows: Callable[[int], object]) -> Card:
    """Write the data set into the folder, its card last."""
    tally = _Tally([source.called for source in read_sources(config.sources)])
    excluded = _questions_of(config.exclude)
    digests, questions = set[bytes](), set[bytes]()
    splits = {split: {"rows": 0} for split in SPLITS}
    rows = iter_rows(config.sources, num_rows=config.num_rows, seed=config.seed)
    with ExitStack() as stack:
        paths = [stack.enter_context(replacing(folder / f"{split}.jsonl")) for split in SPLITS]
        files = [stack.enter_context(path.open("wb")) for path in paths]
        joiners = [ChatJoiner(config.join_tokens, seed=config.seed) if config.join_tokens else None for _ in SPLITS]

        def write(split: int, lines: Iterable[bytes]) -> None:
            for line in lines:
                files[split].write(line)
                splits[SPLITS[split]]["rows"] += 1

        for row in in_order(partial(judge, config=config), rows, num_workers=config.num_workers):
            is_validation = int.from_bytes(row.question[:8], "big") < config.validation_share * 2**64
            reason = row.reason or _reason_beside_others(row, excluded, digests)
            tally.count(row, reason)
            if reason is None:
                questions |= {row.question} if len(questions) < 2 else set()
                joiner = joiners[is_validation]
                write(is_validation, [row.line] if joiner is None else joiner.add(row.line, row.num_tokens))
            if tally.num_read % ROWS_AT_A_TIME == 0:
                on_rows(tally.num_read)
        for split, joiner in enumerate(joiners):
            write(split, joiner.rest() if joiner else ())
        on_rows(tally.num_read)
        num_refused = sum(counts[REFUSED] for counts in tally.counts.values())
        if 2 * num_refused > tally.num_read:
            raise BadInput(f"{tally.examples[REFUSED][0]} ({num_refused} of {tally.num_read} rows are refused)")
        num_kept = sum(counts["kept"] for counts in tally.counts.values())
        if config.validation_share and num_kept > 1 and len(questions) == 1:
            what = "rows are split by it: use validation_share=0 and validate on a file of other rows"
            raise BadInput(f"all {num_kept} rows that are kept ask the same first question, and {what}")
        if not splits["train"]["rows"]:
            raise BadInput(f"no row is left for training: {tally.in_words()}")
    card = tally.card(splits, config)
    write_card(folder, card)
    return card


def prepared_before(config: PrepareConfig) -> Card | None:
    """The card of an OUTPUT that this config wrote before; None if there is none. Raises BadInput as `prepare`."""
    check_owner(config.output, command=COMMAND)
    card = read_card(Path(config.output))
    if card is not None:
        check_unchanged(card, config=config.recorded(), files=config.files(), output=Path(config.output))
    return card


class _Tally:
    """Counts rows that are kept and dropped, by source and reason; remembers the origins of some dropped rows."""

    def __init__(self, sources: list[str]):
        for source in sources:
            if sources.count(source) > 1:
                raise BadInput(f"sources: two are named {source}; give each its own `name`")
        self.counts: dict[str, Counter[str]] = {source: Counter() for source in sources}
        self.examples: dict[str, list[str]] = {}
        self.num_read = 0

    def count(self, row: JudgedRow, reason: str | None) -> None:
        self.num_read += 1
        self.counts[row.source][reason or "kept"] += 1
        if reason is not None and len(self.examples.setdefault(reason, [])) < NUM_EXAMPLES:
            self.examples[reason].append(row.problem or row.origin)

    def card(self, splits: dict[str, dict[str, int]], config: PrepareConfig) -> Card:
        total = _row_counts(sum(self.counts.values(), Counter()))
        sources = {source: _row_counts(counts) for source, counts in self.counts.items()}
        examples = dict(sorted(self.examples.items()))
        return Card(total.read, total.kept, total.dropped, sources, examples, splits, config.files(), config.recorded())

    def in_words(self) -> str:
        """All counts in one line, with an example."""
        counts = sum(self.counts.values(), Counter()).most_common()
        words = ", ".join(f"{count} {reason}" for reason, count in counts)
        reason = next((reason for reason, _ in counts if reason in self.examples), None)
        return f"{self.num_read} read, {words}" + (f"; for example {self.examples[reason][0]}" if reason else "")


def _row_counts(counts: Counter[str]) -> RowCounts:
    dropped = {reason: count for reason, count in sorted(counts.items()) if reason != "kept"}
    return RowCounts(counts.total(), counts["kept"], dropped)


def judge(row: Row, config: PrepareConfig) -> JudgedRow:
    """Filter and convert a row, independently of other rows, so that several processes can share the work."""
    judged = JudgedRow(source=row.source, origin=row.origin)
    try:
        conversation = conversation_of(of_log(row))
    except BadInput as error:
        return replace(judged, reason="malformed", problem=str(error))
    reason = reason_to_drop(conversation, config.filters)
    if reason is not None:
        return replace(judged, reason=reason)
    num_tokens, tokenizer = 0, None if config.tokenizer is None else _tokenizer(config.tokenizer)
    if config.join_tokens and not (tokenizer and tokenizer.chat_template):
        raise BadInput(f"tokenizer {config.tokenizer}: has no chat template, which join_tokens needs")
    if tokenizer is not None and "messages" in conversation.data and tokenizer.chat_template:
        try:
            text = rendered(chat_of(conversation.data, row.origin), tokenizer, origin=row.origin)
            num_tokens = len(tokenizer(text, add_special_tokens=False).input_ids) if config.join_tokens else 0
        except UnusableRow as error:
            return replace(judged, reason=REFUSED, problem=str(error))
    own_id = row.data.get("id")
    written: dict[str, Any] = {"id": conversation.id(own_id), "source": row.source}
    written |= {} if own_id is None else {"source_id": str(own_id)}
    written |= {"truncated": True} if conversation.truncated else {}
    try:
        line = (json.dumps(written | conversation.data, ensure_ascii=False, default=str) + "\n").encode()
    except UnicodeEncodeError:  # JSON can hold half of a surrogate pair; UTF-8 and tokenizers cannot
        return replace(judged, reason="half_character")
    return replace(
        judged,
        key=turns_digest([*conversation.turns, ("tools", conversation.tools)]),
        question=turns_digest(conversation.question),
        line=line,
        num_tokens=num_tokens,
    )


def _reason_beside_others(row: JudgedRow, excluded: frozenset[bytes], digests: set[bytes]) -> str | None:
    """Why a row is dropped given the earlier rows; None: it is kept."""
    if row.question in excluded:
        return "excluded"
    if row.key in digests:
        return "duplicate"
    digests.add(row.key)
    return None


def _questions_of(specs: str | list[str | dict[str, Any]] | None) -> frozenset[bytes]:
    """Digests of the first user turns of rows that have `prompt`, `messages`, or `turns` (a list of texts)."""
    questions = set()
    for row in iter_rows(specs) if specs else ():
        turns = row.data.get("turns")
        first = {"prompt": turns[0]} if isinstance(turns, list) and turns else of_request(row.data)
        questions.add(turns_digest(conversation_of(replace(row, data=first)).question))
    return frozenset(questions)


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise BadInput(f"tokenizer {name}: cannot be loaded: {one_line(error)}") from error
