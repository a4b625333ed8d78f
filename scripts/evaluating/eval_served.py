"""`headstart eval --engine vllm|sglang|llama-server`, or `--server URL`: what a head saves where it is served."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from ...base.doing import doing
from ...base.errors import BadInput
from ...base.files import remove
from ...base.owned import OwnedFolder
from ...engines.export import export_head, notes, serve_commands
from ...engines.servers.address import Address
from ...engines.servers.engine import DEFAULT_K, LONGEST_MATCH, ServerEngine
from ...engines.servers.registry import SERVER_ENGINES, engine_at
from ...engines.servers.setting import OURS, EngineSetting
from ...eval.drafters.registry import check_window, parse_drafter
from ...eval.measurement.breakdown import learnt_among
from ...eval.measurement.resume import BatchStore
from ...eval.proof.config import check_length
from ...eval.report.results.drafter_words import served_words
from ...eval.report.served_page import ServedReport, show_served, write_served
from ...eval.served.blocks import ServedConfig, ServedDrafts, ServedSide, measure_in_servers
from ...eval.served.figures import Slo
from ...eval.served.load import ARRIVING, Load
from ...eval.served.questions import Questions, unreadable_words
from ...eval.served.served_result import ITS_OWN, WITHOUT, ServedResult
from ...eval.suites.prompts import ChatOptions
from ...targets.dtype import default_dtype
from ...targets.loading import TargetConfig, default_device, load_tokenizer
from ...targets.target import Target
from ...targets.weights.served_adapter import ServedAdapter
from ...targets.weights.stored import fingerprint_of_stored, stored_tensors
from .engine_options import MOST_ROWS, engine_of
from .eval_drafts import own_length, recorded_training
from .eval_run import warn, warn_of_thinking

HEADS = "served_heads"  # the folder in the output for heads as the engine reads them
UNKNOWN, HEADROOM = range(2048), 64  # a prompt whose ids are not known here, and what a template may add
LEAST_RATE = 0.001  # a question in a quarter of an hour


@dataclass(frozen=True)
class WantedServers:
    """What the command line says of servers. engine: with the address of one that drafts, if it runs; baseline_server:
    of one that does not."""

    engine: EngineSetting
    baseline_server: str = ""
    concurrency: Sequence[int] = ()
    rates: Sequence[float] = ()
    slo: str = ""

    @property
    def served_by(self) -> ServerEngine:
        return SERVER_ENGINES[self.engine.name]

    def __post_init__(self) -> None:
        """Raises BadInput on options that do not go together."""
        if self.engine.is_ours:
            told = {"--slo": self.slo, "--concurrency": self.concurrency, "--rate": self.rates}
            if option := next((option for option, value in told.items() if value), None):
                raise BadInput(f"{option}: goes with --engine {' or '.join(SERVER_ENGINES)}, or --server URL")
            return
        if not self.engine.server and not self.served_by.can_start:
            raise BadInput(f"--engine {self.engine.name}: name it with --server URL and --baseline-server URL")
        for rate in self.rates:
            if not LEAST_RATE <= rate < inf:
                raise BadInput(f"--rate {rate}: expected arrivals per second, {LEAST_RATE} or more")
        for number in self.concurrency:
            if not 1 <= number <= MOST_ROWS:
                raise BadInput(f"--concurrency {number}: expected 1 to {MOST_ROWS}")

    def loads(self) -> list[Load]:
        loads = [*map(Load, self.concurrency), *(Load(rate=rate) for rate in self.rates)]
        return loads or [Load()]


def engine_or_running(name: str, python: str, args: str, server: str, baseline_server: str) -> EngineSetting:
    """The engine of the options; of a server without a name, the one that answers there. Raises BadInput."""
    if bool(server) != bool(baseline_server):
        raise BadInput("--server, --baseline-server: give both: one serves with drafts, the other without")
    if server and name == OURS:
        name = engine_at(Address.of(server, where="--server")).name
    return engine_of(name, python, args, server, known=(OURS, *SERVER_ENGINES))


@dataclass(frozen=True, kw_only=True)
class WantedMeasurement:
    """The options of `headstart eval` that a server is measured with."""

    target: str
    dtype: str = ""  # of our own forward of texts that differ; empty: as for our own engine
    device: str = ""
    drafters: Sequence[str] = ()  # a head is one: `head:FOLDER`
    num_draft_tokens: int | None = None
    prompts: Sequence[str]
    limit: int | None = None
    chat: ChatOptions
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)  # more that questions are asked with: top_k, top_p, stop
    repeats: int = 3
    baseline: str = ""  # what the other side drafts with, as a drafter; empty: nothing
    window: str = ""  # of heads, see `--draft-window`
    adapter: ServedAdapter | None = None  # of the target, on both sides

    def __post_init__(self) -> None:
        """Raises BadInput on a K far longer than an answer."""
        for length in (self.num_draft_tokens, *(own_length(spec)[1] for spec in (*self.drafters, self.baseline))):
            if length is not None:
                check_length(length, self.max_new_tokens)


def evaluate_served(
    wanted: WantedServers, asked: WantedMeasurement, output: Path, settings: dict[str, Any], *, overwrite: bool
) -> bool:
    """Measure, write report.json and report.html, and show them. Returns whether no text was found that is not the
    target's own. Raises BadInput."""
    if not wanted.engine.server:  # what it refuses, before anything is asked of the hub
        wanted.served_by.command(wanted.engine.python or wanted.served_by.program, asked.target, [], [])
    with OwnedFolder(output, command="headstart eval", settings=settings) as folder:
        folder.check_settings(settings, finished="report.json", overwrite=overwrite)
        questions = questions_in(asked)
        if questions.num_turns_left:
            warn(f"{questions.num_turns_left} further questions of chats are not asked")
        with BatchStore(folder.path, on_first=folder.keep) as store:
            if num := len(store):
                warn(f"{store.path}: {num} blocks of an unfinished measurement; those of these settings are kept")
            results = measured_in(wanted, asked, folder.path / HEADS, store, questions)
            folder.record(settings)
            report = ServedReport.of(asked.target, results)
            show_served(report, write_served(folder.path, report))
            store.finish()
            remove(folder.path / HEADS)
    return not any(one.texts and one.texts.num_wrong for one in results)


