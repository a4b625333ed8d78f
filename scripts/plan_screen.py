"""What `headstart plan` says at its end: how many drafts at which load, how sure that is, and what engines are told."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.files import write_text
from ..eval.figures.metrics import LEAST_TIMED
from ..eval.plan.planner import Plan
from ..eval.plan.prediction import Cell, RecommendedCell
from ..eval.report.conclusion import Conclusion, Table
from ..eval.report.page import page_template
from ..eval.report.results.document import short_name
from ..eval.report.results.drafter_words import drafter_words
from ..eval.report.results.one_result import counted_words, requests_words
from ..eval.report.screen import show_conclusion

OTHER_ENGINES = (
    "Timed in our own engine: rounds of vLLM and SGLang cost something else, so a head that does not pay here may pay "
    "there; headstart eval --engine vllm measures it."
)


def write_plan_page(folder: Path, planned: Plan, target: str, device: str) -> Path:
    speedups, basis = plan_table(planned), Table("", ["", ""], [], 2)
    page = page_template("decision.html.j2").render(
        conclusion=plan_conclusion(planned),
        heading=f"headstart plan: {short_name(target)} on {device}",
        report="",
        parts=[
            ("Speedup by drafts and load", speedups.caption.rstrip(":") + ".", replace(speedups, caption="Settings")),
            ("What this rests on", " ".join(f"{line[0].upper()}{line[1:]}." for line in basis_lines(planned)), basis),
        ],
        journal="plan.json",
        guide="docs/plan.md",
    )
    return write_text(folder / "plan.html", page)


def show_plan(planned: Plan, page: Path, console: Any, *, verbose: bool) -> None:
    """Print what the page begins with, and a table of the settings. Args: verbose: and what it rests on."""
    for line in (*basis_lines(planned), "") if verbose else ():
        console.print(line, markup=False, highlight=False)
    written = f"The page: {page}" + ("" if verbose else ". What it rests on: --verbose")
    show_conclusion(plan_conclusion(planned), plan_table(planned), written, console)


def plan_conclusion(planned: Plan) -> Conclusion:
    """What to draft at each number of requests."""
    words, reasons = [], []
    for advice in planned.recommendation:
        size, cell = requests_words(advice.cell.batch_size), advice.cell
        words.append(f"{'no drafts' if advice.is_off else setting_words(cell)} {size}")
        off = "Drafts off: the best is " if advice.is_off else ""
        known = (("predicted", cell.predicted_speedup), ("measured", cell.measured_speedup))
        said = ", ".join(f"{how} {speedup:.2f}" for how, speedup in known if speedup)
        figures = f"{said} times the speed{proof_text(advice)}"
        reasons.append(f"{size[0].upper()}{size[1:]}: {off}{setting_words(cell)}, {figures}.")
    missed = planned.budget.left_out
    cautions = [OTHER_ENGINES, *([f"No time for: {', '.join(missed)}; --seconds gives more."] if missed else [])]
    good = any(not advice.is_off for advice in planned.recommendation)
    headline = f"{drafter_words(planned.drafter)} on {planned.suite}: {'; '.join(words)}."
    return Conclusion(good, headline[0].upper() + headline[1:], "", "", reasons, cautions, engine_lines(planned))


def setting_words(cell: Cell) -> str:
    """`4 drafts`; `dynamic tree of 8`; with what goes by the drafter's confidence."""
    setting = cell.setting
    words = counted_words(setting.num_draft_tokens, "draft")
    if setting.tree is not None:
        words = f"{setting.tree_name} tree of {setting.num_drafted}"
    return words + (" by confidence" if cell.is_by_confidence else "")


def plan_table(planned: Plan) -> Table:
    """Predicted speedups by setting and number of requests; measured ones in brackets."""
    cells = {(cell.setting, cell.batch_size): cell for cell in planned.cells}
    sizes = sorted({size for _, size in cells})
    lengths = {accepted.setting: f"{accepted.length:.2f}" for accepted in planned.acceptance}
    rows = []
    for setting in dict.fromkeys(cell.setting for cell in planned.cells):
        here = [cells.get((setting, size)) for size in sizes]
        name = next(setting_words(cell) for cell in here if cell)
        rows.append([name, lengths.get(setting, "-"), *(speedup_text(cell) if cell else "-" for cell in here)])
    columns = ["drafts", "tokens per forward", *(requests_words(size).replace("\xa0", " ") for size in sizes)]
    return Table("Predicted speedup; measured in brackets:", columns, rows)


def engine_lines(planned: Plan) -> list[str]:
    """The plan as flags of engines, behind a `#`."""
    lines = []
    if most := max((part.num_draft_tokens for part in planned.vllm_schedule), default=0):
        keys = {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": planned.vllm_schedule}
        lines.append(f"# vLLM, in --speculative-config: {json.dumps(keys)[1:-1]}")
    for name, flags in (("SGLang", planned.sglang_flags), ("llama-server", planned.llamacpp_flags)):
        lines += [f"# {name}: {flags}"] if flags else []
    return lines


def basis_lines(planned: Plan) -> list[str]:
    """What the figures are based on, and how far predictions are from what was measured."""
    spent, passes = planned.budget, {time.num_timed for time in planned.step_times if time.setting}
    timed = f", {min(passes)} to {max(passes)} rounds timed of each setting" if passes else ""
    new = f"{planned.num_prompts} of {spent.num_prompts_given} prompts, {planned.max_new_tokens} new tokens each"
    used = f"{spent.seconds_used:.0f} of {spent.seconds:.0f}"
    lines = [f"predicted from {new}{timed}", f"took {used} s, and {spent.seconds_loading:.0f} s to load the target"]
    if planned.check.num_cells:
        lines.append(f"prediction against measurement in {planned.check.words}")
    lines += [
        f"{requests_words(cell.batch_size)}: {setting_words(cell)}, measured {cell.known_speedup:.2f} times the speed; "
        "to measure it again: headstart eval --verify-cost measured"
        for cell in planned.cells
        if cell.is_by_confidence
    ]
    return lines


def proof_text(advice: RecommendedCell) -> str:
    """The evidence for a recommendation: a confidence interval, or something weaker."""
    cell, unit = advice.cell, "prompt" if advice.cell.batch_size == 1 else "batch"
    low, high = cell.measured_ci95
    if advice.is_proved:
        proof = f", 95 % interval [{low:.2f}, {high:.2f}] over {counted_words(cell.num_timed or 0, unit)}"
        by_chance = advice.is_off and (low or 0) > 1
        return proof + (f", and from {cell.measured_low:.2f} as the best of several" if by_chance else "")
    if cell.measured_speedup is None:
        low, high = cell.predicted_ci95
        sure = "" if low is None or high is None else f", over these prompts [{low:.2f}, {high:.2f}]"
        return f"; predicted from {counted_words(cell.num_rounds, 'round')}{sure}, not measured"
    return f"; not proved: {counted_words(cell.num_timed or 0, unit)} timed, {LEAST_TIMED} are needed"


def speedup_text(cell: Cell) -> str:
    """`1.92 (1.88)`."""
    measured = "" if cell.measured_speedup is None else f"({cell.measured_speedup:.2f})"
    return f"{cell.predicted_speedup:.2f} {measured}".strip() if cell.predicted_speedup else measured
