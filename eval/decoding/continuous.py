"""Continuous batching: where rows have ended, the next prompts are read and take their places in the batch."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from ...targets.images.pictures import pictures_of
from ...targets.target import Target
from .engine import DecodeState, Engine
from .loop import Texts, right_padded
from .replay import HostCopy, default_steps, to_device
from .stopping import Stop

READ_TOGETHER = 8  # on a GPU, where reading a few prompts takes as long as a round, one prompt for so many rows at once
LAUNCHED_WORK = 3 * 10**12  # weights times tokens; prompts with more take a GPU longer to compute than to launch
COMPILED_FROM = 10_000  # rounds; in fewer, the seconds that compiling takes for each shape are estimated not to pay


@dataclass(frozen=True)
class Launched:
    """Tokens [n, 1] that the device chooses, in a round or behind prompts. places: by row, where its token is."""

    tokens: HostCopy
    places: dict[int, int]


@dataclass(frozen=True)
class WaitingPrompt:
    """A prompt that waits for its answer. key: identifies the answer."""

    key: str
    prompt: list[int]


def answer_continuously(
    target: Target,
    waiting: deque[WaitingPrompt],
    *,
    batch_size: int,
    max_new_tokens: int,
    stop: Stop | None = None,
) -> Iterator[tuple[str, list[int]]]:
    """Greedy answers in the order in which they end, equal to those of `generate` for each prompt alone up to rounding.

    Args:
        waiting: the queue of prompts, which is emptied as they are read; the caller may append while it iterates.
        batch_size: rows that decode together.
        max_new_tokens: per answer.

    Yields: the key and the new tokens of each.
    """
    while waiting:
        # sets the capacity of this pass; longer prompts that are appended later wait for the next pass
        longest = max(len(asked.prompt) for asked in waiting)
        num_rows = min(batch_size, len(waiting))
        yield from _Pass(target, longest, num_rows, max_new_tokens, stop or Stop.of(target)).run(waiting)


class _Pass:
    """One batch of fixed capacity, run until no waiting prompt fits into it."""

    def __init__(self, target: Target, longest: int, batch_size: int, max_new_tokens: int, stop: Stop):
        self.longest, self.max_new_tokens = longest, max_new_tokens
        max_length, steps = longest + max_new_tokens, default_steps(target.device)
        num_read = most_read(target.device, batch_size)
        self.reader = Engine(target, None, batch_size=num_read, max_length=max_length, steps=steps)
        if not target.has_states:
            self.reader.recorded_prompts = LAUNCHED_WORK // sum(weight.numel() for weight in target.model.parameters())
        self.engine = Engine(target, None, batch_size=batch_size, max_length=max_length, steps=steps)
        self.texts = Texts([[] for _ in range(batch_size)], max_new_tokens, stop)
        self.texts.ended = [True] * batch_size
        self.keys: list[str | None] = [None] * batch_size  # None: an idle row
        self.last = torch.zeros(batch_size, 1, dtype=torch.long, device=target.device)  # as in `DecodeState`
        self.start = [0] * batch_size  # its position; known before the token is. 0 in idle rows, which read few slots
        self.last_read: list[list[int]] = []  # the prompts whose keys and values the reader holds
        self.read: deque[tuple[int, WaitingPrompt]] = deque()  # those that no row has taken, with their places in it
        self.first = self.last[:0]  # [n, 1] the tokens behind what the reader holds
        self.first_on_host = HostCopy(self.first)
        self.launched: deque[Launched] = deque()  # in the device's order; not yet read by the host
        self.is_ahead = launches_ahead(target.device)

    def run(self, waiting: deque[WaitingPrompt]) -> Iterator[tuple[str, list[int]]]:
        most_rounds = len(waiting) * self.max_new_tokens / len(self.keys)
        self.engine.compiles_layers &= most_rounds >= COMPILED_FROM
        while True:
            self._fill_rows(waiting)
            if all(key is None for key in self.keys):
                return
            self._launch()
            # the device runs the last one meanwhile: of a row that has ended, one token more is decoded, and dropped
            while len(self.launched) > self.is_ahead:
                self._read_tokens(self.launched.popleft())
            for row, key in enumerate(self.keys):
                if key is not None and self.texts.ended[row]:
                    yield key, self._leave(row)

    def _launch(self) -> None:
        """Start a round behind what was launched before, whose tokens the host may not have."""
        engine, state = self.engine, DecodeState(None, self.last, to_device(self.start, self.last.device))
        engine.begin_round(max(self.start) + 1)
        engine.rehearse(state)
        self.last = engine.verify(state, engine.draft(None), self.texts.ended).committed.clone()
        busy = [row for row, key in enumerate(self.keys) if key is not None]
        for row in busy:
            self.start[row] += 1
        self.launched.append(Launched(HostCopy(self.last), {row: row for row in busy}))

    def _read_tokens(self, launched: Launched) -> None:
        tokens = launched.tokens.tolist()
        for row, place in launched.places.items():
            self.texts.add(row, tokens[place])

    def _fill_rows(self, waiting: deque[WaitingPrompt]) -> None:
        """Let prompts that are read take idle rows, and read the next ones where these are too few."""
        idle = deque(row for row, key in enumerate(self.keys) if key is None)
        while idle and (self.read or self._read_next(waiting)):
            joining = [(idle.popleft(), *self.read.popleft()) for _ in range(min(len(idle), len(self.read)))]
            for row, place, asked in joining:
                self._join(row, place, asked)
            self.launched.append(Launched(self.first_on_host, {row: place for row, place, _ in joining}))

    def _join(self, row: int, place: int, asked: WaitingPrompt) -> None:
        """Copy a prompt's keys, values and first token from its place in the reader into a row."""
        if not self.engine.cache.is_filled:  # it is allocated by a batch's first forward: a round of idle rows
            self._launch()
        self.keys[row], self.start[row], self.texts.ended[row] = asked.key, len(asked.prompt), False
        for launched in self.launched:  # for the text that had the row
            launched.places.pop(row, None)
        self.engine.cache.take_row(row, self.reader.cache, place)
        self.last[row] = self.first[place]

    def _read_next(self, waiting: deque[WaitingPrompt]) -> bool:
        """Read the next prompts together, as many as the reader takes; whether there are any."""
        fitting = (asked for asked in waiting if len(asked.prompt) <= self.longest)
        self.read.extend(enumerate(islice(fitting, self.reader.batch_size)))
        if not self.read:
            return False
        for _, asked in self.read:
            waiting.remove(asked)
        prompts = [asked.prompt for _, asked in self.read]
        prompts += prompts[:1] * (self.reader.batch_size - len(prompts))
        tokens, num_valid = right_padded(prompts, self.last.device)
        pictures = [pictures_of(prompt) for prompt in prompts]
        _, self.first = self.reader.prefill(tokens, num_valid, num_kept=self._num_known(prompts), pictures=pictures)
        self.first_on_host, self.last_read = HostCopy(self.first), prompts
        return True

    def _num_known(self, prompts: list[list[int]]) -> int:
        """Tokens with which all begin that lie in the reader's cache already, as chat templates begin alike.

        None with recurrent layers, of which only the state behind all of a prompt is kept, or with pictures, whose
        tokens are alike.
        """
        alike = [*self.last_read, *prompts]
        if not self.last_read or self.engine.target.has_states or any(map(pictures_of, alike)):
            return 0
        return min(min(num_shared(alike[0], prompt) for prompt in alike), min(map(len, prompts)) - 1)

    def _leave(self, row: int) -> list[int]:
        tokens, self.texts.new[row] = self.texts.new[row], []
        self.keys[row], self.start[row] = None, 0
        return tokens


def launches_ahead(device: torch.device) -> bool:
    """Whether a round is launched before the last one's tokens are read."""
    return device.type == "cuda"


def most_read(device: torch.device, num_rows: int) -> int:
    """Prompts that are read together."""
    return max(1, num_rows // READ_TOGETHER) if device.type == "cuda" else 1


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
