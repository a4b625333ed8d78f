"""What `headstart eval` does between its options and its report: load the suites, measure, write."""

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from ...base.doing import doing
from ...base.errors import BadInput, printable
from ...base.terminal import PlainConsole
from ...engines.servers.how_to_serve import how_to_serve, under_adapter
from ...eval.decoding.draft_setting import DraftSetting, drafts_tree, named_tree
from ...eval.measurement.measure import Row, measure_all
from ...eval.measurement.result import Result
from ...eval.measurement.resume import BEFOREHAND, BatchStore, identity, settings_key
from ...eval.measurement.step_times import verify_cost
from ...eval.proof.config import MeasureConfig
from ...eval.proof.runner import Contender
from ...eval.report.console import failure_words, lossless_warnings, show, training_warnings
from ...eval.report.page import write_page
from ...eval.report.recommendation import best_deployable, conclude
from ...eval.report.results.document import build_report, write_report
from ...eval.report.results.drafter_words import drafter_words
from ...eval.suites.named import check_named, load_named, parse_suite
from ...eval.suites.prompts import (
    ChatOptions,
    NoUsablePrompt,
    Suite,
    check_rows,
    distinct_names,
    file_names,
    load_suite,
    prompt_rows,
)
from ...targets.chat.rows import variables_in
from ...targets.target import Target
from ...targets.weights.served_adapter import is_checkpoint
from .eval_drafts import NamedDrafter, WantedDrafts


class WantedSuites:
    """What the command line asks to be measured on."""

    def __init__(
        self,
        prompts: Sequence[str],
        named: Sequence[str],
        folder: Path,
        *,
        system: str | None,
        thinking: str,
        told: str = "",
        turns: str = "own",
    ):
        """Raises BadInput before anything is loaded.

        Args: folder: where the files of named suites are. told: variables for the chat template, as JSON; or empty.
        """
        if not prompts and not named:
            raise BadInput("nothing to measure on: give at least one --prompts or --suite")
        if thinking not in ("", "on", "off"):
            raise BadInput(f"--thinking {thinking}: expected on or off")
        if turns not in ("own", "recorded"):
            raise BadInput(f"--turns {turns}: expected own or recorded")
        variables = variables_in(told, "--chat-template-kwargs")
        self.prompts, self.named, self.folder = prompts, [parse_suite(spec) for spec in named], folder
        self.chat = ChatOptions(system, thinking == "on" if thinking else None, variables, turns == "recorded")

    def check(self, *, limit: int | None) -> None:
        """Raises BadInput on files that cannot be read, before a target is loaded, which may take minutes."""
        distinct_names([file_names(path) for path in self.prompts])
        for path in self.prompts:
            check_rows(prompt_rows(path), limit=limit)
        for spec in self.named:
            check_named(spec, limit=limit)

    def load(self, target: Target, *, max_new_tokens: int, limit: int | None, under: str = "") -> list[Suite]:
        """All of them; those without a prompt that can be asked too, as long as another has one.

        Args: under: the name of the target's adapter, which the suites' names then have."""
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "limit": limit, "chat": self.chat}
        suites, names = list[Suite](), [file_names(path) for path in self.prompts]
        for path in self.prompts:
            try:
                suites.append(load_suite(path, target, **how))
            except NoUsablePrompt as error:
                suites.append(error.suite)
        for spec in self.named:
            suites.append(load_named(spec, target, folder=self.folder, **how))
            part = "" if limit is None else f", first {limit}"
            names.append([f"{spec.name}{part}", *([f"{spec.name}={spec.path}{part}"] if spec.path else [])])
        for suite, name in zip(suites, distinct_names(names), strict=True):
            suite.name = f"{name} under {under}" if under else name
        if not any(suite.prompts or suite.scripts for suite in suites):
            raise NoUsablePrompt(suites[0])
        template = target.tokenizer.chat_template or ""
        warn_of_thinking(self.chat, template)
        for suite in suites:
            if template and suite.questions and suite.template_hash is None:
                warn(
                    f"{suite.name}: rows of `prompt` are continued as plain text; for answers to them as by a server's "
                    "chat, give `messages` or `turns`, which go through the target's chat template"
                )
        return suites


def warn_of_thinking(chat: ChatOptions, template: Any) -> None:
    """Says that --thinking changes nothing, where the chat template does not read it."""
    if chat.thinking is not None and "enable_thinking" not in str(template):
        warn("the target's chat template does not read enable_thinking: --thinking changes nothing")


