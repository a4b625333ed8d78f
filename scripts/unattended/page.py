"""The pages auto.html and refit.html: the decision, its reasons, and the evidence; also as lines for the terminal."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...base.errors import BadInput
from ...base.files import write_text
from ...eval.report.conclusion import Conclusion, Table
from ...eval.report.console import results_table
from ...eval.report.page import page_template
from ...eval.report.results.document import read_report, short_name
from ...eval.report.results.drafter_words import drafter_words
from ...eval.report.results.one_result import number, ratio_words, requests_words
from ...eval.report.screen import screen_lines
from ...eval.report.sections import cell
from .comparing import ALL
from .refit import RefitRun
from .running.clock import clock_text
from .running.journal import AutoJournal, Decision, RefitJournal, Score, known
from .running.session import AutoRun, Session

SELECTION = "Selection: all candidates train equally long, the better half goes on"
Part = tuple[str, str, Table]  # a section of the page: title, text and table


def write_page(
    run: Session, conclusion: Conclusion, *, heading: str, report: str = "", parts: Sequence[Part | None]
) -> Path:
    """Renders decision.html.j2 into auto.html or refit.html, with the commands that were run; returns its path.

    Args:
        heading: follows the command's name; the time used is added.
        report: path of report.json of an evaluation; empty: none.
        parts: sections; None is left out.
    """
    time_used = f"{clock_text(run.journal.seconds)} of {clock_text(run.settings.budget)}"
    rows = [[step.command, clock_text(step.seconds), cell(step.exit_code)] for step in run.journal.steps]
    commands = Table("Commands", ["command", "time", "exit"], rows)
    steps = ("How to repeat it", "Each step is an ordinary command; its output is in logs/.", commands)
    name = run.command.removeprefix("headstart ")
    page = page_template("decision.html.j2").render(
        conclusion=conclusion,
        heading=f"{run.command}: {heading}, {time_used}",
        report=f"{Path(report).parent.name}/report.html" if report else "",
        parts=[part for part in [*parts, steps] if part],
        journal=run.journal.file_name,
        guide=f"docs/{name}.md",
    )
    return write_text(run.folder / f"{name}.html", page)


def concluded(decision: Decision, figure: str, unit: str, *, more: Sequence[str] = ()) -> Conclusion:
    """A decision as its page and the terminal say it. Args: figure, unit: as in Conclusion. more: further cautions."""
    cautions = [*decision.cautions, *more]
    return Conclusion(decision.deploy, decision.headline, figure, unit, decision.reasons, cautions, decision.commands)


def ratio_text(ratio: float | None, interval: Sequence[float | None]) -> str:
    """`1.92 [1.81, 2.03]`; empty if the ratio is None."""
    return "" if ratio is None else ratio_words(ratio, interval)


# headstart auto


def write_auto_page(run: AutoRun) -> list[str]:
    """Writes auto.html of a run that has a decision; returns the lines for the terminal."""
    journal, machine, decision = run.journal, run.machine, known(run.journal.decision)
    speedup = ratio_text(decision.speedup, decision.speedup_ci95)
    warnings = journal.answers.warnings if journal.answers else []
    target, device = short_name(run.settings.target), f"{run.settings.device}, {machine.dtype}"
    conclusion = concluded(decision, speedup, "speedup [95 % interval], on held-out prompts", more=warnings)
    path = write_page(
        run,
        conclusion,
        heading=f"{target} on {device}, {requests_words(run.settings.batch_size)}",
        report=journal.report,
        parts=[candidates_part(run), learning_part(journal)],
    )
    return screen_lines(conclusion, measured_table(journal.report), f"The page: {path}")


def measured_table(report: str) -> Table | None:
    """What was measured at the end; None if nothing was, or a server was, whose report has another form."""
    with suppress(BadInput):
        return results_table(read_report(Path(report)).results) if report else None
    return None


def candidates_part(run: AutoRun) -> Part:
    """What was measured of each candidate before training."""
    rows = [
        [
            drafter_words(candidate.name),
            candidate.out or "may pay",
            cell(candidate.parameters or None),
            "; ".join(f"K {cost.num_draft_tokens}: {cost.steps:.2f}" for cost in candidate.costs) or "-",
            f"{candidate.bound:.2f} at K {candidate.bound_num_draft_tokens}" if candidate.costs else "-",
            f"{candidate.step_seconds:.2f}" if candidate.costs else "-",
        ]
        for candidate in run.machine.candidates
    ]
    costs = ["a round costs", "speedup if four in five drafts are accepted", "seconds of training per step"]
    columns = ["candidate", "verdict", "parameters", *costs]
    baseline = f"{run.machine.baseline_ms:.1f} ms here, {requests_words(run.settings.batch_size)}"
    text = (
        f"A step of the target without drafts takes {baseline}. "
        "In a round, the candidate drafts K tokens and the target verifies them. One that costs 1.24 takes as long as "
        "1.24 tokens without drafts, and must give more."
    )
    return "What can pay on this machine", text, Table("Candidates", columns, rows, num_labels=2)


def learning_part(journal: AutoJournal) -> Part | None:
    """The training data, and the scores of the candidates in each selection; None if no answers were made."""
    answers, trained = journal.answers, journal.trained
    if answers is None:
        return None
    rows = []
    for rung_number, rung in enumerate(journal.rungs, start=1):
        for score in rung.scores:
            outcome = score.problem or ("kept" if score.name in rung.kept else "dropped")
            rows.append([f"{rung_number}", drafter_words(score.name), outcome, *figures(score)])
    if trained and trained.score:
        rows.append(["last", drafter_words(trained.score.name), "chosen", *figures(trained.score)])
    end = "." if answers.complete else ": as many as fit into the time for answers."
    sampled = f" and {answers.sampled:,} more, sampled" if answers.sampled else ""
    text = f"{answers.written:,} answers of the target{sampled}, {answers.tokens:,} tokens{end}"
    if answers.draft_vocab_size:
        text += (
            f" {answers.draft_vocab_size:,} different tokens cover {answers.coverage:.1%} of them: the vocabulary of "
            "heads whose draft vocabulary is cut."
        )
    text += (
        " Tokens per round were measured by decoding answers to validation prompts. The last training starts from the "
        "head of the last selection, and counts its steps from 0."
    )
    columns = ["selection", "candidate", "verdict", "steps", "tokens per round", "speedup predicted"]
    return "What they learnt", text, Table(SELECTION, columns, rows, num_labels=3)


def figures(score: Score) -> list[str]:
    """Cells: the steps, the tokens per round and the predicted speedup."""
    return [cell(score.steps), f"{score.acceptance_length:.2f}", f"{score.predicted_speedup:.2f}"]


# headstart refit


def write_refit_page(run: RefitRun) -> list[str]:
    """Writes refit.html of a run that has a decision; returns the lines for the terminal."""
    journal, decision = run.journal, known(run.journal.decision)
    whole = [part for part in journal.compared if (part.traffic, part.domain) == ("new", ALL)]
    figure = ratio_text(whole[0].ratio, whole[0].interval) if whole else ""
    unit = "tokens per forward of the new head over the old one's [95 % interval], new traffic"
    conclusion, compared = concluded(decision, figure, unit), comparison_part(journal)
    path = write_page(
        run,
        conclusion,
        heading=f"{short_name(run.settings.head)} on {short_name(run.settings.target)}",
        report=journal.report,
        parts=[compared, rows_part(journal)],
    )
    return screen_lines(conclusion, compared[2] if compared else None, f"The page: {path}")


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


def rows_part(journal: RefitJournal) -> Part:
    """The rows of the files, and those left out."""
    rows = known(journal.found)
    table = [["answered conversations", cell(rows.new)], ["held out", cell(rows.held_out_new)]]
    table += [["old ones", cell(rows.old)], ["old ones held out", cell(rows.held_out_old)]]
    table += [["the same as another, or its beginning", cell(rows.repeated)]]
    table += [[reason, cell(count)] for reason, count in rows.unread.items()]
    return "What was read", "Rows of the files.", Table("Rows", ["", "rows"], table)
