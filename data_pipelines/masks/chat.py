"""Tokenises rows (chats, prompt and response, text, or token ids): token ids, segments and an exact loss mask."""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.errors import BadInput, first_line
from ...base.jsonl import naming_faults
from ...targets.chat.messages import Message
from ...targets.chat.prompts import RENDER_ERRORS, plain_ids
from ...targets.chat.rows import UnusableRow, answer_in, chat_of, instruction_in, is_chat, known_keys
from ...targets.chat.written_ids import KEY, WROTE, Written, joined, written_sequences
from ...targets.images.pictures import UnreadablePicture, sources_in
from ...targets.images.reader import reader_of
from ..rows.config import DataConfig
from ..rows.parallel import in_order
from ..rows.row_shapes import SHAPES, is_cut
from ..rows.samples import FROM_ROW, FROM_TEXT, NOT_ITS_IDS, SEGMENTS, Sample
from ..rows.sources import Row
from .assistant_masks import Chat
from .segments import Span, TokenTable, segment_tokens, token_table
from .traces import split_sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODING = 3  # the version of what this file makes of a row; raised with every change that gives a row other samples
NO_ANSWER = "a prompt without an answer to train on; `headstart data regenerate` has the target write answers"


def encode_rows(
    rows: Iterable[Row],
    tokenizer: "PreTrainedTokenizerBase",
    config: DataConfig,
    *,
    counts: Counter[str],
    is_used: Callable[[Sample], bool] = lambda sample: True,
    problems: list[str] | None = None,
    vocab_size: int | None = None,
) -> Iterator[Sample]:
    """Yield the used samples of rows, in order. Adds to `counts` the numbers of rows `kept` and `dropped`, and of those
    kept the numbers `cut` (at an end, or by a whole sequence that is too long) and `split`.

    A row is dropped if no sample of it is used, if no supervised token remains, if it is a chat whose tool calls the
    template omits, or, with `too_long: drop`, if it has more than `max_length` tokens; and if `encode_row` refuses it,
    which is counted under `Refused.reason` too.

    Args: problems: gets the first of the refused rows' problems.
    Raises: BadInput, naming the first, if most rows are refused, and at once on faulty `input_ids`: a program wrote
        them, for another target.
    """
    num_rows = num_refused = 0
    problem = ""
    encode = partial(encode_or_refuse, tokenizer=tokenizer, config=config, vocab_size=vocab_size)
    for encoded in in_order(encode, rows, num_workers=config.num_workers):
        num_rows += 1
        if isinstance(encoded, Refused):
            num_refused, problem = num_refused + 1, problem or encoded.problem
            counts[encoded.reason] += 1
            encoded = []
        samples = list(filter(is_used, encoded))
        counts["kept" if samples else "dropped"] += 1
        counts["cut"] += bool(samples) and any(sample.num_cut for sample in encoded)
        counts["split"] += bool(samples) and any(sample.is_piece for sample in encoded)
        yield from samples
    if 2 * num_refused > num_rows:
        raise BadInput(problem if num_rows == 1 else f"{problem} ({num_refused} of {num_rows} rows are refused)")
    if problem and problems is not None:
        problems.append(problem)


@dataclass(frozen=True)
class Refused:
    """A row that gives no samples. reason: in a few words, under which such rows are counted. problem: names the row's
    file and line."""

    reason: str
    problem: str


def encode_or_refuse(
    row: Row, tokenizer: "PreTrainedTokenizerBase", config: DataConfig, vocab_size: int | None = None
) -> list[Sample] | Refused:
    """Encodes a row as `encode_row` does, but a row that it refuses ends nothing. Raises: BadInput on faulty
    `input_ids`."""
    try:
        return encode_row(row, tokenizer, config, vocab_size)
    except UnusableRow as error:
        return Refused("refused by the chat template", str(error))
    except UnreadablePicture as error:
        return Refused("a picture is missing or broken", f"{row.origin}: {error}")
    except BadInput as error:
        if row.data.get("input_ids") is not None:
            raise
        return Refused("malformed", str(error))


