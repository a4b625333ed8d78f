"""The card of a pushed head: what it drafts for, how it was trained, what it was measured to save, how to serve it."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..configs.errors import BadInput

if TYPE_CHECKING:
    from ..eval.measurement.result import Result
    from ..eval.report.document import Report


def card(
    *,
    repo: str,
    family: str,
    base_model: str,
    commands: dict[str, str],
    recipe: dict[str, Any],
    data: dict[str, Any],
    report: "Report | None",
    notes: list[str],
) -> str:
    """README.md with its YAML head. report: with the results of this head; None: not measured."""
    name = repo.split("/")[-1]
    front: dict[str, Any] = {
        "base_model": base_model,
        "base_model_relation": "adapter",
        "library_name": "headstart",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-head", family],
    }
    if report:
        front["model-index"] = [{"name": name, "results": list(map(indexed, report.results))}]
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        f"A draft head ({family}) for speculative decoding on [{base_model}](https://huggingface.co/{base_model}), "
        "trained with Headstart. It changes how fast that model answers, not what it answers.",
    ]
    if commands:
        served = [f"{engine}:\n\n```\n{command}\n```" for engine, command in commands.items()]
        parts += ["## Serve it", *served, *notes]
    measured = table(report) if report else "Not measured yet: `headstart eval` does it on your prompts."
    parts += ["## Measured", measured]
    if data:
        parts += ["## Data", fenced(data)]
    if recipe:
        parts += ["## Recipe", fenced(recipe)]
    return "\n\n".join(parts) + "\n"


def indexed(result: "Result") -> dict[str, Any]:
    """One result as the hub's model-index has it."""
    values = {"acceptance_length": result.acceptance_length, "speedup": result.speedup}
    metrics = [
        {"type": key, "name": f"{key} ({settings(result)})", "value": round(value, 4)}
        for key, value in values.items()
        if value is not None
    ]
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": result.suite, "name": result.suite},
        "metrics": metrics,
    }


def settings(result: "Result") -> str:
    return f"{result.tree}, K {result.num_draft_tokens}, batch {result.batch_size}, temperature {result.temperature:g}"


def table(report: "Report") -> str:
    from ..eval.report.recommendation import number, speedup_words

    rows = ["| suite | settings | acceptance length | speedup [95 %] |", "|---|---|---|---|"]
    for result in report.results:
        cells = [result.suite, settings(result), number(result.acceptance_length), speedup_words(result)]
        rows.append(f"| {' | '.join(cells)} |")
    environment = report.environment
    where = f"With Headstart {environment.headstart} on {environment.device}, torch {environment.torch}."
    words = "Acceptance length: tokens per target forward; speedup: over the same engine without drafts."
    return "\n".join(rows) + f"\n\n{where} {words}"


def fenced(value: dict[str, Any]) -> str:
    return f"```yaml\n{yaml.safe_dump(value, sort_keys=False)}```"


def lossless_report(path: Path, *, family: str, fingerprint: str) -> "Report":
    """A report of `headstart eval` with only a head's lossless results.

    Raises: BadInput where it is no report, of another target, or has no such result.
    """
    from ..eval.report.document import read_report
    from ..eval.report.recommendation import has_lossless_rule

    report = read_report(path)
    if report.target.fingerprint != fingerprint:
        name, measured = report.target.name, report.target.fingerprint
        raise BadInput(f"--report {path}: measured on target {name} ({measured[:12]}), not the head's")
    results = [result for result in report.ours if result.drafter.startswith(family) and has_lossless_rule(result)]
    if not results:
        raise BadInput(f"--report {path}: no lossless result of a {family} head in it")
    return replace(report, results=results)


def without_paths(value: Any) -> Any:
    """A config without what is only true on the machine it was written on: local paths become their last part."""
    if isinstance(value, dict):
        return {key: without_paths(part) for key, part in value.items() if key != "output_dir"}
    if isinstance(value, list):
        return [without_paths(part) for part in value]
    if (
        isinstance(value, str)
        and len(value) < 256
        and (value.startswith(("/", "~", "./", "../")) or Path(value).exists())
    ):
        return Path(value).name
    return value
