"""auto.html: one page with the decision and the evidence for it; also as a few lines for the terminal."""

from dataclasses import replace
from pathlib import Path

from ...eval.report.document import short_name
from ...eval.report.sections import Table, cell
from ..unattended.clock import clock_words
from ..unattended.page import Part, figure_of, steps_part, write_page
from .journal import Journal
from .sizes import sizes_part


def write(folder: Path, journal: Journal) -> Path:
    """The page of a journal that has a decision."""
    decision, machine = journal.decision, journal.machine
    assert decision is not None and machine is not None
    warnings = journal.answers.warnings if journal.answers else []
    target, device = short_name(str(journal.settings["target"])), f"{machine.device}, {machine.dtype}"
    times = f"{clock_words(journal.seconds)} of {clock_words(float(journal.settings['budget']))}"
    return write_page(
        folder / "auto.html",
        decision=replace(decision, cautions=[*decision.cautions, *warnings]),
        heading=f"headstart auto: {target} on {device}, batch {machine.batch_size}, {times}",
        figure=(figure(journal), "speedup [95 % interval], on held-out prompts"),
        report="eval/report.html" if journal.evaluation else "",
        parts=[
            candidates(journal),
            learning(journal),
            sizes_part(journal.sizes.plan if journal.sizes else ""),
            steps_part(journal.steps),
        ],
        guide="docs/auto.md",
    )


def figure(journal: Journal) -> str:
    """`1.92 [1.81, 2.03]`; empty where nothing is to be deployed."""
    decision = journal.decision
    return "" if decision is None else figure_of(decision.speedup, decision.speedup_ci95)


def summary(journal: Journal, page: Path) -> list[str]:
    """The page in a few lines."""
    decision = journal.decision
    assert decision is not None
    lines = [decision.headline + (f": {figure(journal)} times the speed" if decision.deploy else "")]
    return [*lines, *decision.reasons, *decision.commands, f"written to {page}"]


def candidates(journal: Journal) -> Part:
    """What was measured before anything was learnt."""
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
        "A round drafts K tokens and has the target read them. At most: with four drafts in five accepted."
    )
    return "What can pay on this machine", text, Table("Candidates", columns, rows, num_labels=2)


def learning(journal: Journal) -> Part | None:
    """What each visit gave, and who was kept."""
    rows = []
    for number_of, rung in enumerate(journal.rungs, start=1):
        for score in rung.scores:
            fate = score.problem or ("kept" if score.name in rung.kept else "left")
            length, speedup = f"{score.acceptance_length:.2f}", f"{score.predicted_speedup:.2f}"
            rows.append([f"{number_of}", score.name, fate, cell(score.steps), length, speedup])
    chosen = journal.chosen
    if chosen and chosen.score:
        score = chosen.score
        length, speedup = f"{score.acceptance_length:.2f}", f"{score.predicted_speedup:.2f}"
        rows.append(["last", chosen.name, "chosen", cell(score.steps), length, speedup])
    answers = journal.answers
    if answers is None:
        return None
    end = "." if answers.complete else ": all that fitted into their share of the time."
    text = f"{answers.written} answers of the target, {answers.tokens:,} tokens{end}"
    if answers.given:
        text += f" {answers.given} chats came with answers."
    if answers.draft_vocab_size:
        text += (
            f" {answers.draft_vocab_size:,} different tokens cover {answers.coverage:.1%} of them: what heads with a "
            "cut vocabulary draft."
        )
    text += " Lengths are of answers to validation prompts, decoded; the last run starts anew from the head before it."
    columns = ["rung", "candidate", "", "steps", "tokens per round", "speedup predicted"]
    return "What they learnt", text, Table("Rungs of equal time", columns, rows, num_labels=3)
