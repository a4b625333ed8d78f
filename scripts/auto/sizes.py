"""K or tree by batch size: `headstart plan` of the chosen head on the held-out prompts."""

import json
from pathlib import Path

from ...eval.report.sections import Table
from ..unattended.page import Part
from .budget import SIZES_SHARE
from .journal import Machine

SIZES = (1, 4, 16)
LEAST_SECONDS = 30.0  # in which a plan says something
NO_BATCHES = ("llama.cpp",)  # engines that decode rows one by one as far as drafting goes


def planning_seconds(budget: float, *, engine: str) -> float:
    """Seconds that the plan may take, without the start of its command; 0 if no time is left."""
    seconds = SIZES_SHARE * budget
    return 0.0 if seconds < LEAST_SECONDS or engine in NO_BATCHES else round(seconds)


def plan_words(
    target: str, head: str, prompts: Path, output: Path, machine: Machine, *, seconds: float, max_new_tokens: int
) -> list[str]:
    """The command, for SIZES and the batch size that is served."""
    sizes = sorted({*SIZES, machine.batch_size})
    return [
        *("plan", "--target", target, "--dtype", machine.dtype, "--device", machine.device, "--head", head),
        *("--prompts", str(prompts), "--max-new-tokens", str(max_new_tokens), "--seconds", f"{seconds:.0f}"),
        *(word for size in sizes for word in ("--batch-size", str(size))),
        *("--output", str(output), "--overwrite"),
    ]


def sizes_part(plan: str) -> Part | None:
    """What a plan recommends, as a part of the page. Args: plan: its file; empty: there is none."""
    if not plan:
        return None
    found = json.loads(Path(plan).read_text())
    rows = []
    for advice in found["recommendation"]:
        speedup = advice["measured_speedup"] or advice["predicted_speedup"]
        how = "measured" if advice["measured_speedup"] else "predicted"
        what = f"none; the best is {advice['setting']}" if advice["off"] else advice["setting"]
        rows.append([f"{advice['batch_size']}", what, how, f"{speedup:.2f}"])
    text = "Of the head alone, in this engine, on held-out prompts; plan/plan.json has every setting."
    flags = found["vllm_schedule"]
    if any(length for _, _, length in flags):
        text += f" For vLLM: num_speculative_tokens_per_batch_size {json.dumps(flags)}."
    if found["sglang_flags"]:
        text += f" For SGLang: {found['sglang_flags']}."
    table = Table("What to draft at which batch size", ["batch", "drafts", "", "speedup"], rows, num_labels=3)
    return "By batch size", text, table
