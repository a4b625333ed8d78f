"""What `headstart eval` does between its options and its report: load the suites, measure, compare, write."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from ..configs.errors import BadInput

if TYPE_CHECKING:
    from ..eval.measurement.measure import MeasureConfig
    from ..eval.measurement.resume import Measured
    from ..eval.suites.named import SuiteSpec
    from ..eval.suites.prompts import Asking, Suite
    from ..heads.drafter import Drafter
    from ..heads.drafting import Tree
    from ..heads.target import Target


@dataclass(frozen=True)
class WantedSuites:
    """What the command line asks to be measured on. folder: where the files of named suites are."""

    prompts: Sequence[str]
    named: "Sequence[SuiteSpec]"
    folder: Path
    asking: "Asking"

    @classmethod
    def of(
        cls, prompts: Sequence[str], named: Sequence[str], folder: Path, *, system: str | None, thinking: str
    ) -> "WantedSuites":
        """Raises BadInput before anything is loaded."""
        from ..eval.suites.named import parse_suite
        from ..eval.suites.prompts import Asking

        if not prompts and not named:
            raise BadInput("nothing to measure on: give at least one --prompts or --suite")
        if thinking not in ("", "on", "off"):
            raise BadInput(f"--thinking {thinking}: expected on or off")
        asking = Asking(system, thinking == "on" if thinking else None)
        return cls(prompts, [parse_suite(spec) for spec in named], folder, asking)

    def load(self, target: "Target", *, max_new_tokens: int, limit: int | None) -> "list[Suite]":
        """All of them; those without a prompt that can be asked too, as long as another has one."""
        from ..eval.suites.named import load_named
        from ..eval.suites.prompts import NothingToAsk, load_suite

        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "limit": limit, "asking": self.asking}
        suites: list[Suite] = []
        for path in self.prompts:
            try:
                suites.append(load_suite(path, target, **how))
            except NothingToAsk as error:
                suites.append(error.suite)
        for spec in self.named:
            suites += load_named(spec, target, folder=self.folder, **how)
        if not any(suite.prompts for suite in suites):
            raise NothingToAsk(suites[0])
        template = target.tokenizer.chat_template or ""
        if self.asking.thinking is not None and "enable_thinking" not in str(template):
            warn("the target's chat template does not read enable_thinking: --thinking changes nothing")
        return suites


def warn(problem: str) -> None:
    print(f"headstart: {problem}", file=sys.stderr)


def say_resumed(store: "Measured") -> None:
    """That an earlier measurement into this folder was not finished."""
    if len(store):
        warn(f"{store.path}: {len(store)} batches of an unfinished measurement; those of these settings are kept")


def measure_all(
    target: "Target",
    drafters: "list[tuple[str, Drafter]]",
    suites: "list[Suite]",
    configs: "list[MeasureConfig]",
    trees: list[str],
    tree_nodes: int,
    store: "Measured",
    training: dict[str, dict[str, Any] | None],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every drafter on every suite in every way: the results, and the raw rounds. training: of each, by name."""
    from ..eval.measurement.measure import measure

    results, rounds = [], []
    for (name, drafter), suite, config, tree_name in product(drafters, suites, configs, trees):
        if tree_name != "chain" and not drafter.drafts_trees:
            continue  # `check_trees` has seen to it that some drafter drafts them
        config = replace(config, tree_name=tree_name)
        config = replace(config, tree=chosen_tree(target, drafter, suite, config, tree_nodes, name, store))
        tick = progress(-(-len(suite.prompts) // config.batch_size), f"{name} on {suite.name}")
        how: dict[str, Any] = {"name": name, "training": training[name], "on_batch": tick, "store": store}
        entry, raw = measure(target, drafter, suite, config, **how)
        tick()
        results.append(entry)
        rounds += raw
    return results, rounds


def chosen_tree(
    target: "Target",
    drafter: "Drafter",
    suite: "Suite",
    config: "MeasureConfig",
    tree_nodes: int,
    name: str,
    store: "Measured",
) -> "Tree | None":
    """The tree of config.tree_name: the one that a killed measurement began with, as step times shape some of them."""
    from ..eval.measurement.resume import TREE, settings_key, tree_from, tree_record
    from ..eval.measurement.tree_search import named_tree
    from ..heads.drafting import StaticTree

    if config.tree_name == "chain" or not suite.prompts:
        return None
    settings = {**asdict(config), "tree_nodes": tree_nodes}
    key = settings_key(target, drafter, suite, settings, name=name, engine="tree", store=store)
    record = store.get(key, TREE)
    if record is not None:
        return tree_from(record)
    tree = named_tree(
        config.tree_name,
        target,
        drafter,
        suite.prompts,
        max_new_tokens=config.max_new_tokens,
        num_nodes=tree_nodes,
        num_draft_tokens=config.num_draft_tokens,
    )
    if isinstance(tree, StaticTree):
        store.add(key, TREE, tree_record(tree))
    return tree


def compare_all(
    target: "Target",
    drafters: "list[tuple[str, Drafter]]",
    suites: "list[Suite]",
    config: "MeasureConfig",
    store: "Measured",
) -> list[dict[str, Any]]:
    """transformers on every suite: its plain generation, and each drafter that it has too."""
    from ..eval.measurement.transformers_baseline import compare_transformers

    results = []
    for (name, drafter), suite in product([("none (generate)", None), *drafters], suites):
        tick = progress(len(suite.prompts), f"transformers: {name} on {suite.name}")
        entry = compare_transformers(target, drafter, suite, config, name=name, on_prompt=tick, store=store)
        if entry is None:
            warn(f"transformers cannot draft with {name}: not compared")
            continue
        tick()
        results.append(entry)
    return results


def check_measured(results: list[dict[str, Any]]) -> None:
    """Raises BadInput where every prompt failed."""
    if not any(entry["num_prompts"] for entry in results):
        first = results[0]["failed"][0]
        raise BadInput(f"nothing could be measured: {first['row']}: {first['reason']}")


def report_all(target: "Target", results: list[dict[str, Any]], rounds: list[dict[str, Any]], output: Path) -> None:
    """Write the report, as figures and as a page, and show it."""
    from ..eval.report.document import build_report, show, write_report
    from ..eval.report.page import write_page

    console = Console()
    report = build_report(target, results)
    path = write_report(output, report, rounds)
    page = write_page(output, report)
    show(report, console)
    console.print(f"written to {path}, as a page to {page}")


def progress(total: int, what: str) -> Callable[[], object]:
    """A bar on stderr that each call moves on; one call more than `total` closes it."""
    bar = iter(track(range(total), what, console=Console(stderr=True)))
    return lambda: next(bar, None)
