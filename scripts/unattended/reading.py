"""Reads answered rows with target and head: how typical the answers are, and how many rounds drafting them takes."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ...configs.errors import BadInput
from ...configs.jsonl import read_appended
from ...data_pipelines.config import DataConfig
from ...data_pipelines.loader import collate
from ...data_pipelines.masks.chat import encode_row
from ...data_pipelines.sources import Row
from ...data_pipelines.storage.samples import Sample
from ...data_pipelines.storage.shard_file import StoredSample
from ...data_pipelines.traffic import ServedChat, Traffic, read_traffic
from ...eval.decoding import generate
from ...eval.measurement.metrics import expected_acceptance
from ...heads.base import ChainStarts, DraftBatch, DraftHead
from ...heads.decoders.cpu.products import pack_linears
from ...heads.loading import release_memory
from ...heads.registry import load_head
from ...heads.target import Target
from ...train.validation import prompt_of
from .foreign import LOWEST, OWN, POSITIONS, OwnAnswers, is_foreign, standardised, temperatures_for, typicality
from .held_out import NEW, OLD, Keyed, Parts, split_traffic, validation_of
from .journal import RefitJournal, known
from .session import RefitSettings, Session

WINDOW = 64  # rows that are sorted by length into batches
BATCH_TOKENS = 4096  # tokens per batch, padding included
AT_ONCE = 8  # rows of a forward that several heads draft
ASKED = 8  # prompts that the target answers itself
ANSWER_TOKENS = 64  # maximum length of these answers
READINGS = "readings.jsonl"  # in data/: the readings with the old head


@dataclass(frozen=True)
class RowReading:
    """What reading a row gave."""

    key: str  # of the row
    typicality: dict[str, float]  # of its answers by temperature; empty if it was not tested
    tokens: int = 0  # of the answers
    covered: int = 0  # of these, in the head's draft vocabulary
    rounds: int = 0  # that decoding the answers with the head takes
    committed: int = 0  # tokens in these rounds
    problem: str = ""  # why the row cannot be read


Sampled = tuple[str, ServedChat, Sample]  # a row with its key and its tokens


def num_tokens(sampled: Sampled) -> int:
    return len(sampled[2])


ReadBatch = tuple[Sequence[Sampled], DraftBatch]  # rows, and what the target has read of them


@dataclass(frozen=True)
class RowReader:
    """Reads rows with a target and a head."""

    target: Target
    head: DraftHead
    max_length: int  # of a row, in tokens; longer ones are cut
    judges: bool = False  # whether the typicality of new rows is computed

    def sample(self, row: ServedChat) -> Sample:
        """The tokens of a row and which of them are answers. Raises BadInput if the row cannot be read."""
        config = DataConfig(train="", max_length=min(self.max_length, self.target.max_positions))
        samples = encode_row(Row(row.row, row.origin), self.target.tokenizer, config, self.target.vocab_size)
        if not samples:
            raise BadInput(f"{row.origin}: nothing of its answers is within {config.max_length} tokens")
        return max(samples, key=lambda sample: int(sample.loss_mask.sum()))  # of several sequences, the one with most

    def sampled(self, rows: Iterable[tuple[str, ServedChat]]) -> tuple[list[Sampled], list[RowReading]]:
        """Rows, given with their keys, with their samples; and the readings of those that cannot be read."""
        samples: list[Sampled] = []
        refused = []
        for key, row in rows:
            try:
                samples.append((key, row, self.sample(row)))
            except BadInput as error:
                refused.append(RowReading(key, {}, problem=str(error).removeprefix(f"{row.origin}: ")))
        return samples, refused

    def read(self, rows: Sequence[tuple[str, ServedChat]]) -> Iterator[list[RowReading]]:
        """Reads rows, given with their keys, in batches; the order changes within a window."""
        for start in range(0, len(rows), WINDOW):
            samples, refused = self.sampled(rows[start : start + WINDOW])
            if refused:
                yield refused
            samples.sort(key=num_tokens)
            while samples:
                size = max(BATCH_TOKENS // num_tokens(samples[-1]), 1)  # the longest first
                batch, samples = samples[-size:], samples[:-size]
                yield self.drafted([self.forward(batch)])

    def forwards(self, rows: Keyed) -> list[ReadBatch]:
        """The target's forwards over the rows that can be read, AT_ONCE in each, to be drafted by several heads."""
        samples = sorted(self.sampled(rows.items())[0], key=num_tokens)
        return [self.forward(samples[i : i + AT_ONCE]) for i in range(0, len(samples), AT_ONCE)]

    @torch.no_grad()
    def forward(self, rows: Sequence[Sampled]) -> ReadBatch:
        """One forward of the target, with the features that the head reads."""
        laid = collate([[StoredSample(sample)] for *_, sample in rows]).to(self.target.device)
        return rows, laid.filled(self.head.read_target)

    @torch.no_grad()
    def drafted(self, forwards: Iterable[ReadBatch]) -> list[RowReading]:
        """The readings of all rows of some forwards with the head."""
        readings, num_draft = [], min(self.head.num_depths, self.head.default_draft_tokens)
        for rows, batch in forwards:
            drafted = self.head.loss(batch, num_depths=num_draft)
            for i, (key, row, _) in enumerate(rows):
                starts = ChainStarts(drafted.starts.positions[i : i + 1], drafted.starts.valid[i : i + 1])
                counted = expected_acceptance(starts, drafted.hits[i : i + 1], num_draft_tokens=num_draft)
                at = batch.loss_mask[i].nonzero()[:, 0]  # [N] positions of the answers
                tokens = batch.input_ids[i, at]
                # without the last token: in an answer that was cut it is an end that the target did not write
                temperatures = temperatures_for(row.temperature) if self.judges and key.startswith(NEW) else ()
                typical = self._typicality(batch.output.post_norm[i, at[:-1] - 1], tokens[:-1], temperatures)
                ids = self.head.vocabulary
                covered = tokens if ids is None else tokens[torch.isin(tokens, ids.to_target)]
                counts = (len(tokens), len(covered), counted.num_rounds, counted.num_committed)
                readings.append(RowReading(key, typical, *counts))
        return readings

    def _typicality(self, states: Tensor, tokens: Tensor, temperatures: Sequence[float]) -> dict[str, float]:
        """The typicality of an answer by temperature. Args: states: [N, D] from which its tokens [N] are predicted."""
        if not temperatures:
            return {}
        sums = torch.zeros(len(temperatures), 2, device=states.device)
        for part, following in zip(states.split(POSITIONS), tokens.split(POSITIONS), strict=True):
            logits = self.target.logits(part).float()  # [N, V]
            sums += torch.stack([typicality(logits, following, temperature) for temperature in temperatures])
        pairs = zip(temperatures, sums, strict=True)
        return {str(temperature): round(standardised(parts), 3) for temperature, parts in pairs}

    @torch.no_grad()
    def own_answers(self, rows: Sequence[ServedChat], *, seed: int, check_stop: Callable[[], None]) -> list[OwnAnswers]:
        """The typicality of answers that the target samples itself, to the prompts of some rows, by temperature of OWN.

        Args: check_stop: called before each temperature; it may raise SystemExit.
        """
        asked = (prompt_of(sample) for *_, sample in self.sampled((row.origin, row) for row in rows)[0])
        prompts = [prompt for prompt in asked if len(prompt) + ANSWER_TOKENS <= self.target.max_positions][:ASKED]
        own = []
        for temperature in OWN if prompts else ():
            check_stop()
            source = torch.Generator(self.target.device).manual_seed(seed)
            how = {"max_new_tokens": ANSWER_TOKENS, "temperature": temperature, "generator": source}
            answers = generate(self.target, None, prompts, **how).token_ids
            values = []
            for prompt, answer in zip(prompts, answers, strict=True):
                ids = torch.tensor([prompt + answer], device=self.target.device)
                states = self.target.read_texts(ids).post_norm[0, len(prompt) - 1 : -1]
                values += self._typicality(states, ids[0, len(prompt) :], [max(temperature, LOWEST)]).values()
            own.append(OwnAnswers(temperature, values))
        return own


