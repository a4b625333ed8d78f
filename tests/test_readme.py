"""What README, CONTRIBUTING and docs tell people to type exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from headstart.benchmarks.pages import data_figures, readme_figures

ROOT = Path(__file__).parents[1]
GUIDES, REFERENCE = (sorted((ROOT / "docs").glob(pages)) for pages in ("*.md", "reference/*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDES, *REFERENCE]
TEXT = "\n".join(page.read_text() for page in PAGES)


def test_every_make_word_is_a_target():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    words = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)(?=[`\s,:])", TEXT))
    assert {"quickstart", "test", "check"} <= words
    assert words - {"much"} <= targets


def test_every_named_config_and_file_exists():
    folders = "configs|heads|docs|tests|scripts|benchmarks"
    for name in set(re.findall(rf"\b(?:{folders})/[\w/.]+\.(?:py|md|yaml|sh|json)\b", TEXT)):
        assert (ROOT / name).is_file(), name
    for name in set(re.findall(r"headstart (?:train|data \w+) ((?:runs|data)/\w+\.yaml)", TEXT)):
        assert (ROOT / "configs" / name).is_file(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_snippets_parse_and_import_what_exists(page):
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names), node.module


def test_a_page_is_read_in_one_go():
    """Tables for machines stand in docs/reference; docs/api.md is made from docstrings."""
    for page in GUIDES:
        num_lines = len(page.read_text().splitlines())
        assert page.name == "api.md" or num_lines <= 150, f"{page.name}: {num_lines} lines"


def test_links_between_pages_resolve():
    for page in PAGES:
        for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)


def test_the_figures_of_the_readme_are_those_of_the_results():
    results = ROOT / readme_figures.RESULTS
    readme = (ROOT / "README.md").read_text()
    assert readme_figures.with_figures(readme, readme_figures.table(results)) == readme, "run readme_figures"
    assert (ROOT / readme_figures.CHART).read_text() == readme_figures.chart(results), "run readme_figures"


def test_the_figures_of_the_page_on_data_are_those_of_the_results():
    curves = data_figures.read_curves(ROOT / data_figures.RESULTS)
    page = (ROOT / data_figures.PAGE).read_text()
    assert data_figures.page_of(page, ROOT) == page, "run data_figures"
    assert (ROOT / data_figures.CHART).read_text() == data_figures.chart(curves), "run data_figures"


def test_the_readme_is_one_page():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    names = r"\b(?:EAGLE|Medusa|DFlash|SmolLM|GSM|eagle)-?\d\w*|Python 3\.\d+|Apache-\d\.\d|\[[^\]]*\]\([^)]*\)"
    prose = re.sub(r"```.*?```", "", readme, flags=re.S)
    assert len(re.findall(r"\d+(?:[.,]\d+)*", re.sub(names, "", prose))) <= 60
