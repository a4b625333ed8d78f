"""refit.html: one page on whether to replace the head, and why; also as a few lines for the terminal."""

from pathlib import Path

from ...eval.report.document import short_name
from ...eval.report.one_result import number
from ...eval.report.sections import Table, cell, percent
from ..unattended.clock import clock_text
from ..unattended.page import Part, interval_text, steps_part, write_page
from .drift import ALL
from .journal import Journal


def write(folder: Path, journal: Journal) -> Path:
    """Writes the page of a journal that has a decision; returns its path."""
    assert journal.decision is not None
    settings = journal.settings
    target, head = short_name(str(settings["target"])), short_name(str(settings["head"]))
    times = f"{clock_text(journal.seconds)} of {clock_text(float(settings['budget']))}"
    return write_page(
        folder / "refit.html",
        decision=journal.decision,
        heading=f"headstart refit: {head} on {target}, {times}",
        figure=(figure(journal), "tokens per forward of the new head over the old one's [95 % interval], new traffic"),
        report="",
        parts=[comparison(journal), between(journal), drift(journal), rows(journal), steps_part(journal.steps)],
        guide="docs/refit.md",
    )


def figure(journal: Journal) -> str:
    """The ratio on new traffic, such as `1.22 [1.11, 1.33]`; empty if nothing was compared."""
    whole = [each for each in journal.compared if (each.traffic, each.domain) == ("new", ALL)]
    return interval_text(whole[0].ratio, whole[0].interval) if whole else ""


def summary(journal: Journal, page: Path) -> list[str]:
    """The lines that are printed at the end of a run."""
    decision = journal.decision
    assert decision is not None
    return [decision.headline, *decision.reasons, *decision.cautions, *decision.commands, f"written to {page}"]


def comparison(journal: Journal) -> Part | None:
    """The section that compares both heads; None if nothing was compared."""
    table = [
        [
            each.traffic,
            each.domain,
            cell(each.conversations),
            number(each.before),
            number(each.after),
            interval_text(each.ratio, each.interval) or "-",
        ]
        for each in journal.compared
    ]
    columns = ["traffic", "domain", "conversations", "old head", "new head", "ratio [95 %]"]
    text = (
        "Tokens per forward of the target on the answers that were served, drafted greedily. Neither these "
        "conversations nor others with the same first question were trained on."
    )
    return ("The new head and the old one", text, Table("Held out", columns, table, num_labels=2)) if table else None


def between(journal: Journal) -> Part | None:
    """The section on the heads between the old one and the trained one; None if there was no choice."""
    ascending = sorted(journal.shares, key=lambda each: each.share)
    table = [[f"{each.share:.0%}", number(each.new), number(each.old)] for each in ascending]
    text = (
        "Tokens per forward of heads whose weights are this share of the way from the old head's to the trained one's, "
        "on validation rows. The new head is the best on new rows of those that keep at least 99.5 % of the old head's "
        "on old rows, if any does."
    )
    return ("How far from the old head", text, Table("Validation", ["share", "new", "old"], table)) if table else None


def drift(journal: Journal) -> Part:
    """The section on how well the old head drafts."""
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


def rows(journal: Journal) -> Part:
    """The section on the rows of the files, and on those left out."""
    found, foreign = journal.found, journal.foreign
    assert found is not None and foreign is not None
    table = [["answered conversations", cell(found.new)], ["held out", cell(found.held_out_new)]]
    table += [["old ones", cell(found.old)], ["old ones held out", cell(found.held_out_old)]]
    table += [["the same as another, or its beginning", cell(found.repeated)]]
    table += [["not this target's", cell(len(foreign.origins))], ["not read, for lack of time", cell(foreign.late)]]
    table += [[reason, cell(count)] for reason, count in {**found.unread, **foreign.refused}.items()]
    thresholds = ", ".join(f"{limit} at temperature {at}" for at, limit in foreign.thresholds.items())
    assumed = ""
    if foreign.served is not None:
        assumed = f"Answers without a temperature are taken as served at about {foreign.served}. "
    text = (
        "An answer is taken as not this target's if its typicality is below the limits found with the target's own "
        f"answers: {thresholds}. {assumed}refit.json lists those left out."
    )
    return "What was read", text, Table("Rows", ["", "rows"], table)