def encode_row(
    row: Row, tokenizer: "PreTrainedTokenizerBase", config: DataConfig, vocab_size: int | None = None
) -> list[Sample]:
    """Tokenise a row into samples of at most `config.max_length` tokens: none, one, the pieces of a long row, or one
    for each sequence of `written_ids` or of a chat.

    The first of these shapes that the row has is used; keys with the value None count as missing:
      `input_ids` + `prompt_length`    token ids; the first prompt_length are not supervised
      `written_ids`                    the ids that the target wrote, beside the text in one of the other shapes; the
                                       answers that it wrote are supervised. See targets/chat/written_ids.py, also for
                                       when the text is tokenised instead
      `messages` or `conversations`    the tokenizer's chat template, with `tools`; the assistant turns are supervised,
                                       of a row with `written_answers` those that the target wrote
      `prompt` + `response` or `completion`, `instruction` (+ `input`) + `output` or `response`, `question` + `answer`
                                       plain text without a chat template; the response and its eos are supervised.
                                       An instruction, its input and its output are separated by blank lines
      `text`                           all tokens but a leading bos are supervised

    Each supervised text stands behind the ids of its prompt alone, as in serving; a chat becomes several samples where
    its later prompts have other tokens. If the row has `truncated: true` or `finish_reason: length`, as rows of
    `headstart data regenerate` may, its last answer has no end token.

    A row with pictures has the target's own image tokens where they are. It is never split, and gives no sample where
    its maximum length cuts a picture.

    Args: vocab_size: of the target's table, which all ids must lie in; None: that of the tokenizer's largest id.
    Raises: UnreadablePicture; BadInput, naming the row's origin, if it has another shape, a value of the wrong type or
        no answer, if the chat template refuses it, if the tokenizer has none, or if an id is outside the table.
    """
    table = token_table(tokenizer)
    with naming_faults(row.data, row.origin):
        sequences, source = ids_of(row, table, config, vocab_size or table.size)
        pictures = pictures_in(row)
    if pictures and config.too_long == "split":
        config = replace(config, too_long="cut")
    markers = _markers(table, config)
    samples: list[Sample] = []
    num_lost = 0  # tokens of whole sequences that `max_length` leaves nothing of
    for sequence in sequences[-1:] if config.turns == "last" else sequences:
        input_ids, spans = sequence.input_ids, sequence.spans
        if all(start == end for start, end in spans):
            start = " ".join(str(tokenizer.decode(input_ids[:80])).split())[:80]
            raise BadInput(f"{row.origin}: no token is supervised in {start!r}: {NO_ANSWER}")
        segments = segment_tokens(input_ids, spans, table, markers)
        supervised = np.array([name in config.supervised for name in SEGMENTS])[segments]  # [T]
        if config.turns == "last":
            for start, end in spans[:-1]:
                supervised[start:end] = False
        whole = Sample.of(input_ids, supervised.tolist(), segments=segments.tolist())
        whole.source = source
        fitted = _fitted(whole, table, config)
        fitted = _with_pictures(fitted, pictures, row, tokenizer) if pictures else fitted
        num_lost += len(whole) if whole.loss_mask.any() and not fitted else 0
        samples += fitted
    samples[-1:] = [replace(last, num_cut=last.num_cut + num_lost) for last in samples[-1:]]
    return samples


def pictures_in(row: Row) -> tuple[str, ...]:
    """The pictures in a row's messages, in order. Raises BadInput if one is in no known form."""
    data = known_keys(row.data)
    return sources_in(chat_of(data, row.origin).messages) if is_chat(data) else ()


def _with_pictures(samples: list[Sample], pictures: tuple[str, ...], row: Row, tokenizer: Any) -> list[Sample]:
    """The samples with those of the row's pictures that are in them; without those that end inside one."""
    if (reader := reader_of(tokenizer)) is None:
        raise UnusableRow(row.origin, "the target reads no pictures")
    within = ((sample, reader.within(sample.input_ids.tolist(), pictures)) for sample in samples)
    return [replace(sample, pictures=found) for sample, found in within if found is not None]