def measured_in(
    wanted: WantedServers,
    asked: WantedMeasurement,
    heads: Path,
    store: BatchStore,
    questions: Questions,
) -> list[ServedResult]:
    """A result per way of drafting and load. Args: heads: the folder for heads as the engine reads them. Raises
    BadInput."""
    engine = wanted.served_by
    config, results = config_of(engine, wanted, asked), list[ServedResult]()
    longest = max(len(question.ids or UNKNOWN) for question in questions.asked) + asked.max_new_tokens + HEADROOM
    compared = drafts_of(engine, wanted, asked, heads, longest=longest)
    warn(size_words(wanted, asked, questions))
    for number, drafts in enumerate(compared):
        what = f"{engine.title}, {served_words(drafts.drafter)}: blocks of questions"
        with doing(what, len(config.loads) * len(config.order())) as tick:
            found = measure_in_servers(
                engine, drafts, questions.asked, config, store=store, on_block=tick, load_target=loader(asked)
            )
        learnt = learnt_by(own_length(asked.drafters[number])[0], questions) if asked.drafters else None
        results += [replace(one, learnt=learnt, unreadable=[*questions.unreadable]) for one in found]
    return results


def learnt_by(spec: str, questions: Questions) -> float | None:
    """The share of the questions that the head of a drafter was trained on; None where that is not known."""
    folder = Path(spec.partition(":")[2])
    folder = folder / "final" if (folder / "final").is_dir() else folder
    if not spec.startswith("head:") or not folder.is_dir():
        return None
    try:
        return learnt_among(recorded_training(f"head:{folder}", spec), questions.texts())
    except BadInput:  # no record of ours
        return None


def config_of(engine: ServerEngine, wanted: WantedServers, asked: WantedMeasurement) -> ServedConfig:
    return ServedConfig(
        loads=wanted.loads(),
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature,
        settings={**engine.neutral, **asked.sampling},
        num_repeats=2 * asked.repeats,
        seed=asked.seed,
        slo=Slo.of(wanted.slo) if wanted.slo else None,
        at_once=wanted.engine.has_room_for_two,
    )


def size_words(wanted: WantedServers, asked: WantedMeasurement, questions: Questions) -> str:
    """What is measured, as factors of the time that it takes."""
    config = config_of(wanted.served_by, wanted, asked)
    factors = {"drafters": len(asked.drafters) or 1, "loads": len(config.loads), "blocks": len(config.order())}
    product = " x ".join(f"{name} {num}" for name, num in (factors | {"questions": len(questions.asked)}).items())
    starts = 2 if config.at_once else config.num_repeats + 1
    told = "" if wanted.engine.server else f"; server starts for each drafter: {starts}"
    return f"to measure: {product} of up to {asked.max_new_tokens} tokens{told}"


