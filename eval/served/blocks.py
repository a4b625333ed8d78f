"""A head in the server that will serve it: blocks of questions with drafts and without in turns, kept on disk."""

import asyncio
import hashlib
import json
import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from ... import __version__
from ...base.errors import BadInput
from ...engines.servers.address import Address
from ...engines.servers.counters import Counters, samples, started_in
from ...engines.servers.engine import ServerEngine
from ...engines.servers.process import ServerProcess
from ...engines.servers.registry import engine_at
from ...targets.target import Target
from ..measurement.resume import BatchStore
from ..suites.prompts import FailedPrompt
from .figures import Record, Slo, record_of, repetition, side_figures, speedup
from .load import Asker, Load, run_block, warm_up
from .questions import Question, origins_of
from .served_result import DRAFTS_TOO, WITHOUT, ServedResult, ServerAcceptance
from .text_check import PromptCheck, check_texts

A, B = 0, 1  # without drafts, with them


@dataclass(frozen=True)
class ServedSide:
    """A server to ask. where: its URL, or None: it is started with a command, without its address. name: of the model;
    empty: that of the target, or of the only one that it serves. option: that named it."""

    where: str | None
    command: Sequence[str] = ()
    name: str = ""
    option: str = "--server"
    target: str = ""

    @property
    def words(self) -> str:
        return self.where or shlex.join(self.command)


@dataclass(frozen=True)
class ServedDrafts:
    """drafter: as reports call it. sides: without drafts and with them. baseline: what the first drafts with. weights:
    what identifies those of target and drafters, as a folder is the same when others are written to it."""

    drafter: str
    num_draft_tokens: int | None
    sides: tuple[ServedSide, ServedSide]
    baseline: str = WITHOUT
    weights: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServedConfig:
    """settings: of every question, as the API has them. num_repeats: pairs of blocks. patience: seconds without a byte
    after which a question has failed. at_once: both servers are up together. seed: of arrivals alone: sampled
    answers are others in every block, and vLLM draws a question with a seed by itself, slower than those without."""

    loads: Sequence[Load]
    max_new_tokens: int = 128
    temperature: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    num_repeats: int = 4
    seed: int = 0
    slo: Slo | None = None
    patience: float = 600.0
    at_once: bool = True

    def order(self) -> list[int]:
        """A B B A A B B A ...: what drifts steadily meets both sides alike."""
        return [side for repeat in range(self.num_repeats) for side in ((A, B) if repeat % 2 == 0 else (B, A))]

    def asked_settings(self) -> dict[str, Any]:
        told = {"max_tokens": self.max_new_tokens, "temperature": self.temperature, **self.settings}
        return {**told, "stream": True, "stream_options": {"include_usage": True}}


class Running:
    """The two servers of a measurement: attached to, or started when they are asked first."""

    def __init__(self, engine: ServerEngine, drafts: ServedDrafts, config: ServedConfig, stack: ExitStack):
        self.engine, self.drafts, self.config, self.stack = engine, drafts, config, stack
        self.askers: dict[int, Asker] = {}
        self.processes: dict[int, ServerProcess] = {}

    def asker(self, which: int) -> Asker:
        """What asks a side, once it is ready. Raises BadInput if it does not come up or serves another model."""
        side, config = self.drafts.sides[which], self.config
        if which in self.askers:
            return self.askers[which]
        if side.where is None and not config.at_once:
            for other in list(self.processes):  # memory for one alone
                self.processes.pop(other).close()
                del self.askers[other]
        how: dict[str, Any] = {"settings": config.asked_settings(), "optional": dict(self.engine.extra)}
        how |= {"salted": self.engine.is_salted, "patience": config.patience}
        if side.where is not None:
            address = Address.of(side.where, where=side.option)
        else:
            process = ServerProcess(side.command, name=self.engine.title, option=self.engine.option)
            self.processes[which] = self.stack.enter_context(process)
            address, how["is_gone"] = Address.of(process.url, where="--engine"), process.is_gone
        self.askers[which] = Asker(address.serving(side.name, target=side.target), **how)
        return self.askers[which]