def ids_of(row: Row, table: TokenTable, config: DataConfig, vocab_size: int) -> tuple[list[Written], str]:
    """The token ids that a row gives, with the spans of the target's texts, and where they are from; none if the
    template omits its tool calls. The rule is that of `encode_row`, which also says what is raised."""
    data, origin, source = known_keys(row.data), row.origin, FROM_TEXT
    if "input_ids" in data and "prompt_length" in data:
        ids, spans = _check_tokens(data["input_ids"], data["prompt_length"], origin, vocab_size=vocab_size)
        return [_without_end(Written(ids, spans), data, table)], FROM_ROW
    if KEY in data:
        sequences = written_sequences(
            data,
            _said(data, origin),
            table.tokenizer,
            fingerprint=table.fingerprint,
            vocab_size=vocab_size,
            origin=origin,
        )
        if sequences:
            return sequences, FROM_ROW
        source = NOT_ITS_IDS
    sequences = _encode_text(data, origin, table, config)
    if not sequences:
        return [], source
    largest = max(max(one.input_ids, default=0) for one in sequences)
    if largest >= vocab_size:
        token = f"{largest} ({table.text(largest)!r})"
        raise BadInput(f"{origin}: the tokenizer gives the id {token}, outside the target's table of {vocab_size}")
    last = _without_end(sequences[-1], data, table)
    if source == FROM_TEXT and (markers := _markers(table, config)) and _ends_in_trace(data, origin):
        last = _without_closing(last, markers[1], table)
    return [*sequences[:-1], last], source


def _said(data: dict[str, Any], origin: str) -> list[Message]:
    """The messages whose ids `written_ids` has; those of a plain text are its prompt and its answer."""
    if is_chat(data):
        return chat_of(data, origin).messages
    return [{"role": "user", "content": data.get("prompt")}, {"role": "assistant", "content": answer_in(data)}]


def _without_end(written: Written, data: dict[str, Any], table: TokenTable) -> Written:
    """The sequence; up to the end token of its last answer, if that answer was cut at a maximum length."""
    if not is_cut(data) or not written.spans:
        return written
    ids, (*earlier, (start, end)) = written.input_ids, written.spans
    end -= end > start and ids[end - 1] in table.special
    return Written(ids[:end], [*earlier, (start, end)])


def _ends_in_trace(data: dict[str, Any], origin: str) -> bool:
    """Whether a chat's last answer was cut at a maximum length before its trace was closed."""
    if not is_cut(data) or not is_chat(data):
        return False
    last = chat_of(data, origin).messages[-1]
    return bool(last.get("reasoning_content")) and not last.get("content")


def _without_closing(written: Written, closing: str, table: TokenTable) -> Written:
    """The sequence without the marker and the blanks that a template writes behind every trace."""
    ids, (*earlier, (start, end)) = written.input_ids, written.spans
    text = ""
    while end > start and closing.endswith((table.text(ids[end - 1]) + text).strip()):
        end, text = end - 1, table.text(ids[end - 1]) + text
    return Written(ids[:end], [*earlier, (start, end)])


def _fitted(whole: Sample, table: TokenTable, config: DataConfig) -> list[Sample]:
    """The samples of a tokenised row, shortened as `config.too_long` says; none without a supervised token."""
    limit = config.max_length
    if len(whole) <= limit:
        return [whole] if whole.loss_mask.any() else []
    if config.too_long == "drop":
        return []
    if config.too_long == "split":
        return split_sample(whole, max_length=limit, text_of=table.text)
    parts = {name: getattr(whole, name)[:limit] for name in ("input_ids", "segments", "loss_mask")}
    cut = replace(whole, **parts, num_cut=len(whole) - limit)
    return [cut] if cut.loss_mask.any() else []


def _with_answers(sequences: list[Written], numbers: Collection[int]) -> list[Written]:
    """The sequences with the spans of these answers alone, counted from 0; without those that have none of them."""
    count = itertools.count()
    kept = [Written(one.input_ids, [span for span in one.spans if next(count) in numbers]) for one in sequences]
    return [one for one in kept if one.spans]


