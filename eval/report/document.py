"""What a measurement leaves behind: report.json, rounds.jsonl and the table on screen."""

import json
import os
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from ... import __version__
from ...configs.errors import BadInput
from ...heads.loading import quantization
from ...heads.target import Target
from ..measurement.bandwidth import copy_bandwidth, with_share
from ..measurement.sampling_check import SMALLEST_P

SCHEMA_VERSION = 1


def environment(target: Target) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "headstart": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device_name(target.device),
        "num_threads": torch.get_num_threads(),
        "num_cpus": os.cpu_count(),
        "copy_gigabytes_per_second": round(copy_bandwidth(target.device) / 1e9, 2),
    }


def device_name(device: torch.device) -> str:
    """The GPU's, or the CPU's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else (processor_name() or "cpu")


def processor_name() -> str:
    """The CPU's name, where the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def build_report(target: Target, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The document that docs/report_schema.md describes. Measures the machine's copy bandwidth, in under a second."""
    machine = environment(target)
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": machine,
        "target": about(target),
        "results": [with_share(entry, machine["copy_gigabytes_per_second"]) for entry in results],
    }


def training_warnings(results: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each result with contexts beyond the head's training, saying what is lost there."""
    lines = []
    for r in results:
        part = r.get("beyond_training")
        if part is not None:
            within = part["acceptance_length_within"]
            beside = "none as short was measured" if within is None else f"{within:.2f} in shorter ones"
            lines.append(
                f"{r['drafter']} on {r['suite']}, batch {r['batch_size']}: contexts longer than its training rows "
                f"({r['trained']['max_length']:,} tokens): acceptance length {part['acceptance_length']:.2f}, {beside}"
            )
    return lines


def about(target: Target) -> dict[str, Any]:
    """Which target was measured, and how it was loaded."""
    return {
        "name": target.name,
        "fingerprint": target.fingerprint,
        "is_adapted": target.is_adapted,
        "architecture": type(target.model).__name__,
        "num_parameters": sum(p.numel() for p in target.model.parameters()),
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": quantization(target.model.config),
        "device": str(target.device),
    }


def check_output(folder: str | Path) -> None:
    """Raises BadInput, before hours of measuring, where a report's folder cannot be made. Makes nothing."""
    nearest = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise BadInput(f"output {folder}: {nearest} is {'not writable' if nearest.is_dir() else 'a file'}")


def write_report(folder: str | Path, report: dict[str, Any], rounds: list[dict[str, Any]]) -> Path:
    """Write report.json and rounds.jsonl, each whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "rounds.jsonl", "".join(json.dumps(row) + "\n" for row in rounds))
    return write_whole(folder / "report.json", json.dumps(report, indent=2) + "\n")


def write_whole(path: Path, text: str) -> Path:
    """Replace a file's text in one step."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        unfinished = Path(file.name)
        try:
            file.write(text)
            file.close()
            unfinished.chmod(0o644)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def show(report: dict[str, Any], console: Any) -> None:
    """The table on a rich console, and under it what the columns mean."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    about, machine = report["target"], report["environment"]
    name = f"{about['name']} with the head's adapters" if about["is_adapted"] else about["name"]
    console.print(f"{name} ({about['dtype']}) on {machine['device']}, {machine['num_threads']} threads")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    for column in ("drafter", "suite", "tree"):
        table.add_column(column)
    for column in ("T/B/K", "length", "tok/s", "base", "speedup [95 %]", "lossless"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in report["results"]:
        low, high = r["speedup_ci95"]
        table.add_row(
            r["drafter"] if r["engine"] == "headstart" else f"{r['engine']}: {r['drafter']}",
            r["suite"],
            r.get("tree", "-"),
            f"{r['temperature']:g}/{r['batch_size']}/{r['num_draft_tokens']}",
            number(r["acceptance_length"]),
            number(r["tokens_per_second"], 0),
            number(r["baseline_tokens_per_second"], 0),
            f"{number(r['speedup'])} [{number(low)}, {number(high)}]",
            lossless_words(r),
        )
    console.print(table)
    console.print("T temperature, B rows at a time, K drafts deep; length: tokens per target forward;", soft_wrap=True)
    console.print(
        "lossless: texts that are the target's, or how likely sampled ones are to lie so far from it", soft_wrap=True
    )
    console.print(bandwidth_words(report))
    for line in failure_words(report["results"]):
        console.print(line, markup=False)
    for r in report["results"]:
        if r["engine"] != "headstart":
            console.print(
                f"{r['engine']}, {r['drafter']}, {r['suite']}: ours over theirs {number(r['ours_over_theirs'])}"
            )
            continue
        rates = " ".join(map(number, r["acceptance_rate"]))
        forced = r["teacher_forced_acceptance_length"]
        tail = "" if forced is None else f"; teacher-forced acceptance length {forced:.2f}"
        spread = "/".join(number(r[f"speedup_{which}"]) for which in ("p10", "median", "p90"))
        each = "prompt" if r["batch_size"] == 1 else "batch"
        console.print(
            f"{r['drafter']} {r.get('tree', '')} on {r['suite']}: speedup per {each} {spread} (p10/median/p90); "
            f"rate by position {rates}{tail}"
        )


def failure_words(results: list[dict[str, Any]]) -> list[str]:
    """A line for each result without some of its prompts: how many, and why the first of them."""
    lines = []
    for r in results:
        if r["failed"]:
            first, count = r["failed"][0], f"{len(r['failed'])} of {r['num_prompts'] + len(r['failed'])}"
            what = f"{count} prompts failed and are in no figure, the first {first['row']}: {first['reason']}"
            lines.append(f"{r['drafter']} on {r['suite']}: {what}")
    return lines


def bandwidth_words(report: dict[str, Any]) -> str:
    """One line: what the baselines read per second, beside what this machine copies."""
    shares = [r["baseline_bandwidth"]["share_of_copy"] for r in report["results"]]
    found = sorted({f"{share:.0%}" for share in shares if share is not None}, key=lambda words: float(words[:-1]))
    copied = f"{report['environment']['copy_gigabytes_per_second']:.1f} GB/s"
    return f"base reads weights and cache at {' to '.join(found[:: len(found) - 1 or 1]) or '-'} of a copy's {copied}"


def number(value: float | None, digits: int = 2) -> str:
    """A cell; `-` where there was nothing to measure."""
    return "-" if value is None else f"{value:.{digits}f}"


def lossless_words(entry: dict[str, Any]) -> str:
    """One cell: how many texts equal the baseline's, or how well sampled ones follow the target's distribution."""
    lossless, check = entry["lossless"], entry.get("sampling_check")
    if check and check["p_value"] is not None:
        return f"p {check['p_value']:.2g}" + ("" if check["p_value"] >= SMALLEST_P else " DEVIATES")
    if not lossless["checked"]:
        return "sampled"
    words = f"{lossless['identical']}/{lossless['checked']}"
    if lossless["explained"]:
        words += f" +{lossless['explained']} rounding"
    return words + (f", {lossless['unexplained']} UNEXPLAINED" if lossless["unexplained"] else "")
