"""The decoding loop: draft, verify, commit, with caches for target and drafter and one copy to the host per round."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.errors import BadInput
from ...heads.drafting.drafter import Drafter, Reading
from ...heads.drafting.trees import Tree
from ...targets.images.pictures import pictures_of, with_pictures
from ...targets.target import Target
from .engine import DecodeState, Engine
from .replay import Stopwatch, to_device
from .sampling import Sampling
from .stopping import Stop
from .verify import AcceptRule


@dataclass
class Round:
    """The record of one propose-verify-commit over a batch; lists have an entry per row."""

    seconds: float  # wall time, device synchronised
    num_drafted: int  # tokens proposed per row, all nodes of a tree; 0 for the prefill and the baseline
    num_accepted: list[int]  # drafted tokens that the target confirmed
    num_committed: list[int]  # bonus token included, tokens after an end token excluded; 0: the row had ended before
    num_emitted: list[int]  # committed tokens within max_new_tokens
    draft_seconds: float = 0.0  # the drafter's share: committing and drafting
    verify_seconds: float = 0.0  # the target's share: its forward, logits and choice of tokens
    paths: list[list[int]] = field(default_factory=list)  # for trees: each row's accepted nodes, by index
    num_offered: list[int] = field(default_factory=list)  # drafted tokens that the target verified; 0 in ended rows
    estimates: list[list[float]] = field(default_factory=list)  # of each draft's acceptance, if they were requested


class Generation(NamedTuple):
    """token_ids: the new tokens of each row, without the prompt. rounds: the prefill, then every round."""

    token_ids: list[list[int]]
    rounds: list[Round]


def as_rows(input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """A list of rows, from one prompt or several as a tensor [T] or [B, T] or as lists. Raises BadInput if empty."""
    rows: Any = input_ids.tolist() if isinstance(input_ids, Tensor) else input_ids
    rows = [rows] if len(rows) and isinstance(rows[0], int) else rows
    rows = [with_pictures(list(row), pictures_of(row)) for row in rows]
    if not rows or not all(rows):
        raise BadInput("empty prompt: at least one token per row is needed")
    return rows


def check_request(rows: Sequence[list[int]], *, target: Target, max_new_tokens: int) -> None:
    """Raises BadInput on unknown token ids, a prompt and answer beyond the context, and max_new_tokens below 1."""
    if max_new_tokens < 1:
        raise BadInput(f"max_new_tokens {max_new_tokens}: expected at least 1")
    for i, row in enumerate(rows):
        wrong = next((token for token in row if not 0 <= token < target.vocab_size), None)
        if wrong is not None:
            raise BadInput(f"prompt {i}: token id {wrong} is outside the vocabulary of {target.vocab_size}")
        if len(row) + max_new_tokens > target.num_positions:
            asked = f"{len(row)} tokens + {max_new_tokens} new"
            raise BadInput(f"prompt {i}: {asked} exceed the context of {target.context}")


@dataclass
class Texts:
    """The rows of a batch on the host: prompts, new tokens, and which have ended."""

    prompts: list[list[int]]
    max_new_tokens: int
    stop: Stop

    def __post_init__(self) -> None:
        self.new: list[list[int]] = [[] for _ in self.prompts]
        self.ended = [False] * len(self.prompts)

    @property
    def num_committed(self) -> int:
        """Tokens of the longest row, prompt included."""
        return max(len(prompt) + len(new) for prompt, new in zip(self.prompts, self.new, strict=True))

    def add(self, row: int, tokens: list[int]) -> list[int]:
        """Commit a row's tokens up to its end, emit up to max_new_tokens; returns the committed ones."""
        if self.ended[row]:
            return []
        end = self.stop.first(self.new[row], tokens)
        self.new[row] += tokens[:end][: self.max_new_tokens - len(self.new[row])]
        self.ended[row] = end is not None or len(self.new[row]) >= self.max_new_tokens
        return tokens[:end]

    def commit(self, accepted: list[int], chosen: list[list[int]], *, num_drafted: int) -> Round:
        """`add` each row's accepted tokens and bonus. Times are set later."""
        committed = Round(0.0, num_drafted, [], [], [])
        for i, (num, tokens) in enumerate(zip(accepted, chosen, strict=True)):
            num_before, tokens = len(self.new[i]), self.add(i, tokens[: num + 1])
            committed.num_accepted.append(min(num, len(tokens)))
            committed.num_committed.append(len(tokens))
            committed.num_emitted.append(len(self.new[i]) - num_before)
        return committed


