"""The plan by batch size: runs `headstart plan` for the chosen head on the held-out prompts, and shows its result."""

import json
from pathlib import Path

from ...eval.report.sections import Table
from ..unattended.page import Part
from .budget import SIZES_SHARE
from .journal import Machine

SIZES = (1, 4, 16)  # batch sizes
LEAST_SECONDS = 30.0  # below which a plan is not worthwhile
NO_BATCHES = ("llama.cpp",)  # engines that draft for one row at a time


def planning_seconds(budget: float, *, engine: str) -> float:
    """Seconds for the plan, without the start of its command; 0 if there is too little time or the engine needs none.

    Args: budget: seconds of the whole run.
    """
    seconds = SIZES_SHARE * budget
    return 0.0 if seconds < LEAST_SECONDS or engine in NO_BATCHES else round(seconds)


def plan_arguments(
    target: str, head: str, prompts: Path, output: Path, machine: Machine, *, seconds: float, max_new_tokens: int
) -> list[str]:
    """Arguments of a `headstart plan` for SIZES and the batch size that is served."""
    sizes = sorted({*SIZES, machine.batch_size})
    return [
        *("plan", "--target", target, "--dtype", machine.dtype, "--device", machine.device, "--head", head),
        *("--prompts", str(prompts), "--max-new-tokens", str(max_new_tokens), "--seconds", f"{seconds:.0f}"),
        *(argument for size in sizes for argument in ("--batch-size", str(size))),
        *("--output", str(output), "--overwrite"),
    ]


def sizes_part(path: str) -> Part | None:
    """The recommendations of a plan, as a section of the page. Args: path: plan.json; empty: None is returned."""
    if not path:
        return None
    plan = json.loads(Path(path).read_text())
    rows = []
    for advice in plan["recommendation"]:
        speedup = advice["measured_speedup"] or advice["predicted_speedup"]
        how = "measured" if advice["measured_speedup"] else "predicted"
        drafts = f"none; the best is {advice['setting']}" if advice["off"] else advice["setting"]
        rows.append([f"{advice['batch_size']}", drafts, how, f"{speedup:.2f}"])
    text = "For the head alone, in Headstart's own engine, on held-out prompts; plan/plan.json has every setting."
    schedule = plan["vllm_schedule"]
    if any(num_draft_tokens for _, _, num_draft_tokens in schedule):
        text += f" For vLLM: num_speculative_tokens_per_batch_size {json.dumps(schedule)}."
    if plan["sglang_flags"]:
        text += f" For SGLang: {plan['sglang_flags']}."
    table = Table("What to draft at which batch size", ["batch", "drafts", "", "speedup"], rows, num_labels=3)
    return "By batch size", text, table
