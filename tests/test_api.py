"""The names that `import headstart` promises: few, lazy, where their table says, and described on a page."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import headstart
import pytest
import yaml
from headstart.benchmarks.pages import api_page

ROOT = Path(__file__).parents[1]


def test_a_dozen_names_at_most_each_where_the_table_says():
    assert len(headstart.__all__) <= 12
    assert set(headstart.__all__) == set(headstart.PLACES) <= set(dir(headstart))
    for name in headstart.__all__:
        assert getattr(headstart, name).__module__ == f"headstart.{headstart.PLACES[name]}", "where it is defined"
    with pytest.raises(AttributeError, match=r"headstart has no generat; its names: BadInput, .*generate"):
        getattr(headstart, "generat")  # noqa: B009
    with pytest.raises(ImportError):
        exec("from headstart import generat", {})


def test_importing_headstart_loads_nothing_heavy():
    asked = "import sys, headstart; print(sorted({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_page_is_made_from_todays_docstrings():
    named = [name for names in api_page.GROUPS.values() for name in names]
    assert sorted(named) == sorted(headstart.__all__), "each name in one group"
    assert (ROOT / api_page.PAGE).read_text() == api_page.page(), "run api_page"


def test_pages_use_public_names_alone():
    for page in (ROOT / "README.md", ROOT / api_page.PAGE):
        for snippet in re.findall(r"```python\n(import headstart\n.*?)```", page.read_text(), re.S):
            assert set(re.findall(r"headstart\.(\w+)", snippet)) <= set(headstart.__all__)
    assert "import headstart\n" in (ROOT / "README.md").read_text()


def test_one_version_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest and newest[1] == project["version"] == headstart.__version__


def test_no_dependency_has_an_upper_bound_but_the_next_major_version():
    """`torch<2.14` broke environments in which an engine asks for a newer one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for dependency in project["dependencies"]:
        assert re.fullmatch(r"[\w-]+>=[\d.]+(,<\d+)?", dependency), dependency
        assert not dependency.startswith("torch") or "<" not in dependency


def test_ci_on_a_forge_says_words_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    words = workflow["jobs"]["make"]["strategy"]["matrix"]["word"]
    in_ci = re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert set(in_ci) < set(words), "what .ci/run does, and the lowest versions"
    (release,) = re.findall(r"^release: (.*?) ##", makefile, re.M)
    assert set(words) <= set(release.split())
    assert all(re.search(rf"^{word}:", makefile, re.M) for word in [*words, *release.split()])