@torch.no_grad()
def generate(
    target: Target,
    drafter: Drafter | None,
    input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    num_draft_tokens: int | None = None,
    tree: Tree | None = None,
    eos_token_ids: Iterable[int] | None = None,
    stop_strings: Sequence[str] = (),
    accept: str | AcceptRule = "exact",
    verify_cost: float | None = None,
    steps: str = "eager",
    generator: torch.Generator | None = None,
) -> Generation:
    """Generate with speculation; the text is the target's own, token for token at temperature 0.

    Args:
        drafter: proposes tokens; None for the autoregressive baseline.
        input_ids: one or several prompts, of any lengths. max_new_tokens: per row, exact.
        temperature, top_k, top_p: as in `Sampling`, for all tokens.
        num_draft_tokens: K per round; None: the drafter's default.
        tree: draft trees of this shape instead of chains; then K is its depth.
        eos_token_ids: tokens that end a row (emitted); None: the target's own.
        stop_strings: texts that end a row; the token that completes one is its last.
        accept: a name in `verify.ACCEPT_RULES`, or a rule.
        verify_cost: of one more token, in rounds that verify none: only drafts that pay are verified. None: all.
        steps: as `Engine` takes it. generator: the source of randomness at temperature > 0.

    Raises: BadInput on empty prompts, unknown tokens, prompts beyond the context, or a K that cannot be drafted.
    """
    rows = as_rows(input_ids)
    check_request(rows, target=target, max_new_tokens=max_new_tokens)
    engine = Engine(
        target,
        drafter,
        batch_size=len(rows),
        max_length=max(map(len, rows)) + max_new_tokens,
        num_draft_tokens=num_draft_tokens,
        tree=tree,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        accept=accept,
        verify_cost=verify_cost,
        steps=steps,
        generator=generator,
    )
    engine.compiles_layers = False  # takes seconds for each shape, too long for one batch
    stop = Stop.of(target, eos_token_ids=eos_token_ids, strings=stop_strings)
    return decode(engine, rows, max_new_tokens=max_new_tokens, stop=stop)


def decode(engine: Engine, rows: list[list[int]], *, max_new_tokens: int, stop: Stop) -> Generation:
    """Decode one batch of checked prompts with an engine of that batch size; see `generate`."""
    decoding = Decoding(engine, rows, max_new_tokens=max_new_tokens, stop=stop)
    while not decoding.is_done:
        decoding.advance()
    return decoding.generation


class Decoding:
    """The decoding of one batch of checked prompts by an engine of that batch size, a round at a time."""

    def __init__(self, engine: Engine, rows: list[list[int]], *, max_new_tokens: int, stop: Stop):
        self.engine, self.watch = engine, Stopwatch(engine.target.device)
        self.texts = Texts(rows, max_new_tokens, stop)
        self.rounds: list[Round] = []
        self.state: DecodeState | None = None
        self.commit_seconds = 0.0  # the drafter's time for reading the prompts

    @property
    def is_done(self) -> bool:
        return bool(self.rounds) and all(self.texts.ended)

    @property
    def num_new(self) -> int:
        """The fewest new tokens of any row that has not ended; max_new_tokens if all have."""
        rows = zip(self.texts.new, self.texts.ended, strict=True)
        return min((len(new) for new, ended in rows if not ended), default=self.texts.max_new_tokens)

    @property
    def generation(self) -> Generation:
        return Generation(self.texts.new, self.rounds)

    @torch.no_grad()
    def advance(self) -> None:
        """Read the prompts, or decode another round."""
        if self.state is None:
            round_, self.state, self.commit_seconds = prefill(self.engine, self.texts, self.watch)
        else:
            round_, self.state = run_round(self.engine, self.texts, self.state, self.watch)
            round_.seconds += self.commit_seconds  # counts as part of the first round, as the first token came before
            round_.draft_seconds += self.commit_seconds
            self.commit_seconds = 0.0
        self.rounds.append(round_)