def _markers(table: TokenTable, config: DataConfig) -> tuple[str, str] | None:
    return (config.think_markers[0], config.think_markers[1]) if config.think_markers else table.markers


def _encode_text(data: dict[str, Any], origin: str, table: TokenTable, config: DataConfig) -> list[Written]:
    """The token ids of a row's text, and the spans of the target's texts, in order; none without any token."""
    answer = answer_in(data)
    if is_chat(data):
        return _encode_chat(data, origin, table, config)
    if "prompt" in data and answer is not None:
        return _encode_answer(data["prompt"], answer, origin, table)
    if "instruction" in data and answer is not None:
        return _encode_answer(instruction_in(data, origin), answer, origin, table)
    if "text" in data and not isinstance(data["text"], str):
        raise BadInput(f"{origin}: `text` should be text, got {type(data['text']).__name__}")
    if "text" in data:
        ids = plain_ids(table.tokenizer, data["text"])
        is_begun = ids[:1] == [table.tokenizer.bos_token_id]
        return [Written(ids, [(int(is_begun), len(ids))])] if ids else []
    if "prompt" in data or "instruction" in data:
        raise BadInput(f"{origin}: {NO_ANSWER}")
    known = f"{SHAPES}, or `input_ids` + `prompt_length`"
    raise BadInput(f"{origin}: unknown row shape with keys {', '.join(data) or '(none)'}; known are {known}")


def _check_tokens(input_ids: Any, prompt_length: Any, origin: str, *, vocab_size: int) -> tuple[list[int], list[Span]]:
    if not isinstance(input_ids, list) or any(type(token) is not int for token in input_ids):
        raise BadInput(f"{origin}: `input_ids` should be a list of whole numbers")
    for position, token in enumerate(input_ids):
        if not 0 <= token < vocab_size:
            raise BadInput(f"{origin}: input_ids[{position}] is {token}, outside the vocabulary of {vocab_size}")
    if type(prompt_length) is not int or not 0 <= prompt_length <= len(input_ids):
        raise BadInput(f"{origin}: `prompt_length` should be between 0 and {len(input_ids)}, got {prompt_length!r}")
    return input_ids, [(prompt_length, len(input_ids))]


def _encode_answer(prompt: Any, answer: Any, origin: str, table: TokenTable) -> list[Written]:
    """Token ids of prompt, answer and eos; prompt and answer are tokenised separately, as in serving."""
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise BadInput(f"{origin}: prompt and response should be text; give a chat as `messages`")
    eos = table.tokenizer.eos_token_id
    return joined([(plain_ids(table.tokenizer, prompt), [*table.ids(answer), *([] if eos is None else [eos])])])


def _encode_chat(data: dict[str, Any], origin: str, table: TokenTable, config: DataConfig) -> list[Written]:
    """Token ids of a chat, and the spans of its assistant turns; none if the template omits tool calls, because the
    head would then learn empty answers."""
    row = chat_of(data, origin, defaults=config.chat_template_kwargs)
    if not getattr(table.tokenizer, "chat_template", None):
        problem = f"tokenizer of {table.tokenizer.name_or_path} has no chat template"
        raise BadInput(f"{origin}: {problem}; give plain `text` or `prompt`/`response` rows")
    if not row.is_answered:
        raise BadInput(f"{origin}: {NO_ANSWER}")
    try:
        chat = Chat(table.tokenizer, row.tools, row.variables, _markers(table, config))
        messages = chat.placed(row.messages, origin)
        sequences = [] if chat.leaves_out_calls(messages) else chat.sequences(messages)
        if WROTE not in data or not sequences:
            return sequences
        num_answers = sum(message["role"] == "assistant" for message in messages)
        if sum(len(one.spans) for one in sequences) != num_answers:
            why = f"`{WROTE}` counts {num_answers} answers, of which the template's generation blocks leave some out"
            raise UnusableRow(origin, why)
        return _with_answers(sequences, data[WROTE])
    except BadInput:
        raise
    except RENDER_ERRORS as error:
        raise UnusableRow(origin, f"the chat template refuses this row: {first_line(error)}") from error