def readings_in(path: Path) -> dict[str, RowReading]:
    """The readings of a file, by key. An incomplete last line, left by a kill, is ignored."""
    return {row["key"]: RowReading(**row) for row in read_appended(path)}


def append(path: Path, readings: Sequence[RowReading]) -> None:
    """Append readings to a file, over an incomplete last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.write("".join(json.dumps(asdict(reading)) + "\n" for reading in readings).encode())


class RefitRun(Session[RefitSettings, RefitJournal]):
    """A run of `headstart refit`: its rows, and the target and the old head that read them."""

    command, journal_type = "headstart refit", RefitJournal

    @cached_property
    def traffic(self) -> Traffic:
        """The new rows; --temperature takes the place of theirs."""
        traffic, given = read_traffic(self.settings.traffic), self.settings.temperature
        if given is None:
            return traffic
        return replace(traffic, rows=[replace(row, temperature=given) for row in traffic.rows])

    @cached_property
    def replay(self) -> list[ServedChat]:
        """The old rows."""
        return read_traffic(self.settings.replay).rows if self.settings.replay else []

    @cached_property
    def sides(self) -> tuple[Parts, Parts]:
        """The new rows and the old ones, split; the same in every start."""
        return split_traffic(self.traffic.rows, self.replay, seed=self.settings.seed)

    @cached_property
    def target(self) -> Target:
        settings = self.settings
        how = {"dtype": settings.dtype, "device": settings.device, "adapter": settings.adapter or None}
        target = Target.load(settings.target, **how)
        pack_linears(target.base)
        return target

    @cached_property
    def reader(self) -> RowReader:
        """What reads rows with the old head."""
        return self.reader_of(self.settings.head)

    def reader_of(self, head: str) -> RowReader:
        """What reads rows with a head."""
        return RowReader(self.target, load_head(head, self.target), self.settings.max_length)

    def release(self) -> None:
        """Frees the target's memory, since training loads its own."""
        for name in ("target", "reader"):
            self.__dict__.pop(name, None)
        release_memory()

    def read(self, reader: RowReader, rows: Keyed, name: str, *, until: float | None = None) -> dict[str, RowReading]:
        """The readings of rows, by key. Each is appended to data/NAME, and those that are there are not read again.

        Args: until: second of the budget after which reading stops; None: all rows are read.
        """
        path = self.data / name
        done = readings_in(path)
        for readings in reader.read([(key, row) for key, row in rows.items() if key not in done]):
            self.check_stop()
            append(path, readings)
            done |= {reading.key: reading for reading in readings}
            if until is not None and self.clock.used > until:
                break
        return {key: reading for key, reading in done.items() if key in rows}

    @cached_property
    def readings(self) -> dict[str, RowReading]:
        """The readings with the old head, once they are all taken, without rows that could not be read."""
        readings = readings_in(self.data / READINGS)
        return {key: reading for key, reading in readings.items() if not reading.problem}

    def own(self, rows: Keyed) -> Keyed:
        """The rows that were read and whose answers the target wrote; old rows are not tested."""
        served, own = known(self.journal.foreign).served, self.journal.own

        def is_own(key: str) -> bool:
            return key.startswith(OLD) or not is_foreign(self.readings[key].typicality, served, own)

        return {key: row for key, row in rows.items() if key in self.readings and is_own(key)}

    @cached_property
    def validation(self) -> Keyed:
        """The rows for validation, of both sides."""
        new, old = self.sides
        return {**validation_of(self.own(new.rest)), **validation_of(old.rest)}
