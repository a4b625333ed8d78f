"""The pages auto.html and refit.html: the decision, its reasons, and the evidence; also as lines for the terminal."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...configs.files import write_text
from ...eval.report.document import short_name
from ...eval.report.one_result import number, ratio_words
from ...eval.report.page import page_template
from ...eval.report.sections import Table, cell, percent
from .clock import clock_text
from .comparing import ALL
from .journal import AutoJournal, Decision, RefitJournal, Score, known
from .reading import RefitRun
from .session import AutoRun, Session

Part = tuple[str, str, Table]  # a section of the page: title, text and table


def write_page(
    run: Session,
    decision: Decision,
    *,
    heading: str,
    figure: tuple[str, str],
    report: str = "",
    parts: Sequence[Part | None],
) -> Path:
    """Renders decision.html.j2 into auto.html or refit.html, with the commands that were run; returns its path.

    Args:
        heading: follows the command's name; the time used is added.
        figure: the main figure with its interval, and a caption; an empty figure is left out.
        report: link to the report of an evaluation, relative to the page; empty: none.
        parts: sections; None is left out.
    """
    time_used = f"{clock_text(run.journal.seconds)} of {clock_text(run.settings.budget)}"
    rows = [[step.command, clock_text(step.seconds), cell(step.exit_code)] for step in run.journal.steps]
    commands = Table("Commands", ["command", "time", "exit"], rows)
    steps = ("How to repeat it", "Each step is an ordinary command; its output is in logs/.", commands)
    name = run.command.removeprefix("headstart ")
    page = page_template("decision.html.j2", Path(__file__).parent).render(
        decision=decision,
        heading=f"{run.command}: {heading}, {time_used}",
        figure=figure,
        report=report,
        parts=[part for part in [*parts, steps] if part],
        journal=run.journal.file_name,
        guide=f"docs/{name}.md",
    )
    return write_text(run.folder / f"{name}.html", page)


def ratio_text(ratio: float | None, interval: Sequence[float | None]) -> str:
    """`1.92 [1.81, 2.03]`; empty if the ratio is None."""
    return "" if ratio is None else ratio_words(ratio, interval)


# headstart auto


def write_auto_page(run: AutoRun) -> list[str]:
    """Writes auto.html of a run that has a decision; returns the lines for the terminal."""
    journal, machine, decision = run.journal, run.machine, known(run.journal.decision)
    speedup = ratio_text(decision.speedup, decision.speedup_ci95)
    warnings = journal.answers.warnings if journal.answers else []
    target, device = short_name(run.settings.target), f"{machine.device}, {machine.dtype}"
    path = write_page(
        run,
        replace(decision, cautions=[*decision.cautions, *warnings]),
        heading=f"{target} on {device}, batch {machine.batch_size}",
        figure=(speedup, "speedup [95 % interval], on held-out prompts"),
        report="eval/report.html" if journal.report else "",
        parts=[
            candidates_part(run),
            learning_part(journal),
            sizes_part(journal.sizes.plan if journal.sizes else ""),
        ],
    )
    headline = decision.headline + (f": {speedup} times the speed" if decision.deploy else "")
    more = more_text(journal)
    return [headline, *decision.reasons, *([more] if more else []), *decision.commands, f"written to {path}"]


def candidates_part(run: AutoRun) -> Part:
    """What was measured of each candidate before training."""
    rows = [
        [
            candidate.name,
            candidate.out or "may pay",
            cell(candidate.parameters or None),
            "; ".join(f"K {cost.num_draft_tokens}: {cost.steps:.2f}" for cost in candidate.costs) or "-",
            f"{candidate.bound:.2f} at K {candidate.bound_num_draft_tokens}" if candidate.costs else "-",
            f"{candidate.step_seconds:.2f}" if candidate.costs else "-",
        ]
        for candidate in run.machine.candidates
    ]
    columns = ["candidate", "", "parameters", "a round, in steps of the target", "speedup at most", "s per step"]
    baseline = f"{run.machine.baseline_ms:.1f} ms here, at batch {run.machine.batch_size}"
    text = (
        f"A step of the target without drafts takes {baseline}. "
        "In a round, the candidate drafts K tokens and the target verifies them. Speedup at most: with four in five "
        "drafts accepted. The last column is the time of an optimizer step."
    )
    return "What can pay on this machine", text, Table("Candidates", columns, rows, num_labels=2)


def learning_part(journal: AutoJournal) -> Part | None:
    """The training data, and the scores of the candidates in each rung; None if no answers were made."""
    answers, trained = journal.answers, journal.trained
    if answers is None:
        return None
    rows = []
    for rung_number, rung in enumerate(journal.rungs, start=1):
        for score in rung.scores:
            outcome = score.problem or ("kept" if score.name in rung.kept else "dropped")
            rows.append([f"{rung_number}", score.name, outcome, *figures(score)])
    if trained and trained.score:
        rows.append(["last", trained.score.name, "chosen", *figures(trained.score)])
    end = "." if answers.complete else ": as many as fit into the time for answers."
    sampled = f" and {answers.sampled:,} more, sampled" if answers.sampled else ""
    text = f"{answers.written:,} answers of the target{sampled}, {answers.tokens:,} tokens{end}"
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
    if more := more_text(journal):
        text += f" {more}"
    columns = ["rung", "candidate", "", "steps", "tokens per round", "speedup predicted"]
    return "What they learnt", text, Table("Rungs of equal time", columns, rows, num_labels=3)


def more_text(journal: AutoJournal) -> str:
    """What a longer run would bring; empty if nothing was validated."""
    if not journal.trained or not journal.trained.with_more:
        return ""
    length, now = journal.trained.with_more, journal.trained.course[-1].acceptance_length
    return (
        f"With twice the answers and steps, the head alone would commit about {length} tokens per round, not {now:.2f}."
    )


def figures(score: Score) -> list[str]:
    """Cells: the steps, the tokens per round and the predicted speedup."""
    return [cell(score.steps), f"{score.acceptance_length:.2f}", f"{score.predicted_speedup:.2f}"]


def sizes_part(path: str) -> Part | None:
    """The recommendations of a plan by batch size. Args: path: plan.json; empty: None is returned."""
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


# headstart refit


def write_refit_page(run: RefitRun) -> list[str]:
    """Writes refit.html of a run that has a decision; returns the lines for the terminal."""
    journal, decision = run.journal, known(run.journal.decision)
    whole = [part for part in journal.compared if (part.traffic, part.domain) == ("new", ALL)]
    figure = ratio_text(whole[0].ratio, whole[0].interval) if whole else ""
    path = write_page(
        run,
        decision,
        heading=f"{short_name(run.settings.head)} on {short_name(run.settings.target)}",
        figure=(figure, "tokens per forward of the new head over the old one's [95 % interval], new traffic"),
        parts=[comparison_part(journal), shares_part(journal), drift_part(journal), rows_part(journal)],
    )
    return [decision.headline, *decision.reasons, *decision.cautions, *decision.commands, f"written to {path}"]


def comparison_part(journal: RefitJournal) -> Part | None:
    """Both heads on held-out answers; None if nothing was compared."""
    if not journal.compared:
        return None
    rows = [
        [
            part.traffic,
            part.domain,
            cell(part.conversations),
            number(part.before),
            number(part.after),
            ratio_text(part.ratio, part.interval) or "-",
        ]
        for part in journal.compared
    ]
    columns = ["traffic", "domain", "conversations", "old head", "new head", "ratio [95 %]"]
    text = (
        "Tokens per forward of the target on the answers that were served, drafted greedily. Neither these "
        "conversations nor others with the same first question were trained on."
    )
    return "The new head and the old one", text, Table("Held out", columns, rows, num_labels=2)


def shares_part(journal: RefitJournal) -> Part | None:
    """The heads between the old one and the trained one; None if there was no choice."""
    if not journal.shares:
        return None
    ascending = sorted(journal.shares, key=lambda head: head.share)
    rows = [[f"{head.share:.0%}", number(head.new), number(head.old)] for head in ascending]
    text = (
        "Tokens per forward of heads whose weights are this share of the way from the old head's to the trained one's, "
        "on validation rows. The new head is the best on new rows of those that keep at least 99.5 % of the old head's "
        "on old rows, if any does."
    )
    return "How far from the old head", text, Table("Validation", ["share", "new", "old"], rows)


def drift_part(journal: RefitJournal) -> Part:
    """How well the old head drafts."""
    table = [
        [
            part.traffic,
            part.domain,
            part.week,
            cell(part.rows),
            cell(part.tokens),
            number(part.acceptance_length),
            percent(part.covered),
        ]
        for part in journal.drift
    ]
    columns = ["traffic", "domain", "week", "rows", "tokens", "tokens per forward", "can be drafted"]
    text = (
        "Measured with the old head. On old rows that it was trained on, it looks better than it is. Can be drafted: "
        "the share of the tokens that are in its draft vocabulary."
    )
    return "Drift", text, Table("The old head", columns, table, num_labels=3)


def rows_part(journal: RefitJournal) -> Part:
    """The rows of the files, and those left out."""
    rows, foreign = known(journal.found), known(journal.foreign)
    table = [["answered conversations", cell(rows.new)], ["held out", cell(rows.held_out_new)]]
    table += [["old ones", cell(rows.old)], ["old ones held out", cell(rows.held_out_old)]]
    table += [["the same as another, or its beginning", cell(rows.repeated)]]
    table += [["not this target's", cell(len(foreign.origins))], ["not read, for lack of time", cell(foreign.late)]]
    table += [[reason, cell(count)] for reason, count in {**rows.unread, **foreign.refused}.items()]
    thresholds = ", ".join(f"{limit} at temperature {at}" for at, limit in foreign.thresholds.items())
    assumed = ""
    if foreign.served is not None:
        assumed = f"Answers without a temperature are taken as served at about {foreign.served}. "
    text = (
        "An answer is taken as not this target's if its typicality is below the limits found with the target's own "
        f"answers: {thresholds}. {assumed}refit.json lists those left out."
    )
    return "What was read", text, Table("Rows", ["", "rows"], table)