@contextmanager
def telling_how_to_go_on() -> Iterator[None]:
    """Ctrl-C and SIGTERM end with a line on how to go on, and exit code 130."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        warn("stopped; what was measured is kept: the same command goes on behind it")
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def warn(problem: str) -> None:
    print(f"headstart: {printable(problem)}", file=sys.stderr)


@dataclass(frozen=True)
class EvalRun:
    """Every drafter on every suite, at every batch size and with every tree that it drafts."""

    target: Target
    drafters: Sequence[NamedDrafter]
    suites: Sequence[Suite]
    config: MeasureConfig
    batch_sizes: Sequence[int]
    drafts: WantedDrafts
    store: BatchStore

    def measure(self) -> tuple[list[Result], list[Row]]:
        """The results, and the rows of rounds.jsonl."""
        configs = [replace(self.config, batch_size=size) for size in self.batch_sizes]
        # a tree that a drafter does not draft, another one does: `WantedDrafts.load`
        drafts = [
            (named, tree)
            for named, tree in product(self.drafters, self.drafts.trees)
            if drafts_tree(self.target, named.drafter, tree)
        ]
        measured = {}
        for suite, config in product(self.suites, configs):
            contenders = [
                Contender(named.name, named.drafter, self.setting(named, suite, config, tree), named.training)
                for named, tree in drafts
            ]
            names = ", ".join(dict.fromkeys(drafter_words(contender.name) for contender in contenders))
            where = suite.name if config.batch_size == 1 else f"{suite.name}, {config.batch_size} at a time"
            with doing(f"measuring {names} on {where}", -(-len(suite.prompts) // config.batch_size)) as tick:
                results = measure_all(
                    self.target, contenders, suite.filled(config.batch_size), config, on_batch=tick, store=self.store
                )
            for draft, result in zip(drafts, results, strict=True):
                measured[draft[0].name, id(suite), config.batch_size, draft[1]] = result
        order = product(self.drafters, self.suites, configs, self.drafts.trees)
        keys = [(named.name, id(suite), config.batch_size, tree) for named, suite, config, tree in order]
        whole = [measured[key] for key in keys if key in measured]
        return [result for result, _ in whole], [row for _, rows in whole for row in rows]

    def setting(self, named: NamedDrafter, suite: Suite, config: MeasureConfig, tree_name: str) -> DraftSetting:
        """The setting with its tree; of a chain with what it costs to verify one more token, where that is to be
        minded: as a killed measurement had it, where there was one."""
        length = named.length or (config.setting.num_draft_tokens if config.setting else None)
        num_nodes, cost = self.drafts.tree_nodes, self.drafts.verify_cost
        tree = named_tree(tree_name, self.target, named.drafter, num_nodes=num_nodes, num_draft_tokens=length)
        setting = named.setting(config) if tree is None else DraftSetting(tree_name, tree.depth, tree)
        if not cost or "chain" not in tree_name or not named.drafter.estimates or not suite.prompts:
            return setting
        if cost != "measured":
            return replace(setting, verify_cost=float(cost))
        cost_of = [named.name, identity(named.drafter), setting.num_draft_tokens]
        key = settings_key(self.target, suite, {**asdict(config), "verify_cost_of": cost_of})
        record = self.store.get(key, BEFOREHAND)
        if record is None:
            longest = max(suite.prompts, key=len)
            measured = verify_cost(self.target, named.drafter, setting, longest, config, context=len(longest))
            record = {"verify_cost": measured}
            self.store.add(key, BEFOREHAND, record)
        return replace(setting, verify_cost=record["verify_cost"])


def report_all(
    target: Target,
    results: list[Result],
    rounds: list[Row],
    output: Path,
    *,
    specs: Mapping[str, str],
    window: str = "",
    verbose: bool = False,
) -> None:
    """Write the report, as figures and as a page, and show it. Raises BadInput if every prompt failed.

    Args: specs: of each drafter's name in the results, what `--drafter` takes. window: `--draft-window`."""
    if not any(result.num_prompts for result in results):
        first = results[0].failed[0]
        raise BadInput(f"nothing could be measured: {first.row}: {first.reason}")
    for problem in [*training_warnings(results), *lossless_warnings(results), *failure_words(results)]:
        warn(problem)
    report = build_report(target, results)
    best = best_deployable(report.results)
    commands: list[str] = []
    if best and best.drafter in specs:
        spec, length, has_tree = specs[best.drafter], best.num_draft_tokens, "chain" not in best.tree
        state = "" if best.adapter is None else best.adapter.path
        served, adapter = (state, "") if state and is_checkpoint(state) else (target.name, state)
        commands = how_to_serve(spec, length, has_tree=has_tree, target=served, window=window)
        commands = under_adapter(commands, adapter)
    conclusion = conclude(report.results, commands)
    write_report(output, report, rounds)
    show(report, conclusion, write_page(output, report, conclusion), PlainConsole(), verbose=verbose)
