"""The card of a pushed head: what it drafts for, how it was trained, what it was measured to save, how to serve it."""

import json
from pathlib import Path
from typing import Any

import yaml

from ..configs.errors import BadInput

METRICS = {"acceptance_length": "tokens per target forward", "speedup": "over the same engine without drafts"}


def card(
    *,
    repo: str,
    family: str,
    base_model: str,
    commands: dict[str, str],
    recipe: dict[str, Any],
    data: dict[str, Any],
    results: list[dict[str, Any]],
    environment: dict[str, Any],
    notes: list[str],
) -> str:
    """README.md with its YAML head. results: those of a report; environment: where they were measured."""
    name = repo.split("/")[-1]
    front: dict[str, Any] = {
        "base_model": base_model,
        "base_model_relation": "adapter",
        "library_name": "headstart",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-head", family],
    }
    if results:
        front["model-index"] = [{"name": name, "results": [indexed(entry) for entry in results]}]
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        f"A draft head ({family}) for speculative decoding on [{base_model}](https://huggingface.co/{base_model}), "
        "trained with Headstart. It changes how fast that model answers, not what it answers.",
    ]
    if commands:
        served = [f"{engine}:\n\n```\n{command}\n```" for engine, command in commands.items()]
        parts += ["## Serve it", *served, *notes]
    parts.append("## Measured")
    parts.append(
        table(results, environment) if results else "Not measured yet: `headstart eval` does it on your prompts."
    )
    if data:
        parts += ["## Data", fenced(data)]
    if recipe:
        parts += ["## Recipe", fenced(recipe)]
    return "\n\n".join(parts) + "\n"


def indexed(entry: dict[str, Any]) -> dict[str, Any]:
    """One result as the hub's model-index has it."""
    metrics = [
        {"type": key, "name": f"{key} ({settings(entry)})", "value": round(entry[key], 4)}
        for key in METRICS
        if entry[key] is not None
    ]
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": entry["suite"], "name": entry["suite"]},
        "metrics": metrics,
    }


def settings(entry: dict[str, Any]) -> str:
    return (
        f"{entry.get('tree', 'chain')}, K {entry['num_draft_tokens']}, batch {entry['batch_size']}, "
        f"temperature {entry['temperature']:g}"
    )


def table(results: list[dict[str, Any]], environment: dict[str, Any]) -> str:
    rows = ["| suite | settings | acceptance length | speedup [95 %] |", "|---|---|---|---|"]
    for entry in results:
        low, high = entry["speedup_ci95"]
        length, speedup = entry["acceptance_length"], entry["speedup"]
        cells = [entry["suite"], settings(entry), number(length), f"{number(speedup)} [{number(low)}, {number(high)}]"]
        rows.append(f"| {' | '.join(cells)} |")
    where = f"With Headstart {environment['headstart']} on {environment['device']}, torch {environment['torch']}."
    words = "; ".join(f"{key.replace('_', ' ')}: {what}" for key, what in METRICS.items())
    return "\n".join(rows) + f"\n\n{where} {words[0].upper()}{words[1:]}."


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def fenced(value: dict[str, Any]) -> str:
    return f"```yaml\n{yaml.safe_dump(value, sort_keys=False)}```"


def read_report(path: Path, *, family: str, fingerprint: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lossless results of a head in a report of `headstart eval`, and the environment.

    Raises: BadInput where it is no report, of another target, or has no such result.
    """
    try:
        report = json.loads(path.read_text())
        target, results, environment = report["target"], report["results"], report["environment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"--report {path}: no report of headstart eval: {type(error).__name__} {error}") from error
    if target["fingerprint"] != fingerprint:
        raise BadInput(
            f"--report {path}: measured on target {target['name']} ({target['fingerprint'][:12]}), not the head's"
        )
    chosen = [
        entry
        for entry in results
        if entry["engine"] == "headstart" and entry["drafter"].startswith(family) and entry["accept"] == "exact"
    ]
    if not chosen:
        raise BadInput(f"--report {path}: no lossless result of a {family} head in it")
    return chosen, environment


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