def measure_in_servers(
    engine: ServerEngine,
    drafts: ServedDrafts,
    questions: Sequence[Question],
    config: ServedConfig,
    *,
    store: BatchStore,
    on_block: Callable[[], object] = lambda: None,
    load_target: Callable[[], Target | None] = lambda: None,
) -> list[ServedResult]:
    """A result per load. Blocks that `store` holds are not measured again.

    Args: load_target: for texts that differ. Raises: BadInput if a server does not come up, ends, or answers nothing;
    what was measured stays in the store.
    """
    order, records = config.order(), dict[tuple[int, int], Record]()
    keys = [key_of(engine, drafts, questions, config, load) for load in config.loads]
    blocks = [(turn, number) for number in range(len(config.loads)) for turn in range(len(order))]
    if not config.at_once:
        blocks.sort()  # all loads of a turn, so that servers are started once a turn
    with ExitStack() as stack:
        servers = Running(engine, drafts, config, stack)
        if config.at_once and any(store.get(keys[number], turn) is None for turn, number in blocks):
            for which in (A, B):
                servers.asker(which)
        run = secrets.token_hex(8)  # no prompt profits from one of an earlier measurement
        for turn, number in blocks:
            which, load = order[turn], config.loads[number]
            kept = store.get(keys[number], turn)
            if kept is None:
                asker = servers.asker(which)
                if number not in asker.warm:
                    asker.warm.add(number)
                    warm_up(asker, questions, load)
                seed, salt = config.seed + turn // 2, f"{run}-{number}-{turn // 2}"
                kept = measured_block(engine, asker, questions, load, drafts.num_draft_tokens, seed=seed, salt=salt)
                store.add(keys[number], turn, kept)
            records[turn, number] = kept
            on_block()
    found = []
    for number, load in enumerate(config.loads):
        sides = [[records[turn, number] for turn, which in enumerate(order) if which == side] for side in (A, B)]
        found.append(result_of(engine, drafts, questions, config, load, *sides, load_target=load_target))
    return found


def measured_block(
    engine: ServerEngine,
    asker: Asker,
    questions: Sequence[Question],
    load: Load,
    num_draft_tokens: int | None,
    *,
    seed: int,
    salt: str,
) -> Record:
    """Raises BadInput if nothing is answered."""
    before = engine.counters(asker.address)
    block = asyncio.run(run_block(asker, questions, load, seed=seed, salt=salt))
    after = engine.counters(asker.address)
    if not any(one.answer for one in block.asked):
        raise BadInput(f"{block.asked[0].failure}; no question was answered")
    told = engine.counted_in([one.answer for one in block.asked if one.answer], num_draft_tokens)
    counted = told if before is None or after is None else after - before
    prompts = {str(one.number): one.answer.prompt_ids for one in block.asked if one.answer}
    known = {"counters": counted and asdict(counted), "prompts": prompts}
    known["server"] = {"engine": engine_at(asker.address).name, **asdict(asker.address.facts())}
    return {**record_of(block), **known, "started": started(asker), "model": asker.address.model}


def started(asker: Asker) -> float | None:
    """When the server was started, by its own clock; None: it does not say so."""
    return started_in(samples(asker.address.read("/metrics") or ""))


def result_of(
    engine: ServerEngine,
    drafts: ServedDrafts,
    questions: Sequence[Question],
    config: ServedConfig,
    load: Load,
    baseline: Sequence[Record],
    drafted: Sequence[Record],
    *,
    load_target: Callable[[], Target | None],
) -> ServedResult:
    origins = origins_of(questions)
    ratio, ends = speedup(load, baseline, drafted, origins)
    plain, ours = prompts_in(baseline), prompts_in(drafted)
    sides = [side_figures(records, load, config.slo) for records in (baseline, drafted)]
    if not all(side.keeps_up for side in sides):
        ratio, ends = None, (None, None)  # of queues, which are as long as the block was
    texts = None
    if config.temperature == 0:
        is_narrow = not all("--dtype float32" in side.words.replace("=", " ") for side in drafts.sides)
        texts = check_texts(questions, baseline, drafted, {**plain, **ours}, load_target, is_narrow=is_narrow)
    return ServedResult(
        engine=engine.name,
        drafter=drafts.drafter,
        num_draft_tokens=drafts.num_draft_tokens,
        load=load,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        num_questions=len(questions),
        order="".join("AB"[side] for side in config.order()),
        at_once=config.at_once,
        speedup=ratio,
        speedup_ci95=ends,
        baseline=sides[A],
        drafted=sides[B],
        acceptance=acceptance_of(drafted),
        prompts=PromptCheck.of(questions, {**plain, **ours}),
        texts=texts,
        failed=failed_in(questions, [*baseline, *drafted]),
        slo=config.slo,
        commands=[side.words for side in drafts.sides],
        baseline_drafter=drafts.baseline,
        doubts=[*doubts(drafts, baseline, drafted), *other_prompts(questions, plain, ours)],
        models=[records[-1]["model"] for records in (baseline, drafted)],
        repetition=repetition(load, baseline, drafted, origins),
    )


