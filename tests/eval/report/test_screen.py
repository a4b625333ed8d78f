"""The end of a command on a small terminal: what its page begins with, in words, and never more than fits."""

import html
import re
from pathlib import Path

import pytest
from headstart.eval.report.conclusion import Conclusion, Table
from headstart.eval.report.console import details, results_table
from headstart.eval.report.page import render
from headstart.eval.report.recommendation import conclude
from headstart.eval.report.results.document import read_report
from headstart.eval.report.results.drafter_words import drafter_words
from headstart.eval.report.screen import MOST_LINES, WIDTH, screen_lines

REPORTS = sorted((Path(__file__).parents[3] / "docs" / "results").glob("*/*report.json"))


def plain(text: str) -> str:
    """A page's or a screen's text in single spaces."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).replace("\\\n", " ").split())


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name + "-" + path.stem)
def test_the_screen_says_what_the_page_says(path):
    """Every sentence and command, of shipped reports; and the page says no other thing first."""
    report = read_report(path)
    conclusion = conclude(report.results, ['vllm serve MODEL --speculative-config \'{"a": "b"}\''])
    page = plain(render(report, conclusion))
    table = results_table(report.results)
    lines = screen_lines(conclusion, table, "The page: report.html")
    screen = plain("\n".join(lines))
    for sentence in (conclusion.headline, *conclusion.reasons, *conclusion.commands):
        assert plain(sentence) in page and plain(sentence) in screen
    shown = [caution for caution in conclusion.cautions if plain(caution) in screen]
    assert shown and all(plain(caution) in page for caution in conclusion.cautions)
    assert "K 7" not in screen and "+answers" not in screen and "·" not in screen, "words"
    assert len(lines) <= MOST_LINES and max(map(len, lines)) <= WIDTH


def test_verbose_adds_a_line_of_figures_for_each_result():
    """Its own: spreads, texts and rates of the shipped quickstart's report."""
    [path] = [path for path in REPORTS if path.name == "report.json" and "quickstart" in str(path.parent)][:1]
    results = read_report(path).results
    lines = [details(result) for result in results]
    assert len(set(lines)) == len(results) > 1
    for line, result in zip(lines, results, strict=True):
        assert f"texts {result.lossless.identical}/{result.lossless.checked}" in line
        assert f"{result.spread[1]:.2f}/" in line and f"rate by position {result.acceptance_rate[0]:.2f} " in line


def test_what_has_no_room_is_counted():
    """Cautions give way to the first rows of the table, and rows to what else there is."""
    long = "word " * 40
    conclusion = Conclusion(
        True, "Deploy it.", reasons=[long], cautions=[long] * 9, commands=["serve " + "--flag x " * 20]
    )
    table = Table("Caption:", ["drafter", "speedup [95 %]"], [[f"drafter {i}", "1.50 [1.40, 1.60]"] for i in range(40)])
    lines = screen_lines(conclusion, table, "The page: x")
    assert len(lines) == MOST_LINES and max(map(len, lines)) <= WIDTH
    [cautions], [rows] = ([line for line in lines if part in line] for part in ("more in the report", "more rows"))
    num_rows = sum(bool(re.match(r"drafter \d", line)) for line in lines)
    assert cautions == f"- and {9 - sum(line.startswith('- word') for line in lines)} more in the report"
    assert num_rows >= 3 and rows == f"and {40 - num_rows} more rows in the report"
    assert lines[-1] == "The page: x" and lines[0] == "Deploy it."


def test_a_command_over_several_lines_is_one_to_a_shell():
    lines = screen_lines(
        Conclusion(True, "x", commands=["vllm serve m --c '{\"a\": 1}' " + "--flag value " * 9]), None, "y"
    )
    start = lines.index("How to serve it:") + 1
    assert all(line.endswith(" \\") for line in lines[start:-2]) and "'{\"a\": 1}'" in lines[start]


@pytest.mark.parametrize("names", [("orders", "contrast"), ("a-suite-with-a-very-long-name.jsonl", "x")])
def test_wide_tables_are_shortened_not_wrapped(names):
    rows = [[f"runs: EAGLE-3 with look-ups ({'path/' * 9}{i})", name, "16", "7", "3.45", "12345", "3.12 [2.51, 3.88] !"]
            for i, name in enumerate(names)]  # fmt: skip
    columns = ["drafter", "traffic", "requests at a time", "drafts", "tokens per forward", "tokens per second",
               "speedup [95 %]"]  # fmt: skip
    lines = screen_lines(Conclusion(False, "x"), Table("", columns, rows, 2), "y")
    assert max(map(len, lines)) <= WIDTH and len(lines) == 1 + 1 + 3 + 2 + 2, "titles take three"
    assert all(line.endswith("3.12 [2.51, 3.88] !") for line in lines[-4:-2]), "figures stay whole"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eagle3", "EAGLE-3"),
        ("suffix+answers", "look-ups in answers"),
        ("suffix", "look-ups in the text"),
        ("hybrid+eagle3+answers", "EAGLE-3 with look-ups"),
        ("hybrid+block", "block head with look-ups in the text"),
        ("hybrid+answers", "a head with look-ups"),
        ("short: eagle3", "short: EAGLE-3"),
        ("eagle3:runs/a/final", "EAGLE-3 (runs/a/final)"),
        ("medusa#2", "Medusa 2"),
        ("of-your-own", "of-your-own"),
    ],
)
def test_drafters_are_called_by_words(name, words):
    assert drafter_words(name) == words
