"""What `headstart eval` does between its options and its report: load the suites, measure, compare, write."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import track

from ..configs.errors import BadInput, printable
from ..configs.terminal import PlainConsole
from ..eval.decoding.draft_setting import DraftSetting
from ..eval.measurement.config import MeasureConfig
from ..eval.measurement.measure import Row, measure_all
from ..eval.measurement.result import Result
from ..eval.measurement.resume import TREE, BatchStore, settings_key
from ..eval.measurement.runner import Contender
from ..eval.measurement.servers.beside import compare_llama_server
from ..eval.measurement.servers.llama_server import PACKAGE, ServerFiles
from ..eval.measurement.servers.served import measure_served
from ..eval.measurement.transformers_baseline import compare_transformers
from ..eval.measurement.tree_search import SHAPED_TREES, drafts_tree, hold_out, named_tree, verify_cost
from ..eval.report.console import lossless_warnings, show, training_warnings
from ..eval.report.document import build_report, write_report
from ..eval.report.page import write_page
from ..eval.suites.named import SuiteSpec, load_named, parse_suite
from ..eval.suites.prompts import ChatOptions, NoUsablePrompt, Suite, distinct_names, file_names, load_suite
from ..heads.chat.rows import variables_in
from ..heads.drafting import StaticTree
from ..heads.target import Target
from .eval_drafts import NamedDrafter, WantedDrafts


@dataclass(frozen=True)
class WantedSuites:
    """What the command line asks to be measured on. folder: where the files of named suites are."""

    prompts: Sequence[str]
    named: Sequence[SuiteSpec]
    folder: Path
    chat: ChatOptions

    @classmethod
    def of(
        cls, prompts: Sequence[str], named: Sequence[str], folder: Path, *, system: str | None, thinking: str, told: str
    ) -> "WantedSuites":
        """Args: told: variables for the chat template, as JSON; or empty. Raises BadInput before anything is loaded."""
        if not prompts and not named:
            raise BadInput("nothing to measure on: give at least one --prompts or --suite")
        if thinking not in ("", "on", "off"):
            raise BadInput(f"--thinking {thinking}: expected on or off")
        variables = variables_in(told, "--chat-template-kwargs")
        chat = ChatOptions(system, thinking == "on" if thinking else None, variables)
        return cls(prompts, [parse_suite(spec) for spec in named], folder, chat)

    def load(self, target: Target, *, max_new_tokens: int, limit: int | None, under: str = "") -> list[Suite]:
        """All of them; those without a prompt that can be asked too, as long as another has one.

        Args: under: the name of the target's adapter, which the suites' names then have."""
        chat = self.chat
        suites: list[Suite] = []
        names = [file_names(path) for path in self.prompts]
        for path in self.prompts:
            try:
                suites.append(load_suite(path, target, max_new_tokens=max_new_tokens, limit=limit, chat=chat))
            except NoUsablePrompt as error:
                suites.append(error.suite)
        for spec in self.named:
            suites += load_named(
                spec, target, folder=self.folder, max_new_tokens=max_new_tokens, limit=limit, chat=chat
            )
            given = [f"{spec.name}={spec.path}"] if spec.path else []
            names += [[suite.name, *given] for suite in suites[len(names) :]]
        for suite, name in zip(suites, distinct_names(names), strict=True):
            suite.name = f"{name} under {under}" if under else name
        if not any(suite.prompts for suite in suites):
            raise NoUsablePrompt(suites[0])
        template = target.tokenizer.chat_template or ""
        if self.chat.thinking is not None and "enable_thinking" not in str(template):
            warn("the target's chat template does not read enable_thinking: --thinking changes nothing")
        for suite in suites:
            if template and suite.questions and suite.template_hash is None:
                warn(
                    f"{suite.name}: rows of `prompt` are continued as plain text; for answers to them as by a server's "
                    "chat, give `messages` or `turns`, which go through the target's chat template"
                )
        return suites


def held_out(suites: Sequence[Suite], trees: Sequence[str]) -> list[Suite]:
    """The suites, without the prompts set aside for shaping trees, if any."""
    if not any(tree in SHAPED_TREES for tree in trees):
        return list(suites)
    rest = [hold_out(suite) for suite in suites]
    for suite in rest:
        warn(f"{len(suite.calibration)} prompts of {suite.name} shape trees, and are not measured")
    return rest


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
                Contender(named.name, named.drafter, self.with_cost(named, suite, config, tree), named.training)
                for named, tree in drafts
            ]
            names = ", ".join(dict.fromkeys(contender.name for contender in contenders))
            tick = progress(-(-len(suite.prompts) // config.batch_size), f"{names} on {suite.name}")
            results = measure_all(
                self.target, contenders, suite.filled(config.batch_size), config, on_batch=tick, store=self.store
            )
            tick()
            for draft, result in zip(drafts, results, strict=True):
                measured[draft[0].name, id(suite), config.batch_size, draft[1]] = result
        order = product(self.drafters, self.suites, configs, self.drafts.trees)
        keys = [(named.name, id(suite), config.batch_size, tree) for named, suite, config, tree in order]
        whole = [measured[key] for key in keys if key in measured]
        return [result for result, _ in whole], [row for _, rows in whole for row in rows]

    def setting(self, named: NamedDrafter, suite: Suite, config: MeasureConfig, tree_name: str) -> DraftSetting:
        """The setting with its tree; a resumed measurement keeps its tree, which may depend on step times."""
        if tree_name == "chain":
            return named.setting(config)
        if not suite.prompts:
            return DraftSetting(tree_name, named.setting(config).num_draft_tokens)
        shaping = {"tree": tree_name, "tree_nodes": self.drafts.tree_nodes, "shaped_on": suite.calibration}
        key = self.key("tree", named, suite, config, **shaping)
        record = self.store.get(key, TREE)
        if record is not None:
            tree = StaticTree(tuple(map(tuple, record["paths"])), record["sampled"])
            return DraftSetting(tree_name, tree.depth, tree)
        tree = named_tree(
            tree_name,
            self.target,
            named.drafter,
            suite.calibration,
            max_new_tokens=config.max_new_tokens,
            num_nodes=self.drafts.tree_nodes,
            num_draft_tokens=named.length or (config.setting.num_draft_tokens if config.setting else None),
        )
        assert tree is not None
        if isinstance(tree, StaticTree):
            self.store.add(key, TREE, asdict(tree))
        return DraftSetting(tree_name, tree.depth, tree)

    def with_cost(self, named: NamedDrafter, suite: Suite, config: MeasureConfig, tree_name: str) -> DraftSetting:
        """The setting; of a chain with what it costs to verify one more token, where that is to be minded: as a killed
        measurement had it, where there was one."""
        setting, cost = self.setting(named, suite, config, tree_name), self.drafts.verify_cost
        if not cost or "chain" not in tree_name or not named.drafter.estimates or not suite.prompts:
            return setting
        if cost != "measured":
            return replace(setting, verify_cost=float(cost))
        key = self.key("verify cost", named, suite, config, verify_cost=setting.num_draft_tokens)
        record = self.store.get(key, TREE)
        if record is None:
            longest = max(suite.prompts, key=len)
            measured = verify_cost(self.target, named.drafter, setting, longest, config, context=len(longest))
            record = {"verify_cost": measured}
            self.store.add(key, TREE, record)
        return replace(setting, verify_cost=record["verify_cost"])

    def key(self, engine: str, named: NamedDrafter, suite: Suite, config: MeasureConfig, **more: Any) -> str:
        """Of what the store keeps of a drafter on a suite before it is measured. more: settings that it depends on."""
        settings, how = {**asdict(config), **more}, {"name": named.name, "engine": engine, "store": self.store}
        return settings_key(self.target, named.drafter, suite, settings, **how)

    def compare_transformers(self) -> list[Result]:
        """transformers on every suite: its plain generation, and each drafter that it supports as well."""
        results = []
        drafters = [("none (generate)", None, self.config)]
        drafters += [(named.name, named.drafter, named.with_own_length(self.config)) for named in self.drafters]
        for (name, drafter, config), suite in product(drafters, self.suites):
            tick = progress(len(suite.prompts), f"transformers: {name} on {suite.name}")
            result = compare_transformers(
                self.target, drafter, suite, config, name=name, on_prompt=tick, store=self.store
            )
            if result is None:
                warn(f"transformers cannot draft with {name}: not compared")
                continue
            tick()
            results.append(result)
        return results

    def compare_llama_server(self, files: ServerFiles) -> list[Result]:
        """llama-server's plain decoding on every suite, beside our baseline and beside each drafter of ours."""
        if str(files.binary) == PACKAGE:
            warn(f"--compare: {PACKAGE} is built for any CPU of its kind; a build on this machine may be faster")
        results = []
        drafters = [("no drafts", None, self.config)]
        drafters += [
            (f"ours with {named.name}", named.drafter, named.with_own_length(self.config)) for named in self.drafters
        ]
        for (name, drafter, config), suite in product(drafters, self.suites):
            tick = progress(len(suite.prompts), f"llama.cpp, {name}, on {suite.name}")
            results.append(
                compare_llama_server(
                    self.target, drafter, suite, config, files, name=name, on_prompt=tick, store=self.store
                )
            )
            tick()
        return results