def right_padded(rows: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of any lengths as a tensor [B, T], and their lengths [B]."""
    longest = max(map(len, rows))
    tokens = to_device([row + [0] * (longest - len(row)) for row in rows], device)
    return tokens, to_device([len(row) for row in rows], device)


class Prefilled(NamedTuple):
    """round: the target's part, which gives each row's first token. commit_seconds: the drafter's time for prompts."""

    round: Round
    state: DecodeState
    commit_seconds: float


def prefill(engine: Engine, texts: Texts, watch: Stopwatch) -> Prefilled:
    """Read the prompts: the target and the drafter."""
    started = watch.now()
    tokens, num_valid = right_padded(texts.prompts, engine.target.device)
    pictures = [pictures_of(prompt) for prompt in texts.prompts]
    output, last = engine.prefill(tokens, num_valid, pictures=pictures)  # last [B, 1]: committed, not yet read
    next_tokens = torch.cat([tokens[:, 1:], last], 1).scatter(1, num_valid[:, None] - 1, last)  # [B, T]
    first = texts.commit([0] * len(last), last.tolist(), num_drafted=0)
    first.seconds = first.verify_seconds = watch.now() - started
    prefilled = watch.now()
    start, shift = torch.zeros_like(num_valid), engine.cache.shift
    read = engine.commit_prompts(Reading(tokens, next_tokens, output, start, num_valid, shift=shift))
    return Prefilled(first, DecodeState(read, last, num_valid), watch.now() - prefilled)


def run_round(engine: Engine, texts: Texts, state: DecodeState, watch: Stopwatch) -> tuple[Round, DecodeState]:
    """One propose-verify-commit of all rows: its record, and the next state. Rows that have ended do not change."""
    engine.begin_round(texts.num_committed)
    engine.rehearse(state)
    started, marks = watch.now(), [watch.mark()]
    # Draft: the drafter commits the last reading, then drafts
    proposal = engine.draft(state.read)
    marks.append(watch.mark())
    # Verify: one forward over the last committed token and the drafted ones
    accepted, committed, tokens, output, path, num_offered = engine.verify(state, proposal, texts.ended)
    marks.append(watch.mark())
    nodes = engine.no_tokens if path is None else path
    results = [accepted[:, None], state.start[:, None], committed, tokens, nodes]
    on_host = torch.cat(results, 1).cpu().split([part.shape[1] for part in results], 1)  # the host read
    # Commit
    num_accepted, start, chosen, read_tokens, nodes = on_host
    round_ = texts.commit(num_accepted[:, 0].tolist(), chosen.tolist(), num_drafted=engine.num_drafted)
    round_.num_offered = num_offered
    if path is not None:
        round_.paths = [row[:num] for row, num in zip(nodes.tolist(), round_.num_accepted, strict=True)]
    if proposal.confidence is not None:
        round_.estimates = proposal.confidence.tolist()
    num_valid, grows = accepted + 1, torch.tensor([not ended for ended in texts.ended])
    if any(texts.ended):
        num_valid = num_valid * grows.to(accepted.device)
    read = None
    if engine.drafts_on_host:
        num_read, shift = (num_accepted[:, 0] + 1) * grows, engine.cache.shift
        read = Reading(read_tokens, chosen, output, start[:, 0], num_read, shift=shift)
    elif engine.drafter is not None:
        read = Reading(tokens, committed, output, state.start, num_valid, shift=engine.cache.shift)
    round_.draft_seconds, round_.verify_seconds = watch.between(*marks)
    round_.seconds = time.perf_counter() - started
    return round_, DecodeState(read, committed.gather(1, accepted[:, None]), state.start + num_valid)
