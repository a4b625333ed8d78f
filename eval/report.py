"""What a measurement leaves behind: report.json, rounds.jsonl and the table on screen."""

import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..heads.target import Target

SCHEMA_VERSION = 1


def environment(target: Target) -> dict[str, Any]:
    """What the figures depend on."""
    cuda = target.device.type == "cuda"
    return {
        "headstart": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(target.device) if cuda else (processor_name() or "cpu"),
        "num_threads": torch.get_num_threads(),
        "num_cpus": os.cpu_count(),
    }


def processor_name() -> str:
    """The CPU's name, where the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def build_report(target: Target, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The document that docs/report_schema.md describes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": environment(target),
        "target": {
            "name": target.name,
            "fingerprint": target.fingerprint,
            "architecture": type(target.model).__name__,
            "num_parameters": sum(p.numel() for p in target.model.parameters()),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
        },
        "results": results,
    }


def write_report(folder: str | Path, report: dict[str, Any], rounds: list[dict[str, Any]]) -> Path:
    """Write report.json and rounds.jsonl, each whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "rounds.jsonl", "".join(json.dumps(row) + "\n" for row in rounds))
    return write_whole(folder / "report.json", json.dumps(report, indent=2) + "\n")


def write_whole(path: Path, text: str) -> Path:
    """Replace a file's text in one step."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return path


def show(report: dict[str, Any], console: Console) -> None:
    """The table on screen."""
    about, machine = report["target"], report["environment"]
    table = Table(title=f"{about['name']} ({about['dtype']}) on {machine['device']}, {machine['num_threads']} threads")
    for column in ("drafter", "suite", "T", "batch", "K"):
        table.add_column(column)
    for column in ("acceptance length", "by position", "tokens/s", "baseline", "speedup [95 %]", "lossless"):
        table.add_column(column, justify="right")
    for r in report["results"]:
        rates = " ".join("-" if x is None else f"{x:.2f}" for x in r["acceptance_rate"])
        low, high = r["speedup_ci95"]
        length = r["acceptance_length"]
        table.add_row(
            r["drafter"],
            r["suite"],
            f"{r['temperature']:g}",
            str(r["batch_size"]),
            str(r["num_draft_tokens"]),
            "-" if length is None else f"{length:.2f}",
            rates,
            str(r["tokens_per_second"]),
            str(r["baseline_tokens_per_second"]),
            f"{r['speedup']:.2f} [{low:.2f}, {high:.2f}]",
            lossless_words(r["lossless"]),
        )
    console.print(table)


def lossless_words(lossless: dict[str, Any]) -> str:
    """One cell: how many texts equal the baseline's."""
    if not lossless["checked"]:
        return "not checked at T > 0"
    words = f"{lossless['identical']}/{lossless['checked']} identical"
    if lossless["explained"]:
        words += f", {lossless['explained']} rounding"
    return words + (f", {lossless['unexplained']} UNEXPLAINED" if lossless["unexplained"] else "")
