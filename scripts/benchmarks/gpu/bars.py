"""What the GPU suite asks of the whole product, and whether figures hold what is asked."""

from collections.abc import Iterable, Mapping
from typing import Any

Bar = tuple[str, float]  # `>=` or `<=`, and what of
TREES = ("static", "dynamic")

# of a GPU of the H200 class
BARS: dict[str, Bar] = {
    "eagle3_chain_acceptance_length": (">=", 3.0),
    "eagle3_chain_speedup": (">=", 2.0),
    "medusa_tree_speedup": (">=", 1.5),
    "texts_unexplained": ("<=", 0),
}


def figures(entry: dict[str, Any]) -> dict[str, Any]:
    """Of a result of report.json, what the suite's own JSON keeps."""
    kept = "drafter suite tree temperature batch_size num_draft_tokens num_prompts acceptance_length acceptance_rate "
    kept += "teacher_forced_acceptance_length tokens_per_second baseline_tokens_per_second speedup speedup_ci95 timing "
    kept += "baseline_bandwidth steps lossless sampling_check failed"
    return {key: entry[key] for key in kept.split()}


def asked_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What the bars are about; of several domains the worst."""

    def worst(key: str, family: str, trees: Iterable[str]) -> float | None:
        best = {}
        for entry in results:
            if entry["drafter"] == family and entry["tree"] in trees and entry[key] is not None:
                best[entry["suite"]] = max(entry[key], best.get(entry["suite"], 0.0))
        return min(best.values(), default=None)

    return {
        "eagle3_chain_acceptance_length": worst("acceptance_length", "eagle3", ["chain"]),
        "eagle3_chain_speedup": worst("speedup", "eagle3", ["chain"]),
        "medusa_tree_speedup": worst("speedup", "medusa", TREES),
        "texts_unexplained": sum(entry["lossless"]["unexplained"] for entry in results),
    }


def judge(found: Mapping[str, Any], bars: Mapping[str, Bar] = BARS) -> dict[str, bool]:
    """Which of the bars that a set of figures is about are held; what could not be measured holds none."""
    return {
        name: found[name] is not None and (found[name] >= bar if way == ">=" else found[name] <= bar)
        for name, (way, bar) in bars.items()
        if name in found
    }
