"""Renders a finished run as auto.html, and as a few lines for the terminal."""

from dataclasses import replace
from pathlib import Path

from ...eval.report.document import short_name
from ...eval.report.sections import Table, cell
from ..unattended.clock import clock_text
from ..unattended.page import Part, interval_text, steps_part, write_page
from .journal import Journal, Score
from .sizes import sizes_part


def write(folder: Path, journal: Journal) -> Path:
    """Writes auto.html for a journal that has a decision; returns its path."""
    decision, machine = journal.decision, journal.machine
    assert decision is not None and machine is not None
    warnings = journal.answers.warnings if journal.answers else []
    target, device = short_name(str(journal.settings["target"])), f"{machine.device}, {machine.dtype}"
    times = f"{clock_text(journal.seconds)} of {clock_text(float(journal.settings['budget']))}"
    return write_page(
        folder / "auto.html",
        decision=replace(decision, cautions=[*decision.cautions, *warnings]),
        heading=f"headstart auto: {target} on {device}, batch {machine.batch_size}, {times}",
        figure=(speedup_text(journal), "speedup [95 % interval], on held-out prompts"),
        report="eval/report.html" if journal.evaluation else "",
        parts=[
            candidates_part(journal),
            learning_part(journal),
            sizes_part(journal.sizes.plan if journal.sizes else ""),
            steps_part(journal.steps),
        ],
        guide="docs/auto.md",
    )


def speedup_text(journal: Journal) -> str:
    """The speedup with its interval, such as `1.92 [1.81, 2.03]`; empty if nothing is to be deployed."""
    decision = journal.decision
    return "" if decision is None else interval_text(decision.speedup, decision.speedup_ci95)


def summary(journal: Journal, page: Path) -> list[str]:
    """Lines for the terminal: decision, reasons, commands, and where the page is."""
    decision = journal.decision
    assert decision is not None
    lines = [decision.headline + (f": {speedup_text(journal)} times the speed" if decision.deploy else "")]
    return [*lines, *decision.reasons, *decision.commands, f"written to {page}"]


def candidates_part(journal: Journal) -> Part:
    """What was measured of each candidate before training."""
    assert journal.machine is not None
    machine = journal.machine
    rows = [
        [
            each.name,
            each.out or "may pay",
            cell(each.parameters or None),
            "; ".join(f"K {cost.num_draft_tokens}: {cost.steps:.2f}" for cost in each.costs) or "-",
            f"{each.bound:.2f} at K {each.bound_num_draft_tokens}" if each.costs else "-",
            f"{each.step_seconds:.2f}" if each.costs else "-",
        ]
        for each in machine.candidates
    ]
    columns = ["candidate", "", "parameters", "a round, in steps of the target", "speedup at most", "s per step"]
    text = (
        f"A step of the target without drafts takes {machine.baseline_ms:.1f} ms here, at batch {machine.batch_size}. "
        "In a round, the candidate drafts K tokens and the target verifies them. Speedup at most: with four in five "
        "drafts accepted. The last column is the time of an optimizer step."
    )
    return "What can pay on this machine", text, Table("Candidates", columns, rows, num_labels=2)


def learning_part(journal: Journal) -> Part | None:
    """The training data, and the scores of the candidates in each rung; None if nothing was trained."""
    answers, chosen = journal.answers, journal.chosen
    if answers is None:
        return None
    rows = []
    for number, rung in enumerate(journal.rungs, start=1):
        for score in rung.scores:
            outcome = score.problem or ("kept" if score.name in rung.kept else "dropped")
            rows.append([f"{number}", score.name, outcome, *figures(score)])
    if chosen and chosen.score:
        rows.append(["last", chosen.name, "chosen", *figures(chosen.score)])
    end = "." if answers.complete else ": as many as fit into the time for answers."
    more = f" and {answers.sampled:,} more, sampled" if answers.sampled else ""
    text = f"{answers.written:,} answers of the target{more}, {answers.tokens:,} tokens{end}"
    if answers.given:
        text += f" {answers.given} chats were given with answers."
    if answers.draft_vocab_size:
        text += (
            f" {answers.draft_vocab_size:,} different tokens cover {answers.coverage:.1%} of them: the vocabulary of "
            "heads whose draft vocabulary is cut."
        )
    text += (
        " Tokens per round were measured by decoding answers to validation prompts. The last training starts from the "
        "head of the last rung, and counts its steps from 0."
    )
    columns = ["rung", "candidate", "", "steps", "tokens per round", "speedup predicted"]
    return "What they learnt", text, Table("Rungs of equal time", columns, rows, num_labels=3)


def figures(score: Score) -> list[str]:
    return [cell(score.steps), f"{score.acceptance_length:.2f}", f"{score.predicted_speedup:.2f}"]