def drafts_of(
    engine: ServerEngine, wanted: WantedServers, asked: WantedMeasurement, folder: Path, *, longest: int
) -> list[ServedDrafts]:
    """What is measured. Args: folder: for heads as the engine reads them. longest: tokens of a question and its answer.

    Raises: BadInput."""
    specs, adapter = asked.drafters, asked.adapter
    model, adapting = ("", []) if adapter is None else (adapter.name, engine.adapting(adapter))
    if wanted.engine.server:
        if len(specs) > 1:
            raise BadInput("--server: drafts as it was started to; name at most one --head, for the report")
        before = ServedSide(wanted.baseline_server, name=model, option="--baseline-server", target=asked.target)
        sides = before, ServedSide(wanted.engine.servers[0], name=model, target=asked.target)
        name, length = own_length(specs[0]) if specs else (ITS_OWN, None)
        length = length or asked.num_draft_tokens
        name, weights = f"{name} at K {length}" if length else name, weights_in(name.partition(":")[2])
        return [ServedDrafts(name, length, sides, asked.baseline or WITHOUT, weights=weights)]
    if not specs:
        raise BadInput("nothing to measure: give at least one --head or --drafter")
    check_window(asked.window, *(spec.partition(":")[0] for spec in specs))
    remove(folder)
    slots = max(load.concurrency if load.rate is None else ARRIVING for load in wanted.loads())
    args, found = [*engine.room(slots, longest), *adapting, *shlex.split(wanted.engine.args)], list[ServedDrafts]()
    before = asked.target, list[str]()
    if asked.baseline:
        beside, length = own_length(asked.baseline)
        before = drafting_words(engine, beside, asked, folder / "baseline", length or asked.num_draft_tokens)[:2]
    given = asked.target, own_length(asked.baseline)[0].partition(":")[2], adapter.path if adapter else ""
    for number, spec in enumerate(specs):
        name, length = own_length(spec)
        written = folder / str(number)
        target, words, length = drafting_words(engine, name, asked, written, length or asked.num_draft_tokens)
        sides = [
            ServedSide(None, engine.command(wanted.engine.python or engine.program, path, told, args), name=model)
            for path, told in (before, (target, words))
        ]
        weights = weights_in(*given, name.partition(":")[2], str(written), str(folder / "baseline"))
        windowed = f" window {asked.window}" if asked.window and name.startswith("head:") else ""
        what = f"{name}{windowed} at K {length}", length, (sides[0], sides[1]), asked.baseline or WITHOUT
        found.append(ServedDrafts(*what, weights=(*weights, asked.window)))
    return found


def weights_in(*paths: str) -> tuple[str, ...]:
    """What identifies the weights of those that are folders: all of their bytes, or when other files were written."""

    def identity(folder: Path) -> str:
        try:
            return fingerprint_of_stored(stored_tensors(str(folder)))
        except BadInput:
            return str(max((file.stat().st_mtime for file in folder.rglob("*")), default=0.0))

    return tuple(identity(Path(path)) for path in paths if path and Path(path).is_dir())


def drafting_words(
    engine: ServerEngine, spec: str, asked: WantedMeasurement, folder: Path, length: int | None
) -> tuple[str, list[str], int]:
    """The model that is served with drafts (the target, or a copy with a head in it), what makes it draft, and K."""
    kind, _, argument = spec.partition(":")
    if kind == "ngram":
        most = int(parse_drafter(spec)[1] or LONGEST_MATCH)
        return asked.target, engine.ngram(length or DEFAULT_K, most), length or DEFAULT_K
    if kind == "draft-model":
        return asked.target, engine.draft_model(argument, length or DEFAULT_K), length or DEFAULT_K
    if kind != "head":
        raise BadInput(f"--drafter {spec}: {engine.title} drafts with head:PATH, draft-model:PATH or ngram")
    if (found := engine.head_file(argument, asked.target, length)) is not None:
        if asked.window:
            raise BadInput(f"--draft-window {asked.window}: {engine.title} has none")
        return asked.target, *found
    head = export_head(argument, folder, to=engine.name, target=asked.target, window=asked.window)
    if head.has_adapter:
        raise BadInput(f"--head {argument}: drafts for the target with its adapter: start both servers on that target")
    for note in notes(head):
        warn(f"head {argument}: {note}")
    command = serve_commands(head, str(folder), to=engine.name, target=asked.target).get(engine.name)
    if command is None:
        raise BadInput(f"--head {argument}: {engine.title} does not serve it")
    words = shlex.split(command)
    at = words.index("--model-path") + 1 if "--model-path" in words else words.index("serve") + 1
    drafting, num = words[at + 1 :], head.num_drafted
    return words[at], engine.with_length(drafting, length) if length else drafting, length or num


def questions_in(asked: WantedMeasurement) -> Questions:
    """Raises BadInput."""
    tokenizer = tokenizer_of(asked.target)
    questions = Questions.read(asked.prompts, tokenizer, limit=asked.limit, chat=asked.chat)
    if lost := questions.unreadable:
        warn(unreadable_words(lost))
    if tokenizer is not None:
        warn_of_thinking(asked.chat, tokenizer.chat_template)
    if getattr(tokenizer, "chat_template", None) and any(one.is_plain_text for one in questions.asked):
        warn(
            "rows of `prompt` are continued as plain text; for answers as in a chat, give `messages` or `turns`, which "
            "go through the server's chat template"
        )
    return questions


def tokenizer_of(target: str) -> Any:
    """None, said in a line, where there is none here: the prompts' ids are then not known."""
    try:
        return load_tokenizer(TargetConfig(path=target))
    except BadInput as error:
        warn(f"{error}: whether the server's prompts are ours is not known")
        return None


def loader(asked: WantedMeasurement) -> Callable[[], Target | None]:
    """Loads the target, with its adapter, once, where it can be loaded here."""
    path, device, adapter = asked.target, asked.device or default_device(), asked.adapter and asked.adapter.path

    @cache
    def load() -> Target | None:
        try:
            dtype = asked.dtype or default_dtype(path, device)
            return Target.load(path, dtype=dtype, device=device, adapter=adapter)
        except (BadInput, RuntimeError, MemoryError) as error:
            warn(f"target {path} cannot be loaded here, so differing texts are not proved: {error}")
            return None

    return load