def measure_server(
    target: Target,
    files: ServerFiles,
    suites: Sequence[Suite],
    config: MeasureConfig,
    lengths: Sequence[int],
    store: BatchStore,
) -> list[Result]:
    """A GGUF head in llama-server, on every suite and at every K."""
    results = []
    for suite in suites:
        tick = progress(len(suite.prompts) * len(lengths), f"llama-server on {suite.name}")
        results += measure_served(target, files, suite, config, lengths, on_prompt=tick, store=store)
        tick()
    return results


def parse_yardstick(spec: str, target: str) -> ServerFiles | None:
    """`llama-server:PATH[:TARGET.gguf]` as files; None for `transformers` and for nothing.

    Args: target: `--target`, which is served where it is a GGUF file and the spec names none.
    Raises: BadInput on anything else, and on files that are not there.
    """
    if spec in ("", "transformers"):
        return None
    kind, _, rest = spec.partition(":")
    if kind != "llama-server" or not rest:
        raise BadInput(f"--compare {spec}: expected transformers or llama-server:PATH[:TARGET.gguf]")
    binary, file = (rest, target) if not rest.endswith(".gguf") else rest.rsplit(":", 1)
    if not file.endswith(".gguf"):
        how = "convert it once with llama.cpp's convert_hf_to_gguf.py, or export with --target-outtype"
        raise BadInput(f"--compare {spec}: name the target's GGUF file behind it, llama-server:PATH:TARGET.gguf; {how}")
    return ServerFiles(Path(binary), Path(file))


def report_all(target: Target, results: list[Result], rounds: list[Row], output: Path) -> None:
    """Write the report, as figures and as a page, and show it. Raises BadInput if every prompt failed."""
    if not any(result.num_prompts for result in results):
        first = results[0].failed[0]
        raise BadInput(f"nothing could be measured: {first.row}: {first.reason}")
    for problem in [*training_warnings(results), *lossless_warnings(results)]:
        warn(problem)
    console = PlainConsole()
    report = build_report(target, results)
    path = write_report(output, report, rounds)
    page = write_page(output, report)
    show(report, console)
    console.print(f"written to {path}, as a page to {page}")


def progress(total: int, what: str) -> Callable[[], object]:
    """A progress bar on stderr; each call advances it, and call `total` + 1 closes it."""
    bar = iter(track(range(total), escape(what), console=PlainConsole(stderr=True)))
    return lambda: next(bar, None)