def prompts_in(records: Sequence[Record]) -> dict[int, list[int] | None]:
    """By question: the ids of its prompt, as the server read it; None: it does not say."""
    told = [(int(number), ids) for record in records for number, ids in record["prompts"].items()]
    return {**dict.fromkeys(number for number, _ in told), **{number: ids for number, ids in told if ids}}


def other_prompts(
    questions: Sequence[Question], plain: Mapping[int, list[int] | None], ours: Mapping[int, list[int] | None]
) -> list[str]:
    """The doubt that the two servers read other prompts, if they do."""
    other = [number for number, ids in ours.items() if ids and plain.get(number) not in (None, ids)]
    if not other:
        return []
    what = f"{len(other)} prompts ({questions[min(other)].row} first) are other ids in the two servers"
    return [f"{what}: they have other chat templates or settings, so the speedup is between different work"]


def doubts(drafts: ServedDrafts, baseline: Sequence[Record], drafted: Sequence[Record]) -> list[str]:
    """What makes it doubtful that the two servers differ by their drafts alone, in words."""
    found = list[str]()
    counted = [record["counters"] for record in baseline if record["counters"]]
    if drafts.baseline == WITHOUT and any(one["num_drafted"] or one["num_accepted"] > 0 for one in counted):
        found.append(
            f"{DRAFTS_TOO}, so two ways of drafting are compared: are --server and --baseline-server exchanged? If "
            "not, name its way with --baseline-drafter"
        )
    if drafts.sides[A].where is None:
        return found
    models = [sorted({record["model"] for record in side}) for side in (baseline, drafted)]
    if models[A] != models[B]:
        found.append(f"the servers name their models differently: {', '.join(models[A])} and {', '.join(models[B])}")
    before, behind = baseline[-1]["server"], drafted[-1]["server"]
    for fact, what in (("engine", "engines"), ("version", "versions"), ("max_model_len", "longest contexts")):
        if None not in (both := (before[fact], behind[fact])) and both[0] != both[1]:
            found.append(f"the servers have other {what}: {both[0]} and {both[1]}")
    for side, records in zip(drafts.sides, (baseline, drafted), strict=True):
        if len({record["started"] for record in records}) > 1:
            found.append(f"{side.words} was started anew meanwhile: if it drafts otherwise, measure into a new folder")
    return found


def acceptance_of(records: Sequence[Record]) -> ServerAcceptance | None:
    """None where a block has no counters, or those of a server that was started anew within it."""
    counted = [Counters(**record["counters"]) for record in records if record["counters"] is not None]
    whole = sum(counted[1:], counted[0]) if counted else Counters()
    if len(counted) < len(records) or not whole.num_rounds or not all(one.is_possible for one in counted):
        return None
    rates = [None if rate is None else round(rate, 4) for rate in whole.acceptance_rate]
    length = whole.acceptance_length
    return ServerAcceptance(None if length is None else round(length, 4), rates, whole.num_rounds, whole.num_accepted)


def failed_in(questions: Sequence[Question], records: Sequence[Record]) -> list[FailedPrompt]:
    """Questions without an answer, each once."""
    found: dict[int, str] = {}
    for record in records:
        for failure in record["failures"]:
            number, _, reason = failure.removeprefix("question ").partition(": ")
            found.setdefault(int(number), reason)
    return [FailedPrompt(number, questions[number].row, reason) for number, reason in sorted(found.items())]


def key_of(
    engine: ServerEngine, drafts: ServedDrafts, questions: Sequence[Question], config: ServedConfig, load: Load
) -> str:
    """A hash of everything that the figures of a load depend on, as far as we know it: of files that commands name,
    when they were changed."""
    asked = [[question.path, question.body] for question in questions]
    files = [word for side in drafts.sides for word in side.command if os.path.isfile(word)]
    parts = [
        __version__,
        engine.name,
        asdict(drafts),
        [os.stat(file).st_mtime for file in files],
        asked,
        asdict(load),
        config.asked_settings(),
        config.num_repeats,
        config.seed,
        config.at_once,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
